"""The learner as an actor: takes batches from the broker, trains, commits, until the broker says stop.

Rank 0 talks to the broker; the other ranks get its frames and make the same calls. Waiting is done in rounds, so that
no rank waits for another longer than a round, however long the broker needs for a batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sao.config import Config
from sao.errors import CheckpointError, LearnerError
from sao.learner.checkpoint import Checkpointer
from sao.learner.step import Learner, StepResult
from sao.learner.world import World
from sao.storage.checkpoints import Ordinals
from sao.storage.failpoints import failpoint
from sao.telemetry.recording import write_step
from sao.trajectory import Trajectory, decode, split_frames
from sao.transport.messages import Message

log = logging.getLogger(__name__)

_ROUND_S = 20.0
_COMMIT_S = 600.0  # a broker that is away is waited for: `transport.outage_s` ends that, unless it is longer
_WAIT, _STOP, _BATCH = 0, 1, 2


class Connection(Protocol):
    """What the learner needs of `sao.transport.client.Client`; a double in tests."""

    def call(
        self, kind: str, body: dict[str, Any] | None = None, frames: Sequence[Any] = (), deadline_s: float | None = None
    ) -> Future[Message]: ...


@dataclass(frozen=True)
class Taken:
    """A batch as it came: the broker's number for it (rank 0), its policy version, and its trajectories' frames one
    after another.
    """

    lease: int
    version: int
    frames: list[Any]
    tasks: list[tuple[int, int]]  # ordinal and attempt of each trajectory (rank 0)


def train(
    config: Config,
    learner: Learner,
    world: World,
    line: Connection | None,
    checkpoints: Path,
    trained: Ordinals | None = None,
) -> str:
    """Trains until `run.steps` steps are done or the broker says stop, saves, and returns why it ended.

    `line` is the connected client on rank 0 and None elsewhere; `trained`: the tasks of the checkpoint that the learner
    continues from. A checkpoint that cannot be saved is reported and training goes on, unless it is the last. Raises
    what the line, the batch or the step raises, and `CheckpointError`.
    """
    saver = Checkpointer(learner, checkpoints, trained)
    reason, saved, save_s = f"{config.run.steps} steps done", learner.steps, 0.0
    last: Taken | None = None
    while learner.steps < config.run.steps:
        start = time.perf_counter()
        taken = take(config, world, line)
        waited = time.perf_counter()
        if taken is None:
            reason = "told to stop"
            break
        last = taken
        result = _step(config, learner, taken, saver.trained)
        if line is not None:
            result.metrics["time/wait_s"] = waited - start
            result.metrics["time/step_s"] = time.perf_counter() - start
            result.metrics["time/idle_share"] = (waited - start) / result.metrics["time/step_s"]
            result.metrics["time/save_s"] = save_s
            failpoint("learner.commit")
            commit(line, taken, result)
            failpoint("learner.committed")
            saver.trained.add(ordinal for ordinal, _ in taken.tasks)
            _keep(config, taken, result, checkpoints.parent / "trajectories")
        every, save_s = config.learner.save_every_steps, 0.0
        if every and learner.steps % every == 0:
            began = time.perf_counter()
            _report(line, saver.save(taken.lease, taken.tasks))
            saved, save_s = learner.steps, time.perf_counter() - began
    if saved != learner.steps and last is not None:
        _report(line, saver.save(last.lease, last.tasks))
    if fault := saver.finish():
        raise CheckpointError(f"the last checkpoint could not be saved: {fault}")
    log.info("%s; policy version %d after %d steps", reason, learner.version, learner.steps)
    return reason


def _step(config: Config, learner: Learner, taken: Taken, trained: Ordinals) -> StepResult:
    """One step on a batch that fits: of this version, of tasks that were not trained before."""
    began = time.perf_counter()
    failpoint("learner.taken")
    trajectories = decode_all(config, taken)
    if taken.version != learner.version:
        raise LearnerError(f"batch {taken.lease}: broker is at version {taken.version}, learner at {learner.version}")
    repeated = [ordinal for ordinal, _ in taken.tasks if ordinal in trained]
    if repeated:
        raise LearnerError(f"batch {taken.lease}: tasks {repeated} were trained before")
    moved = time.perf_counter()
    result = learner.step(trajectories)
    result.metrics["time/move_s"] = moved - began
    if result.skipped:
        log.warning("step %d was skipped: %s", result.step, result.skipped)
    return result


def _report(line: Connection | None, fault: str | None) -> None:
    """A checkpoint that could not be saved is said to the user; the one before it stays."""
    if fault is not None and line is not None:
        text = f"checkpoint not saved: {fault}; the one before it stays, training goes on"
        line.call("event", {"level": "error", "text": text})


def _keep(config: Config, taken: Taken, result: StepResult, folder: Path) -> None:
    """Records the step for `sao inspect`; what goes wrong here is logged, training goes on."""
    if result.arrays is None:
        return
    meta = {
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
        keep = config.telemetry.keep_trajectories
        write_step(folder, result.step, taken.frames, result.arrays, meta, keep=keep)
    except OSError as error:
        log.warning("step %d was not recorded: %s", result.step, error)


def decode_all(config: Config, taken: Taken) -> list[Trajectory]:
    """The batch's trajectories. Raises `WireError` for bytes that are none."""
    limit = config.transport.max_message_bytes
    return [
        decode(header, payload, sidecars=sidecars, max_bytes=limit)
        for header, payload, *sidecars in split_frames(taken.frames)
    ]


def take(config: Config, world: World, line: Connection | None) -> Taken | None:
    """The next batch on every rank, or None when the broker says stop."""
    future = line.call("take", {"n": config.learner.batch_trajectories}) if line is not None else None
    state, lease, version, frames, tasks = _WAIT, 0, 0, [], []
    while state == _WAIT:
        if future is not None:
            try:
                message = future.result(timeout=_ROUND_S)
            except TimeoutError:
                if future.done():  # an answer: the deadline or the loss of the broker, not the end of this round
                    raise
            else:
                state = _STOP if message.kind == "stop" else _BATCH
                lease, version = message.body.get("lease", 0), message.body.get("version", 0)
                frames = list(message.frames)
                ordinals = message.body.get("ordinals", [])
                tasks = list(zip(ordinals, message.body.get("attempts", [0] * len(ordinals)), strict=True))
        state, lease, version = world.share([state, lease, version])
    return None if state == _STOP else Taken(lease, version, world.share_frames(frames), tasks)


def commit(line: Connection, taken: Taken, result: StepResult, done: str | None = None) -> None:
    """Tells the broker that a step has used the batch; `done`: why no further batch is wanted."""
    body = {
        "lease": taken.lease,
        "step": result.step,
        "version": result.version,
        "weights": result.weights.to_message() if result.weights else None,
        "trained_tokens": result.trained_tokens,
        "masked_tokens": result.masked_tokens,
        "metrics": result.metrics,
        **({} if done is None else {"done": done}),
    }
    line.call("commit", body, deadline_s=_COMMIT_S).result()
