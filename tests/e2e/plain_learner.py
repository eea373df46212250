"""A learner without torch, for runs that are killed many times: its "weights" are the list of all it was trained on.

It speaks to the broker, publishes and saves as the real one does, through the same folders and the same named points;
what it must not lose or see twice is all it has. Started in place of `python -m sao.learner`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from sao.config import Config, load
from sao.errors import Error
from sao.storage.checkpoints import STATE, Draft, Ordinals, read
from sao.storage.failpoints import failpoint
from sao.trajectory import decode
from sao.transport.client import Client
from sao.transport.messages import Batch, Commit, Take, WeightsRef
from sao.transport.sockets import Limits

# So that generators and learner work at the same time, as with a model; a file `hurry` beside the run ends that.
STEP_S = float(os.environ.get("STEP_S", "0.02"))


class Plain:
    """Steps, version, and every task it was trained on with its attempt, in order."""

    def __init__(self) -> None:
        self.steps = self.version = 0
        self.seen: list[list[list[int]]] = []

    @property
    def fingerprint(self) -> str:
        """Of the list."""
        return hashlib.blake2b(json.dumps(self.seen).encode(), digest_size=16).hexdigest()

    def publish(self, folder: Path) -> WeightsRef | None:
        """A file for this version, under its final name by one rename; None for version 0."""
        if not self.version:
            return None
        path = folder / f"weights-{self.version}"
        unfinished = path.with_suffix(".part")
        failpoint("publish.begin")
        unfinished.write_text(self.fingerprint)
        failpoint("publish.rename")
        unfinished.replace(path)
        return WeightsRef(self.version, str(path), self.fingerprint)

    def save(self, config: Config, folder: Path, lease: int) -> None:
        """A checkpoint with everything."""
        failpoint("save.begin")
        failpoint("save.staged")
        draft = Draft(folder, self.steps)
        (draft.folder / STATE).mkdir()
        (draft.folder / STATE / "seen.json").write_text(json.dumps(self.seen))
        failpoint("save.state")
        (draft.folder / "config.json").write_text("{}")
        failpoint("save.model")
        trained = Ordinals()
        trained.add(ordinal for step in self.seen for ordinal, _ in step)
        ledger = {"lease": lease, "tasks": self.seen[-1], "trained": trained.runs}
        facts = {"version": self.version, "fingerprint": self.fingerprint, "ledger": ledger}
        draft.commit(facts, config.learner.checkpoints_kept)

    def restore(self, path: Path) -> None:
        """Reads what `save` wrote."""
        checkpoint = read(path)
        self.seen = json.loads((checkpoint.state / "seen.json").read_text())
        self.steps, self.version = checkpoint.step, checkpoint.version
        assert len(self.seen) == self.steps and self.fingerprint == checkpoint.manifest["fingerprint"]


def train(config: Config, run_folder: Path, weights: Path, client: Client, learner: Plain) -> None:
    """As `sao.learner.loop.train`."""
    every, saved, lease = config.learner.save_every_steps, learner.steps, 0
    while learner.steps < config.run.steps:
        message = client.call(Take(config.learner.batch_trajectories)).result()
        if not isinstance(message, Batch):
            break
        failpoint("learner.taken")
        frames = message.frames
        rollouts = [decode(*pair) for pair in zip(frames[::2], frames[1::2], strict=True)]
        tasks = [list(task) for task in zip(message.ordinals, message.attempts, strict=True)]
        assert tasks == [[rollout.task_ordinal, rollout.attempt] for rollout in rollouts]
        assert message.version == learner.version
        time.sleep(0.0 if (run_folder.parent / "hurry").exists() else STEP_S)
        versions = [rows[:, 2].min() for rollout in rollouts for rows in (s.version_spans for s in rollout.segments)]
        metrics = {"lag/max": int(learner.version - min(versions))}
        learner.seen.append(tasks)
        learner.steps += 1
        if learner.steps > config.learner.critic_warmup_steps:
            learner.version += 1
            reference = learner.publish(weights)
        else:
            reference = None
        lease = message.lease
        tokens = sum(rollout.n_actions for rollout in rollouts)
        failpoint("learner.commit")
        client.call(Commit(lease, learner.steps, learner.version, tokens, 0, metrics, reference), deadline_s=90)
        client.flush(90)
        failpoint("learner.committed")
        if every and learner.steps % every == 0:
            learner.save(config, run_folder / "checkpoints", lease)
            saved = learner.steps
    if saved != learner.steps:
        learner.save(config, run_folder / "checkpoints", lease)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--run-folder", "--weights-folder", "--checkpoint"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--endpoint")
    arguments, _ = parser.parse_known_args()
    config, learner = load(arguments.run_folder / "config.json"), Plain()
    reference = None
    if arguments.checkpoint:
        learner.restore(arguments.checkpoint)
        reference = learner.publish(arguments.weights_folder)
        failpoint("learner.restored")
    limits = Limits.of(config.transport)
    with Client(arguments.endpoint, role="learner", name="learner", limits=limits) as client:
        client.connect(deadline_s=60, step=learner.steps, weights=reference)
        try:
            train(config, arguments.run_folder, arguments.weights_folder, client, learner)
        except Error as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
