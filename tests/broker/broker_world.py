"""A broker with an outbox that records, and scripted trajectories, for tests without sockets."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sao import _core
from sao.broker.broker import Broker
from sao.broker.outbox import Outbox
from sao.broker.persistence import Persistence
from sao.config import Config, parse
from sao.trajectory import SegmentBuilder, Termination, Trajectory, encode_frames
from sao.transport import messages as m

BATCH = 4
M = TypeVar("M", bound=m.Message)


def config(**sections: dict[str, Any]) -> Config:
    """A small run: batch 4, lag 1, no evaluation unless asked for."""
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 6},
        "model": {"path": "m"},
        "env": {"name": "scripted"},
        "sampling": {"max_response_tokens": 8, "context_tokens": 64},
        "learner": {"batch_trajectories": BATCH, "critic_warmup_steps": 0, "row_tokens": 64},
        "staleness": {"max_lag": 1},
        "eval": {"every_steps": 0},
        "transport": {"heartbeat_s": 0.1, "peer_timeout_s": 3.0, "rollout_timeout_s": 100.0},
    }
    for section, values in sections.items():
        base.setdefault(section, {}).update(values)
    return parse(base)


def trajectory(
    ordinal: int,
    attempt: int = 0,
    *,
    version: int = 0,
    n_sampled: int = 5,
    n_context: int = 3,
    reward: float | None = 1.0,
    fingerprints: dict[int, str] | None = None,
    sidecars: dict[str, Any] | None = None,
) -> Trajectory:
    """One segment of `n_context` + `n_sampled` tokens, all sampled by `version`; failed when there is no reward."""
    builder = SegmentBuilder("execution")
    builder.append_context(range(n_context))
    builder.append_sampled(range(n_sampled), [-0.5] * n_sampled, [(0, n_sampled, version)])
    ending = Termination("finished") if reward is not None else Termination("failed", "crashed")
    return Trajectory(
        id=uuid.uuid4().bytes,
        task_ordinal=ordinal,
        attempt=attempt,
        env="scripted",
        segments=(builder.build(),),
        reward=reward,
        termination=ending,
        temperature=1.0,
        fingerprints=fingerprints or {},
        sidecars=sidecars or {},
    )


class World:
    """Scripted generators and a learner around a real `Broker`; `now` is moved by the test."""

    def __init__(self, cfg: Config | None = None, ledger: str | Path | None = None, resumed: int | None = None) -> None:
        self.now = 0.0
        self.tasks: dict[str, list[m.TaskEntry]] = {}
        self.pushes: list[tuple[str, m.Message]] = []
        self.batches: list[m.Batch] = []
        self.frames: list[tuple[Any, ...]] = []
        self.frames_sent: list[tuple[Any, ...]] = []
        self.stopped_takes: list[str] = []
        self.received: dict[str, int] = {}
        self.n_takes = 0
        self.ledger = _core.Ledger(None if ledger is None else str(ledger))
        self.config = cfg or config()
        if resumed is not None:
            self.ledger.rewind(resumed)
        self.outbox = Outbox(self.push, self.answer_take)
        persistence = Persistence(self.ledger)
        persistence.resumed = resumed
        self.broker = Broker(self.config, persistence, self.outbox, self.now)

    # what carries the outbox's messages

    def push(self, role: str, name: str, message: m.Message) -> None:
        """Notes a push; one to a role without a name is to each of its peers."""
        names = [name or role]
        if role == "generator" and not name:
            names = list(self.broker.scheduler.generators)
        for name in names:
            self.pushes.append((name, message))
            if isinstance(message, m.Tasks):
                self.tasks.setdefault(name, []).extend(message.tasks)
                self.received[name] = self.received.get(name, 0) + len(message.tasks)
        self.frames_sent += [message.frames] if message.frames else []

    def answer_take(self, take: Any, message: m.Message) -> None:
        """Notes a batch, or that there is none."""
        if isinstance(message, m.Batch):
            self.batches.append(msgspec.structs.replace(message, frames=()))
            self.frames.append(message.frames)
        else:
            assert isinstance(message, m.Stop)
            self.stopped_takes.append(message.reason)

    # actions

    def pushed(self, kind: type[M], to: str = "supervisor") -> list[M]:
        """The pushes of a kind."""
        return [message for who, message in self.pushes if who == to and isinstance(message, kind)]

    def join(self, name: str, free: int) -> None:
        """A generator with free slots."""
        self.broker.scheduler.joined(name)
        self.received[name] = 0
        self.slots(name, free)

    def slots(self, name: str, free: int) -> None:
        """States free slots, all pushed tasks received."""
        self.broker.slots(name, m.Slots(free, self.received[name]), self.now)

    def pop(self, name: str, split: str = "train") -> m.TaskEntry:
        """The oldest task that a generator holds."""
        tasks = self.tasks[name]
        task = next(t for t in tasks if t.split == split)
        tasks.remove(task)
        return task

    def encoded(self, task: m.TaskEntry, **more: Any) -> tuple[Any, ...]:
        """The trajectory of a task, as frames."""
        return encode_frames(trajectory(task.ordinal, task.attempt, **more))

    def answer(self, name: str, task: m.TaskEntry, **more: Any) -> str:
        """Sends the trajectory of a task; returns why it is refused."""
        return self.deliver(name, self.encoded(task, **more))

    def deliver(self, name: str, frames: tuple[Any, ...]) -> str:
        """Sends a trajectory; returns why it is refused."""
        answer = self.broker.trajectory(name, m.FinishedRollout(frames=frames), self.now)
        assert answer.accepted == (not answer.reason)
        return answer.reason

    def answer_all(self, name: str, **more: Any) -> int:
        """Answers all train tasks that a generator holds now, and frees their slots."""
        tasks = [t for t in self.tasks.get(name, []) if t.split == "train"]
        for task in tasks:
            self.tasks[name].remove(task)
            assert self.answer(name, task, **more) == ""
        return len(tasks)

    def fail(self, name: str, task: m.TaskEntry, reason: str = "crashed", tokens: int = 0, detail: str = "") -> str:
        """Sends a failure; returns why it is refused."""
        message = m.FailedRollout(task.ordinal, task.attempt, reason, tokens, detail)
        return self.broker.failure(name, message, self.now).reason

    def load(self, name: str, version: int, fingerprint: str) -> None:
        """States which weights a generator serves."""
        self.broker.loaded(name, m.Loaded(version, fingerprint), self.now)

    def learner(self, step: int, weights: m.WeightsRef | None = None, session: str = "") -> None:
        """A learner joins and continues after `step`."""
        hello = m.Hello(role="learner", name="learner", incarnation=0, session=session, step=step, weights=weights)
        self.broker.learner_joined(hello)

    def take(self, n: int = BATCH) -> str:
        """Asks for a batch; returns the key."""
        self.n_takes += 1
        key = f"take-{self.n_takes}"
        self.broker.take(key, n, self.now)
        return key

    def commit(self, weights: bool = True, masked: int = 0, **metrics: float) -> None:
        """Commits the last batch, all tokens of it trained except `masked`."""
        batch = self.batches[-1]
        held = sum(_core.summary(header)["n_actions"] for header in self.frames[-1][::2])
        self.frames.clear()  # whoever holds a view keeps its bytes in the buffer
        version = self.broker.versions.current
        ref = m.WeightsRef(version + 1, f"/w/{version + 1}", f"f{version + 1}") if weights else None
        step = self.broker.run.step + 1
        self.broker.commit(m.Commit(batch.lease, step, version, held - masked, masked, metrics, ref), self.now)
        self.broker.book.persistence.commit({})

    def in_flight(self) -> int:
        """Tasks between start and training."""
        counts = self.ledger.counts()
        return sum(counts[k] for k in ("issued", "generating", "ready", "leased"))


def batches_of(world: World, n: int, name: str = "g0", slots: int = 100) -> None:
    """Runs `n` whole steps with one generator."""
    for _ in range(n):
        world.slots(name, slots)
        world.take()
        world.answer_all(name)
        world.commit()
