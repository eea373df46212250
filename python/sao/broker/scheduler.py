"""The scheduler of the broker: which generators there are, how much may be started, and who gets which task."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from sao import _core
from sao.broker.evaluation import Evaluation
from sao.broker.leases import ReadyStore
from sao.broker.outbox import Outbox
from sao.broker.run import Run
from sao.broker.tasks import TaskBook, TrainingTask, task_seed
from sao.broker.versions import Versions
from sao.config import Config
from sao.transport.messages import Buffer, CancelTask, Stats, TaskEntry, Tasks

FRAMES: Final = 1 << 14  # of a message, from which on further tasks are another; peers read four times as many


@dataclass(slots=True)
class Generator:
    """One joined generator: its free slots, the weights that it serves, its last report."""

    free: int = 0
    sent: int = 0
    loaded: int = 0
    report: Stats | None = None


@dataclass
class Scheduler:
    """Hands out held-out tasks first, then as many training ones as there are permits, to free slots only."""

    config: Config
    run: Run
    book: TaskBook
    store: ReadyStore
    versions: Versions
    evaluation: Evaluation
    outbox: Outbox
    generators: dict[str, Generator] = field(default_factory=dict)
    floor: int = 0
    """The version that a generator must have loaded before it gets a task."""
    missing: set[str] = field(default_factory=set)
    """Generators of an earlier broker that have not joined again; they may until `missing_until`."""
    missing_until: float = 0.0

    def __post_init__(self) -> None:
        self._admission = _core.Admission(self.config.staleness.max_lag, self.config.learner.batch_trajectories)
        self._unclaimed = bool(self.book.running)

    def joined(self, name: str) -> None:
        """A generator is here; it gets tasks when it states free slots."""
        self.generators[name] = Generator()

    def left(self, name: str) -> None:
        """A generator has ended; also one that has not joined again after a restart of the broker."""
        self.generators.pop(name, None)
        self.missing.discard(name)

    def slots(self, name: str, free: int, received: int | None) -> None:
        """Takes an absolute number of free slots, as of `received` tasks received: later ones are on the way to it."""
        generator = self.generators[name]
        on_the_way = 0 if received is None else max(0, generator.sent - received)
        generator.free = max(0, free - on_the_way)

    def claim(self, name: str, held: Sequence[tuple[int, int]]) -> None:
        """A generator works on these (ordinal, attempt): it goes on with those still its own, and leaves the others."""
        self.missing.discard(name)
        for ordinal, attempt in held:
            if not self.book.claim(ordinal, attempt, name):
                self.cancel(name, ordinal, attempt)

    def cancel(self, generator: str, ordinal: int, attempt: int) -> None:
        """Has a generator leave an attempt."""
        self.outbox.push("generator", generator, CancelTask(ordinal, attempt))

    def orphans(self, now: float) -> list[TrainingTask]:
        """Running tasks of an earlier broker that no generator has claimed, once all have joined or had the time."""
        if not self._unclaimed or (self.missing and now < self.missing_until):
            return []
        self.missing.clear()
        self._unclaimed = False
        return self.book.running_on("")

    def overdue(self, now: float) -> list[TrainingTask]:
        """Running tasks that are older than `transport.rollout_timeout_s`, the oldest first."""
        limit = self.config.transport.rollout_timeout_s  # tasks run in the order of their start
        return list(takewhile(lambda task: now - task.started >= limit, self.book.running.values()))

    def permits(self) -> int:
        """Rollouts that may be started now: the least of what staleness, the buffer's room and the end leave."""
        if self.run.ending or self.run.awaiting:
            return 0
        book, batch = self.book, self.config.learner.batch_trajectories
        counts = book.ledger.counts()
        leased, ready, running = counts["leased"], counts["ready"], counts["issued"] + counts["generating"]
        trained = counts["trained"] - book.trained_before
        by_lag = self._admission.permits(book.commits, trained, leased, ready, running)
        by_end = (self.config.run.steps - self.run.step) * batch - leased - ready - running
        return max(0, min(by_lag, by_end, self.store.room(leased, ready, running)))

    def dispatch(self, now: float) -> None:
        """Hands out what may be handed out now. A task of which turns are kept goes out with them."""
        if self.run.done is not None or self.run.awaiting:
            return
        if self.generators:
            self.evaluation.start(self.run.step, self.versions.current, now)
        out: dict[str, tuple[list[TaskEntry], list[Buffer]]] = {}
        permits = self.permits()
        able = [(-g.free, name) for name, g in self.generators.items() if g.free > 0 and g.loaded >= self.floor]
        heapq.heapify(able)  # most free slots first, so that none is starved by a rounded share
        while able:
            name = able[0][1]
            tasks, frames = out.setdefault(name, ([], []))
            if (episode := self.evaluation.next_task(name)) is not None:
                tasks.append(episode)
            elif permits > 0:
                permits -= 1
                tasks.append(self._start(name, frames, now))
            else:
                break
            generator = self.generators[name]
            generator.free -= 1
            generator.sent += 1
            if generator.free:
                heapq.heapreplace(able, (-generator.free, name))
            else:
                heapq.heappop(able)
            if len(frames) >= FRAMES:
                self._send(name, *out.pop(name))
        for name, waiting in out.items():
            self._send(name, *waiting)

    def note(self) -> dict[str, Any]:
        """The state that `restore` needs."""
        return {"floor": self.floor, "generators": sorted(self.generators.keys() | self.missing)}

    def restore(self, note: dict[str, Any], now: float) -> None:
        """Goes on where an earlier broker was: its generators may join again, their rollouts go on."""
        self.floor, self.missing = note["floor"], set(note["generators"])
        self.missing_until = now + self.config.transport.peer_timeout_s
        for task in self.book.running.values():
            task.started = now

    def _start(self, generator: str, frames: list[Buffer], now: float) -> TaskEntry:
        task = self.book.start(generator, now)
        seed = task_seed(self.config.run.seed, "train", self.config.prompt_of(task.ordinal))
        frames += [part for turn in task.turns for part in turn]
        return TaskEntry(task.ordinal, task.attempt, seed, "train", len(task.turns))

    def _send(self, generator: str, tasks: list[TaskEntry], frames: list[Buffer]) -> None:
        if tasks:
            self.outbox.push("generator", generator, Tasks(tasks=tuple(tasks), frames=tuple(frames)))
