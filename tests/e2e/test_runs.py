"""Whole runs end as they should, whatever happens to their processes, and leave nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.kills import PLAIN_LEARNER
from tests.e2e.runs import LIMIT_S, Run, write

from sao._core import ledger_history
from sao.runtime import folders

METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A run that went to its end undisturbed."""
    run = Run(write(tmp_path_factory.mktemp("finished"), tiny_model), "learner.save_every_steps=2")
    run.until("step")
    run.private = run.private_folders()
    assert run.wait() == 0, run.output.read_text()
    return run


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[object]:
    runs = []

    def begin(*overrides: str, plain: bool = False) -> Run:
        runs.append(Run(write(tmp_path, tiny_model), *overrides, plain=plain))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait(LIMIT_S)
        for process in run.family:
            if process.is_running():
                process.kill()


def test_a_run_records_what_happened(finished):
    steps = finished.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [record["step"] for record in finished.records("eval")] == [0, 2, 4]
    assert all(record["n"] + record["failed"] == 4 for record in finished.records("eval"))
    (end,) = finished.records("end")
    assert end["exit_code"] == 0
    assert steps[-1]["step/version"] == 3, "one critic-only step, then a version a step"
    assert max(step["lag/max"] for step in steps) >= 1, "generators went on while the learner worked"
    assert max(step["lag/max"] for step in steps) <= 2
    gaps = [step["logprob_gap/max"] for step in steps if "logprob_gap/max" in step]
    assert gaps and max(gaps) < 1e-4, "engine and learner compute the same model"
    for step in steps:
        dropped = sum(value for name, value in step.items() if name.startswith("broker/tokens_dropped/"))
        parts = [step[f"broker/tokens_{name}"] for name in ("trained", "masked", "held")]
        assert step["broker/tokens_sampled"] == sum(parts) + dropped


def test_a_run_leaves_its_folder_and_nothing_else(finished):
    assert finished.leftovers() == []
    assert len(finished.private) == 2 and not [path for path in finished.private if path.exists()]
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {
        *("config.json", "models.json", "metrics.jsonl", "curves.png", "report.html"),
        *("journal", "logs", "checkpoints", "tensorboard"),
    }
    assert {path.name for path in (finished.folder / "logs").iterdir()} == {"broker.log", "learner.log", "g0.log"}
    assert "step 4/4" in finished.output.read_text()


def test_every_documented_metric_is_recorded_and_every_recorded_one_documented(finished):
    recorded = {name for step in finished.records("step") for name in step} - {"kind", "time_s", "step"}
    documented = set()
    for row in re.findall(r"^\| (`.*?) \|", METRICS.read_text(), re.MULTILINE):
        first = re.findall(r"`([^`]+)`", row)
        documented |= {name if "/" in name else f"broker/survival_decile/{name}" for name in first}
    documented = {name for name in documented if "/" in name and name != "broker/survival_decile/step"}
    patterns = {
        name: re.compile(re.sub(r"[A-Z]{3,}", r"[\\w.-]+", re.sub(r"_\d$", r"_\\d+", name)) + "$")
        for name in documented
    }
    patterns |= {"deciles": re.compile(r"broker/survival_decile/\d$")}
    assert {name for name in recorded if not any(p.match(name) for p in patterns.values())} == set()
    # These need failures, many rollouts, rewards that differ, compaction, or agents.
    rare = ("REASON", "survival_decile", "deciles", "explained_variance", "summary_tokens", "drift")
    never = {name for name, p in patterns.items() if not any(p.match(done) for done in recorded)}
    assert {name for name in never if not any(word in name for word in rare)} == set()


def test_the_model_that_a_run_leaves_can_be_measured(finished):
    models = sorted((finished.folder / "checkpoints").iterdir())
    assert [model.name for model in models] == ["step-2", "step-4"]
    command = [sys.executable, "-m", "sao.cli", "eval", str(models[-1]), str(finished.folder.parent / "run.toml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert re.match(r"held-out success \d\.\d{3} \(95% between .*, n = 4\)\nmean reward", result.stdout)


def test_an_interrupted_run_leaves_nothing(start):
    run = start("run.steps=1000")
    run.until("step", count=2)
    private = run.private_folders()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert time.monotonic() - began < 15
    assert run.leftovers() == [] and not [path for path in private if path.exists()]
    assert (run.folder / "curves.png").exists() and run.records("end")[0]["exit_code"] == 130
    assert "--resume" in run.output.read_text().splitlines()[-1]


def test_a_killed_learner_ends_the_run_by_name_where_it_is_not_started_again(start):
    run = start("run.steps=1000", "run.restart_killed=false", plain=True)
    run.until("step")
    run.actor(PLAIN_LEARNER).kill()
    assert run.wait() == 1
    assert "learner ended unexpectedly (killed by SIGKILL)" in run.output.read_text()
    assert run.leftovers() == []


def test_whoever_is_killed_is_started_again_and_nothing_is_lost(start):
    run = start("run.steps=12", "learner.save_every_steps=4", "staleness.order='window'", "generator.count=2")
    run.until("step", count=2)
    run.actor("g0").kill()
    run.until("event", "incarnation 1")
    run.actor("sao.broker").kill()
    run.until("event", "broker: goes on after step")
    before = len(run.records("step"))
    run.until("step", count=before + 2)
    run.actor("sao.learner").kill()
    run.until("event", "learner ended unexpectedly (killed by SIGKILL); started again")
    assert run.wait() == 0, run.output.read_text()
    _, history = ledger_history(run.folder / "journal")
    assert [step["step"] for step in history] == list(range(1, 13))
    trained = [ordinal for step in history for ordinal, _ in step["tasks"]]
    assert sorted(trained) == list(range(8 * 12))
    assert run.leftovers() == [] and len(list((run.folder / "journal").iterdir())) == 1


def test_when_the_supervisor_is_killed_everything_ends_within_10_s(start):
    run = start("run.steps=1000", plain=True)
    run.until("step")
    private = run.private_folders()
    run.process.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while run.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run.leftovers() == []
    found = set(folders.stale())
    assert not [path for path in private if path not in found and path.exists()]  # another start may have removed them
    folders.remove_stale()
    assert not [path for path in private if path.exists()]


def test_an_environment_that_always_fails_ends_the_run_by_name(start):
    run = start("env.name='failing_env:Failing'", "run.max_failures_in_a_row=6", plain=True)
    assert run.wait() == 1
    last = run.records("end")[0]["reason"]
    assert "failing_env:Failing" in last and "grader_down" in last and "Traceback" not in run.output.read_text()
    assert run.leftovers() == []
