"""The learner's loop: takes a batch from the broker, trains on it, commits, saves, until the broker stops it.

Rank 0 talks to the broker; the other ranks get its frames and make the same calls. Waiting is done in rounds, so that
no rank waits for another longer than a round, however long the broker needs for a batch.
"""

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sao.config import Config
from sao.errors import CheckpointError, LearnerError, StorageError
from sao.learner.checkpoint import Checkpointer
from sao.learner.step import Learner, StepResult
from sao.storage.checkpoints import Ordinals
from sao.storage.failpoints import failpoint
from sao.telemetry.recording import write_step
from sao.trajectory import decode, split_frames
from sao.transport.client import Client
from sao.transport.messages import Batch, Commit, Event, Take

log = logging.getLogger(__name__)

STOPPED = "stopped by the broker"
_ROUND_S = 20.0
_COMMIT_S = 600.0  # a broker that is away is waited for: `transport.outage_s` ends that, unless it is longer
_WAIT, _STOP, _BATCH = 0, 1, 2


@dataclass(frozen=True)
class Taken:
    """A batch as it came, and how long it was waited for. `tasks` are known on rank 0 only."""

    lease: int  # the broker's number for it
    version: int  # of the policy
    frames: list[Any]  # of its trajectories, one after another
    tasks: list[tuple[int, int]]  # ordinal and attempt of each trajectory
    wait_s: float
    ended: int = 0  # every task below this ordinal was trained or dropped before; on rank 0


def train(
    learner: Learner,
    connection: Client | None,
    checkpoints: Path,
    trained: Ordinals | None = None,
    asked: Future[str] | None = None,
) -> str:
    """Trains until `run.steps` steps are done or it is to stop, saves, and returns why it ended.

    `connection` is that to the broker on rank 0 and None elsewhere; `trained`: the tasks of the checkpoint that the
    learner continues from; `asked` has a result, the reason, when this rank is to stop for another than the broker. A
    checkpoint that cannot be saved is reported and training goes on, unless it is the last.
    Raises what the connection, the batch or the step raises, and `CheckpointError`.
    """
    config, saver = learner.config, Checkpointer(learner, checkpoints, trained)
    reason, every, save_s = f"{config.run.steps} steps done", config.learner.save_every_steps, 0.0
    records = None if connection is None else _Records(config, connection, checkpoints.parent / "trajectories")
    unsaved: Taken | None = None
    while learner.steps < config.run.steps:
        taken = take(learner, connection, asked)
        if taken is None:
            reason = why_stopped(asked)
            break
        result = train_on(learner, taken, saver.trained)
        result.metrics["time/save_s"], save_s = save_s, 0.0
        commit(connection, taken, result)
        saver.trained.add(ordinal for ordinal, _ in taken.tasks)
        saver.trained.close(taken.ended)
        if records is not None and result.arrays is not None:
            records.add(taken, result)
        unsaved = taken
        if every and learner.steps % every == 0:
            began = time.perf_counter()
            _report(connection, saver.save(taken.lease, taken.tasks, taken.ended))
            unsaved, save_s = None, time.perf_counter() - began
    if unsaved is not None:
        _report(connection, saver.save(unsaved.lease, unsaved.tasks, unsaved.ended))
    if fault := saver.finish():
        raise CheckpointError(f"the last checkpoint could not be saved: {fault}")
    log.info("%s; policy version %d after %d steps", reason, learner.version, learner.steps)
    return reason


def why_stopped(asked: Future[str] | None) -> str:
    """Why there was no batch."""
    return asked.result() if asked is not None and asked.done() else STOPPED


