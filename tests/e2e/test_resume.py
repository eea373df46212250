"""Whole runs that are killed and go on: the same tasks as an undisturbed run, each exactly once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.chaos import Chaos
from tests.e2e.kills import RUN, Story
from tests.e2e.runs import LIMIT_S

from sao.storage.checkpoints import newest
from sao.telemetry import sinks

pytestmark = pytest.mark.timeout(300)


def sao(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | variables
    command = [sys.executable, "-m", "sao.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def records(folder: Path, kind: str) -> list[dict]:
    return [record for record in sinks.read(folder / "r" / "metrics.jsonl") if record["kind"] == kind]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path, tiny_model, seed):
    """A few kills only; `bench/kills.py` makes 200."""
    story = Story(tmp_path, tiny_model, "plain", seed, steps=10, order=("completion", "window")[seed % 2])
    story.play(4, slowest_s=2.0)
    story.check()
    assert story.kills.total() >= 1, story.lives


def test_an_undisturbed_run_trains_the_tasks_that_the_others_are_held_to(tmp_path, tiny_model):
    story = Story(tmp_path, tiny_model, "plain", 0, steps=10)
    assert story.start(None) == 0
    story.check()
    assert not story.kills


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, tiny_model) -> Path:
    """A run with the real learner whose second checkpoint was cut off; it goes on with two ranks, deterministic."""
    folder = tmp_path_factory.mktemp("resumed")
    values = {"folder": str(folder), "model": str(tiny_model), "seed": 3, "steps": 8, "every": 2}
    (folder / "run.toml").write_text(RUN.format(**values, order="window"))
    more = ["learner.deterministic=true", "telemetry.keep_trajectories=8", "learner.checkpoints_kept=4"]
    killed = sao(folder, "train", "run.toml", *more, SAO_KILL_AT="save.manifest:2")
    assert killed.returncode == 1 and "learner ended unexpectedly (killed by SIGKILL)" in killed.stdout
    again = sao(folder, "train", "run.toml", "--resume", "learner.ranks=2", *more)
    assert again.returncode == 0, again.stdout + again.stderr
    (folder / "output.txt").write_text(again.stdout)
    return folder


def test_a_run_goes_on_after_its_newest_complete_checkpoint(resumed):
    output = (resumed / "output.txt").read_text()
    assert "step-4: its save was cut off" in output
    assert re.search(r"resumed after step 2, policy version 1, from .*step-2; [1-9] later steps are lost", output)
    (resume,) = records(resumed, "resume")
    assert (resume["step"], resume["version"]) == (2, 1)
    steps = [r["step"] for r in sinks.surviving(sinks.read(resumed / "r" / "metrics.jsonl")) if r["kind"] == "step"]
    assert steps == list(range(1, 9))
    versions = [r["step/version"] for r in records(resumed, "step")]
    assert versions[-1] == 7 and max(r["lag/max"] for r in records(resumed, "step")) <= 2
    Story(resumed, resumed, "torch", 3, steps=8).check()


def test_a_step_is_replayed_to_the_bit_and_what_is_missing_is_said(resumed):
    run = str(resumed / "r")
    found = sao(resumed, "replay", run, "6")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 6 from the checkpoint of step 4, 2 steps on 2 ranks" in found.stdout
    loss = next(r for r in reversed(records(resumed, "step")) if r["step"] == 6)["loss/policy"]
    assert loss != 0 and f"loss/policy {loss!r}" in found.stdout
    assert re.search(r"the same to the bit: \d\d metrics, 1\d arrays, the weights", found.stdout)
    absent = sao(resumed, "replay", run, "9")
    assert absent.returncode == 2 and "step 9 is not recorded" in absent.stderr
    record = resumed / "r" / "trajectories" / "step-000005.safetensors"
    hidden = record.rename(record.with_name("hidden"))
    cut = sao(resumed, "replay", run, "6")
    hidden.rename(record)
    assert cut.returncode == 2 and "a checkpoint of step 5, or an earlier one and the records" in cut.stderr


@pytest.mark.slow
def test_a_step_that_is_not_the_same_is_said_to_differ(resumed, tmp_path):
    from sao.telemetry.recording import read_step, write_step

    path = resumed / "r" / "trajectories" / "step-000008.safetensors"
    before = path.read_bytes()
    record = read_step(path)
    meta = json.loads(json.dumps(record.meta))
    meta["metrics"]["loss/policy"] += 1e-16 + abs(meta["metrics"]["loss/policy"]) * 1e-15
    write_step(path.parent, 8, record.frames, record.arrays, meta)
    found = sao(resumed, "replay", str(resumed / "r"), "8")
    path.write_bytes(before)
    assert found.returncode == 1 and "step 8: loss/policy: recorded" in found.stdout


@pytest.mark.slow
def test_a_disk_that_is_full_is_said_and_training_goes_on(tmp_path, tiny_model):
    values = {"folder": str(tmp_path), "model": str(tiny_model), "seed": 3, "steps": 6, "every": 2}
    (tmp_path / "run.toml").write_text(RUN.format(**values, order="completion"))
    run = sao(tmp_path, "train", "run.toml", "run.disk_patience_s=0.0", SAO_FAIL_AT="save.state:2")
    assert run.returncode == 0, run.stdout + run.stderr
    (event,) = [r for r in records(tmp_path, "event") if r["level"] == "error"]
    assert "checkpoint not saved: step 4" in event["text"] and "No space left on device" in event["text"]
    assert {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()} == {"step-2", "step-6"}
    assert len(records(tmp_path, "step")) == 6


@pytest.mark.slow
def test_when_the_last_checkpoint_cannot_be_saved_the_run_has_failed(tmp_path, tiny_model):
    values = {"folder": str(tmp_path), "model": str(tiny_model), "seed": 3, "steps": 4, "every": 2}
    (tmp_path / "run.toml").write_text(RUN.format(**values, order="completion"))
    run = sao(tmp_path, "train", "run.toml", "run.disk_patience_s=0.0", SAO_FAIL_AT="save.model:2")
    assert run.returncode == 1 and "No space left on device" in run.stdout, run.stdout
    assert newest(tmp_path / "r" / "checkpoints")[0].step == 2
    saved = tmp_path / "r" / "checkpoints" / "step-2"
    saved.rename(saved.with_name(".step-2.old"))  # as a kill leaves it that hits its replacement
    again = sao(tmp_path, "train", "run.toml", "--resume")
    assert "resumed after step 2" in again.stdout, again.stdout
    assert again.returncode == 0 and newest(tmp_path / "r" / "checkpoints")[0].step == 4, again.stdout
    Story(tmp_path, tiny_model, "torch", 3, steps=4, order="completion").check()
    once_more = sao(tmp_path, "train", "run.toml", "--resume")
    assert once_more.returncode == 0 and "the run is complete: step 4 of 4" in once_more.stdout
    wrong = sao(tmp_path, "train", "run.toml", "--resume", "learner.batch_trajectories=8")
    assert wrong.returncode == 2 and "contradicts the run that is resumed" in wrong.stderr


def test_kills_stops_and_cut_links_inside_a_run_cost_nothing(tmp_path, tiny_model):
    """A few events only; `bench/chaos.py` makes 300."""
    chaos = Chaos(tmp_path / "chaos", tiny_model, seed=3, events=8, steps=40, every_s=0.5, step_s=0.2)
    chaos.play(limit_s=200)
    assert chaos.check()["events"] >= 4
