"""Settings of the whole suite, and fixtures that several parts share."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A suite that was started in the background or under nohup ignores these, and what it starts would, too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Property tests are not timed, since a test machine may be shared and slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

EMPTY_SAFETENSORS = (2).to_bytes(8, "little") + b"{}"  # a whole file without a tensor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the real vLLM go first, then whole runs: with several workers no long group is left for the end."""
    order = {"vllm": 0, "e2e": 1}
    items.sort(key=lambda item: order.get(_group(item.nodeid), order.get(item.path.parent.name, len(order))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `pytest -n N`: the tests of a group share a worker, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def _group(nodeid: str) -> str:
    """The file of a test, since its tests share fixtures; one group for all with vLLM, whose engines take gigabytes."""
    file = nodeid.partition("::")[0]
    return "vllm" if _uses_vllm(file) else file


@cache
def _uses_vllm(file: str) -> bool:
    return "pytest.mark.vllm" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports that a worker can send: captured output may hold halves of surrogate pairs, as some tests use."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the output with the tests that did not run here, by reason, so that none is left out in silence."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    skipped = Counter[tuple[str, str]]()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: "), report.nodeid.partition("::")[0]] += 1
    for (reason, file), count in sorted(skipped.items()):
        reporter.write_line(f"NOT RUN: {file}, {count} test{'s' * (count > 1)}: {reason}")


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_collected_again() -> None:
    """What modules before have left (torch, engines) would be walked through at every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: random Llama (48 tokens, 2 layers, width 64, grouped-query attention), tokenizer, ChatML."""
    from tiny_model import make_folder

    return make_folder(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that looks like a model's, for what does not load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(EMPTY_SAFETENSORS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture
def run_file(tmp_path: Path, model_folder: Path) -> Path:
    """A run file for that folder."""
    path = tmp_path / "run.toml"
    text = f"[run]\ndir = '{tmp_path / 'runs'}'\nname = 'r'\n[model]\npath = '{model_folder}'\n[env]\nname = 'lookup'\n"
    path.write_text(text)
    return path
