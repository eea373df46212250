"""The learner's loop around a scripted broker: what it asks for, what it commits, how it ends."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from learner.rollouts import make_config, make_segment, make_trajectory

from sao.config import save
from sao.errors import CheckpointError, LearnerError, TransportError, WireError
from sao.learner import loop
from sao.learner.step import Learner
from sao.learner.world import World
from sao.storage import failpoints as faults
from sao.storage.checkpoints import Ordinals
from sao.trajectory import encode
from sao.transport.messages import Ack, Batch, Commit, Event, Stop, Take
from sao.transport.weights import load

WORLD = World.alone()


class Broker:
    """Answers each `take` from a script: a batch of trajectories at a version, "stop", or an exception."""

    def __init__(self, *script):
        self.script, self.calls = list(script), []

    def call(self, message, deadline_s=None):
        self.calls.append(message)
        future = Future()
        if not isinstance(message, Take):
            future.set_result(Ack())
            return future
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer == "stop":
            future.set_result(Stop(reason="test"))
        elif callable(answer):
            answer(future)
        else:
            future.set_result(batch_message(*answer, lease=len(self.calls)))
        return future

    @property
    def commits(self):
        return [message for message in self.calls if isinstance(message, Commit)]


def batch_message(trajectories, version, lease=1):
    frames = [frame for trajectory in trajectories for frame in encode(trajectory)]
    ordinals = [1000 * lease + t.task_ordinal for t in trajectories]  # no task comes twice
    attempts = (1,) * len(ordinals)
    return Batch(lease=lease, version=version, ordinals=tuple(ordinals), attempts=attempts, frames=tuple(frames))


def rollouts(version, count=3):
    rng = np.random.default_rng(version)
    return [make_trajectory(rng, [make_segment(rng, [(4, 5)], versions=(version,))], ordinal=i) for i in range(count)]


@pytest.fixture
def setup(tiny_model, tmp_path):
    def make(**settings):
        config = make_config(tiny_model, **{"run__steps": 3, "learner__batch_trajectories": 3, **settings})
        weights = tmp_path / "weights"
        weights.mkdir(exist_ok=True)
        return Learner(config, WORLD, weights), tmp_path / "checkpoints"

    return make


def test_it_trains_commits_and_exports(setup):
    learner, checkpoints = setup(learner__critic_warmup_steps=1)
    broker = Broker((rollouts(0), 0), (rollouts(0), 0), (rollouts(1), 1))
    assert loop.train(learner, broker, checkpoints) == "3 steps done"
    assert [message for message in broker.calls if isinstance(message, Take)] == [Take(n=3)] * 3
    assert [(c.lease, c.step, c.version) for c in broker.commits] == [(1, 1, 0), (3, 2, 1), (5, 3, 2)]
    assert broker.commits[0].weights is None
    for commit in broker.commits:
        assert commit.trained_tokens + commit.masked_tokens == 15 == commit.metrics["tokens/action"]
        assert 0 <= commit.metrics["time/idle_share"] <= 1
        assert {f"time/{cause}_s" for cause in ("wait", "move", "plan", "critic", "step")} <= commit.metrics.keys()
    ref = broker.commits[-1].weights
    assert ref.version == 2 and load(ref)
    assert [path.name for path in checkpoints.iterdir()] == ["step-3"]


def test_stop_ends_it_with_an_export(setup):
    learner, checkpoints = setup()
    broker = Broker((rollouts(0), 0), "stop")
    assert loop.train(learner, broker, checkpoints) == loop.STOPPED
    assert len(broker.commits) == 1 and [path.name for path in checkpoints.iterdir()] == ["step-1"]


def test_checkpoints_are_written_on_the_way(setup):
    learner, checkpoints = setup(learner__save_every_steps=1, learner__checkpoints_kept=2)
    loop.train(learner, Broker(*((rollouts(v), v) for v in range(3))), checkpoints)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]


def test_a_skipped_step_is_committed_without_weights(setup):
    learner, checkpoints = setup(run__steps=1)
    rng = np.random.default_rng(0)
    outside = [make_trajectory(rng, [make_segment(rng, [(3, 4)], logprob=-40.0)])]
    broker = Broker((outside, 0))
    loop.train(learner, broker, checkpoints)
    (commit,) = broker.commits
    assert (commit.version, commit.weights, commit.trained_tokens, commit.masked_tokens) == (0, None, 0, 4)
    assert commit.metrics["step/skipped"] == 1


def test_waiting_in_rounds_gives_up_nothing(setup, monkeypatch):
    monkeypatch.setattr(loop, "_ROUND_S", 0.02)
    learner, checkpoints = setup(run__steps=1)

    def late(future):
        threading.Timer(0.2, lambda: future.set_result(batch_message(rollouts(0), 0))).start()

    broker = Broker(late)
    loop.train(learner, broker, checkpoints)
    assert [type(message) for message in broker.calls] == [Take, Commit]
    assert broker.commits[0].metrics["time/wait_s"] >= 0.15


def test_a_lost_broker_ends_it_at_once(setup):
    learner, checkpoints = setup()
    with pytest.raises(TransportError, match="gone"):
        loop.train(learner, Broker(TransportError("gone")), checkpoints)
    assert not checkpoints.exists()


def test_a_batch_for_another_version_or_of_other_bytes_is_refused(setup):
    learner, checkpoints = setup()
    with pytest.raises(LearnerError, match="at version 4, learner at 0"):
        loop.train(learner, Broker((rollouts(0), 4)), checkpoints)
    with pytest.raises(WireError):
        answer = Batch(lease=1, version=0, ordinals=(0,), attempts=(1,), frames=(b"x" * 64, b"y" * 64))
        loop.train(learner, Broker(lambda future: future.set_result(answer)), checkpoints)
    assert learner.steps == 0


def test_the_program_names_what_is_missing(tiny_model, tmp_path):
    save(make_config(tiny_model), tmp_path / "config.json")
    command = [sys.executable, "-m", "sao.learner", "--run-folder", str(tmp_path), "--endpoint", "ipc:///nowhere"]
    command += ["--weights-folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "RANK, WORLD_SIZE" in ended.stderr
    (tmp_path / "config.json").write_text('{"modell": {}}')
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "modell: unknown section" in ended.stderr


def test_a_task_that_was_trained_before_is_refused(setup):
    learner, checkpoints = setup()
    first, again = batch_message(rollouts(0), 0), batch_message(rollouts(0), 1)
    broker = Broker(lambda future: future.set_result(first), lambda future: future.set_result(again))
    with pytest.raises(LearnerError, match=r"batch 1: tasks \[1000, 1001, 1002\] were trained before"):
        loop.train(learner, broker, checkpoints)
    assert learner.steps == 1
    resumed = Ordinals([[1000, 1003]])
    with pytest.raises(LearnerError, match="were trained before"):
        broker = Broker(lambda future: future.set_result(again))
        loop.train(learner, broker, checkpoints, resumed)


def test_a_checkpoint_that_cannot_be_saved_is_reported_unless_it_is_the_last(setup, monkeypatch):
    learner, checkpoints = setup(learner__save_every_steps=1, run__disk_patience_s=0.0)
    faults._reached.clear()
    monkeypatch.setenv(faults.FAIL, "save.state:1")
    broker = Broker((rollouts(0), 0), (rollouts(1), 1), (rollouts(2), 2))
    assert loop.train(learner, broker, checkpoints) == "3 steps done"
    (event,) = [message for message in broker.calls if isinstance(message, Event)]
    assert event.level == "error" and "checkpoint not saved: step 1" in event.text
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]
    assert all("time/save_s" in commit.metrics for commit in broker.commits)
    faults._reached.clear()
    monkeypatch.setenv(faults.FAIL, "save.state:1")
    learner, _ = setup(run__steps=1, run__disk_patience_s=0.0)
    with pytest.raises(CheckpointError, match="the last checkpoint could not be saved: step 1"):
        loop.train(learner, Broker((rollouts(0), 0)), checkpoints.with_name("other"))
