"""Settings of the whole suite, and fixtures that several parts share."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Property tests are not timed, since a test machine may be shared and slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: tests of a file stay together (they share fixtures), and so do all tests with the
    real vLLM (each engine takes a core and gigabytes). Groups that take long go first, so that no worker ends alone."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    order = ["vllm", "e2e"]  # then all others

    def group(item: pytest.Item) -> str:
        return "vllm" if item.get_closest_marker("vllm") else item.path.parent.name

    items.sort(key=lambda item: order.index(group(item)) if group(item) in order else len(order))
    for item in items:
        item.add_marker(pytest.mark.xdist_group("vllm" if group(item) == "vllm" else item.location[0]))


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
    (folder / "model.safetensors").write_bytes(b"\0" * 16)
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