def take(learner: Learner, connection: Client | None, asked: Future[str] | None = None) -> Taken | None:
    """The next batch on every rank, or None when the broker has stopped it, or a rank was `asked` to; see `train`."""
    began, world = time.perf_counter(), learner.world
    future = None if connection is None else connection.call(Take(n=learner.config.learner.batch_trajectories))
    waited_for: list[Future[Any]] = [one for one in (future, asked) if one is not None]
    batch: Batch | None = None
    state, lease, version = _WAIT, 0, 0
    while state == _WAIT:
        if future is not None:
            wait(waited_for, _ROUND_S, FIRST_COMPLETED)
            if future.done():
                answer = future.result()
                state = _STOP
                if isinstance(answer, Batch):
                    batch, state, lease, version = answer, _BATCH, answer.lease, answer.version
        state, lease, version = world.share([state, lease, version])
        if world.largest(torch.tensor([asked is not None and asked.done()], dtype=torch.int64)).item():
            if future is not None:
                future.cancel()  # what it may have been given goes back
            state = _STOP
    if state == _STOP:
        return None
    frames = world.share_frames([] if batch is None else list(batch.frames))
    tasks = [] if batch is None else list(zip(batch.ordinals, batch.attempts, strict=True))
    wait_s, ended = time.perf_counter() - began, 0 if batch is None else batch.ended
    return Taken(lease, version, frames, tasks, wait_s, ended)


def train_on(learner: Learner, taken: Taken, trained: Ordinals) -> StepResult:
    """One step on a batch that fits: of the learner's version, of tasks that were not trained before.

    Raises `LearnerError` if it does not, `WireError` for bytes that are no trajectories, and what the step raises.
    """
    failpoint("learner.taken")
    began = time.perf_counter()
    limit = learner.config.transport.max_message_bytes
    trajectories = [
        decode(head, body, sidecars=more, max_bytes=limit) for head, body, *more in split_frames(taken.frames)
    ]
    if taken.version != learner.version:
        raise LearnerError(f"batch {taken.lease}: broker is at version {taken.version}, learner at {learner.version}")
    if repeated := [ordinal for ordinal, _ in taken.tasks if ordinal in trained]:
        raise LearnerError(f"batch {taken.lease}: tasks {repeated} were trained before")
    moved = time.perf_counter()
    result = learner.step(trajectories)
    step_s = taken.wait_s + time.perf_counter() - began
    times = {"time/move_s": moved - began, "time/wait_s": taken.wait_s, "time/step_s": step_s}
    result.metrics.update(times | {"time/idle_share": taken.wait_s / step_s})
    if result.skipped:
        log.warning("step %d was skipped: %s", result.step, result.skipped)
    return result


def commit(connection: Client | None, taken: Taken, result: StepResult, done: str = "") -> None:
    """Tells the broker that a step has used the batch; `done`: why no further batch is wanted."""
    if connection is None:
        return
    failpoint("learner.commit")
    counts = (result.step, result.version, result.trained_tokens, result.masked_tokens)
    message = Commit(taken.lease, *counts, {**result.metrics}, result.weights, done)
    connection.call(message, deadline_s=_COMMIT_S).result()
    failpoint("learner.committed")


def _report(connection: Client | None, fault: str | None) -> None:
    """Reports a checkpoint that could not be saved; the one before it stays."""
    if fault is not None and connection is not None:
        text = f"checkpoint not saved: {fault}; the one before it stays, training goes on"
        connection.call(Event(level="error", text=text))


class _Records:
    """The steps that are kept for `sao inspect`. What goes wrong here is said once, and again when it is over; training
    goes on.
    """

    def __init__(self, config: Config, connection: Client, folder: Path) -> None:
        self._config, self._connection, self._folder = config, connection, folder
        self._missing = 0

    def add(self, taken: Taken, result: StepResult) -> None:
        """Writes a step."""
        config, keep = self._config, self._config.telemetry.keep_trajectories
        metadata = {
            "version": taken.version,
            "version_after": result.version,
            "skipped": result.skipped,
            "trained_tokens": result.trained_tokens,
            "masked_tokens": result.masked_tokens,
            "metrics": result.metrics,
            "algorithm": config.algorithm.model_dump(mode="json"),
            "compaction": config.compaction.model_dump(mode="json"),
            "config": config.model_dump(mode="json"),
            "fingerprint": result.weights.fingerprint if result.weights else None,
            "tasks": [list(task) for task in taken.tasks],
        }
        try:
            write_step(self._folder, result.step, taken.frames, result.arrays or {}, metadata, keep=keep)
        except StorageError as error:
            self._missing += 1
            if self._missing == 1:
                self._warn(f"step {result.step} is not recorded, nor are later ones until this is over: {error}")
            return
        if self._missing:
            self._warn(f"{self._folder}: {self._missing} steps are missing here")
            self._missing = 0

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._connection.call(Event(level="warning", text=text))
