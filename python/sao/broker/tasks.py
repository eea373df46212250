"""Tasks and who works on them: seeds, attempts, free slots. Plain bookkeeping, no sockets."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from sao import _core
from sao.broker.memory import Memory

Split = Literal["train", "eval"]
MAX_ATTEMPTS = (
    5  # a task whose generators keep dying is given up after this many; a restart of the run is not its fault
)


def task_seed(run_seed: int, split: Split, index: int) -> int:
    """The seed (53 bits, so that it survives a double) of a task: a function of the run's seed, the split and the
    index alone.

    A repeated attempt gets the same task; the train and eval splits never share a stream.
    """
    digest = hashlib.blake2b(f"{run_seed}:{split}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def reason_code(text: str) -> str:
    """A failure's reason as a short counter name, so that text from an environment cannot grow the set of counters."""
    return re.sub(r"[^a-z0-9_]+", "_", text.lower()).strip("_")[:40] or "unknown"


@dataclass(slots=True)
class Task:
    """One training task on its way: queued (to be started again) -> running -> ready -> leased."""

    ordinal: int
    attempt: int
    state: Literal["queued", "running", "ready", "leased"] = "queued"
    generator: str = ""
    started: float = 0.0
    finished: float = 0.0
    timed_out: bool = False
    losses: int = 0
    n_tokens: int = 0
    sampled_tokens: int = 0
    min_version: int = 0
    max_version: int = 0


@dataclass(slots=True)
class Generator:
    """One joined generator: its free slots, what it works on, its last report."""

    name: str
    free: int = 0
    sent: int = 0
    train: set[int] = field(default_factory=set)
    evals: set[int] = field(default_factory=set)
    report: dict[str, Any] = field(default_factory=dict)
    loaded: int = 0

    def state_slots(self, free: int, received: int | None) -> None:
        """Takes an absolute number of free slots, as of `received` tasks received: later ones are on the way to it."""
        on_the_way = 0 if received is None else max(0, self.sent - received)
        self.free = max(0, free - on_the_way)


@dataclass(slots=True)
class Take:
    """A learner's request that waits for `n` trajectories."""

    key: Hashable
    n: int
    since: float
    warned: float


@dataclass(slots=True)
class OpenLease:
    """Trajectories that are with the learner, by the `take` that asked for them."""

    key: Hashable
    held: list[tuple[int, Any]]
    """Ordinal and the buffer's lease; None where the log has lost the trajectory and only the learner has it."""


class Pool:
    """The joined generators. Tasks go to the one with the most free slots, so that none is starved by a rounded
    share.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Generator] = {}
        self.floor = 0  # the version that a generator must have loaded before it gets a task

    @property
    def free(self) -> int:
        """Free slots of all generators."""
        return sum(g.free for g in self.by_name.values())

    def slots(self) -> Iterator[Generator]:
        """The generator for the next task, again and again while slots are free; the caller takes each slot it is
        offered.
        """
        heap = [(-g.free, name) for name, g in self.by_name.items() if g.free > 0 and g.loaded >= self.floor]
        heapq.heapify(heap)
        while heap:
            _, name = heapq.heappop(heap)
            generator = self.by_name[name]
            yield generator
            generator.free -= 1
            generator.sent += 1
            if generator.free > 0:
                heapq.heappush(heap, (-generator.free, name))


class TaskBook:
    """All unfinished training tasks in the order in which they were issued, and the ledger that says the same on disk.

    Every change of a task's place is written to the ledger first. Ordinals are handed out once, in order; a task that
    is started again keeps its ordinal and gets the next attempt.
    """

    def __init__(self, ledger: Any, memory: Memory | None = None) -> None:
        """`memory`: what an earlier broker has left."""
        self.ledger, self.memory = ledger, memory or Memory(None, ledger)
        goes_on = self.memory.past.goes_on
        if not goes_on:
            for lease, _ in ledger.leases():
                ledger.give_back(lease)
        self.live: dict[int, Task] = {}
        self.running: dict[int, Task] = {}  # in the order of their start
        self.n_leased = 0
        for ordinal, attempt, phase in ledger.unfinished():  # of an earlier broker
            self.live[ordinal] = self._again_here(ordinal, attempt, phase, goes_on)
        self.next_ordinal: int = ledger.next_ordinal
        self.dropped: Counter[str] = Counter()
        self._queue: list[int] = sorted(o for o, task in self.live.items() if task.state == "queued")

    def _again_here(self, ordinal: int, attempt: int, phase: str, goes_on: bool) -> Task:
        """A task as an earlier broker has left it: with its trajectory, with its generator, or to be started again."""
        task, left = Task(ordinal, attempt), self.memory.past.trajectories.get(ordinal)
        if left is not None:
            self.facts(task, _core.summary(left[1]))
        if phase == "leased":
            self.n_leased += 1
            task.state = "leased"
        elif left is not None:
            if phase == "issued":
                self.ledger.generating(ordinal, attempt)
            if phase != "ready":
                self.ledger.ready(ordinal, attempt, task.sampled_tokens)
            task.state = "ready"
        elif goes_on and phase in ("issued", "generating"):
            if phase == "issued":
                self.ledger.generating(ordinal, attempt)
            task.state = "running"
            self.running[ordinal] = task
        elif phase != "requeued":  # turns that are kept of it go on with the next attempt
            self.ledger.requeue(ordinal, "log_damaged" if phase == "ready" and goes_on else "restart")
            task.attempt += 1
        return task

    @staticmethod
    def facts(task: Task, facts: dict[str, Any]) -> None:
        """Takes what a trajectory's header says of its tokens."""
        task.n_tokens, task.sampled_tokens = facts["n_tokens"], facts["n_actions"]
        task.min_version, task.max_version = facts["min_version"], facts["max_version"]

    @property
    def n_queued(self) -> int:
        """Tasks that wait to be started again."""
        return len(self._queue)

    @property
    def n_ready(self) -> int:
        """Finished trajectories that wait for the learner."""
        return len(self.live) - len(self.running) - len(self._queue) - self.n_leased

    def start(self, generator: Generator, now: float) -> Task:
        """Starts a task on a generator: the oldest of those to be started again, else a new one."""
        if self._queue:
            task = self.live[heapq.heappop(self._queue)]
        else:
            task = self.live[self.next_ordinal] = Task(self.next_ordinal, 0)
            self.next_ordinal += 1
        task.attempt = self.ledger.issue(task.ordinal)
        self.ledger.generating(task.ordinal, task.attempt)
        task.generator, task.started, task.state = generator.name, now, "running"
        self.running[task.ordinal] = task
        generator.train.add(task.ordinal)
        return task

    def current(self, ordinal: int, attempt: int, tokens: int) -> Task | str:
        """The running task that an answer belongs to, or why it is refused; tokens of late answers are counted."""
        task = self.live.get(ordinal)
        if ordinal >= self.next_ordinal or (task is not None and attempt > task.attempt):
            return "unknown task"
        if not self.memory.answered(ordinal, attempt):
            return "duplicate"
        if task is not None and task.attempt == attempt and task.state != "queued":
            return task if task.state == "running" else "duplicate"
        self.ledger.waste("late", tokens)
        self.dropped["late"] += 1
        return "late"

    def ready(self, task: Task, generator: Generator | None, now: float) -> None:
        """A running task is finished; its facts (`sampled_tokens`, ...) are set."""
        self.ledger.ready(task.ordinal, task.attempt, task.sampled_tokens)
        self._stop(task, generator)
        task.state, task.finished = "ready", now

    def again(
        self, task: Task, generator: Generator | None, reason: str, tokens: int = 0, *, goes_on: bool = False
    ) -> bool:
        """Puts a running task back to be started again, its `tokens` counted under `reason`, or to go on after the
        turns that are kept of it (`goes_on`); false: that was its last attempt, it is dropped.
        """
        task.losses += 1
        if task.losses >= MAX_ATTEMPTS:
            self.drop(task, generator, reason, tokens)
            return False
        self.requeue(task, generator, reason, tokens, goes_on=goes_on)
        return True

    def requeue(
        self, task: Task, generator: Generator | None, reason: str, tokens: int | None, *, goes_on: bool = False
    ) -> None:
        """Puts a task that is not queued back to be started again; `tokens` None: those it is known to have."""
        if task.state == "running" and not goes_on:
            tokens = max(tokens or 0, self.memory.prefix_tokens(task.ordinal))
        self.ledger.requeue(task.ordinal, reason, tokens)
        self.memory.gone(task.ordinal, turns=False)
        if not goes_on:  # said in the log, too, where the turns still are: the task itself is not over
            self.memory.begin_anew(task.ordinal, task.attempt)
        if task.state == "running":
            self._stop(task, generator)
        task.state, task.attempt = "queued", task.attempt + 1
        heapq.heappush(self._queue, task.ordinal)

    def drop(self, task: Task, generator: Generator | None, reason: str, tokens: int) -> None:
        """Ends a task that is not leased without training."""
        if task.state == "queued":
            self._queue.remove(task.ordinal)
            heapq.heapify(self._queue)
            task.attempt = self.ledger.issue(task.ordinal)
        tokens = max(tokens, self.memory.prefix_tokens(task.ordinal))
        self.ledger.drop(task.ordinal, task.attempt, reason, tokens)
        self.memory.gone(task.ordinal)
        self.dropped[reason] += 1
        if task.state == "running":
            self._stop(task, generator)
        del self.live[task.ordinal]

    def waste(self, reason: str, tokens: int) -> None:
        """Counts tokens that were sampled for no attempt that goes on."""
        if tokens:
            self.ledger.waste(reason, tokens)

    def drop_all(self, pool: Pool, reason: str) -> None:
        """Ends all tasks without training; none may be leased."""
        for task in list(self.live.values()):
            self.drop(task, pool.by_name.get(task.generator), reason, task.sampled_tokens)

    def lease(self, number: int, ordinals: list[int]) -> list[Task]:
        """Hands ready tasks to the learner."""
        self.ledger.lease(ordinals, number)
        self.n_leased += len(ordinals)
        tasks = [self.live[ordinal] for ordinal in ordinals]
        for task in tasks:
            task.state = "leased"
        return tasks

    def give_back(self, number: int, ordinals: Iterable[int]) -> None:
        """Leased tasks are ready again."""
        self.ledger.give_back(number)
        for ordinal in ordinals:
            self.live[ordinal].state = "ready"
            self.n_leased -= 1

    def trained(self, number: int, ordinals: Iterable[int], step: int, trained: int, masked: int) -> list[Task]:
        """A committed step used the lease. A learner that went back to a checkpoint repeats steps; the ledger goes
        on.
        """
        self.ledger.trained(number, max(step, (self.ledger.last_step or 0) + 1), trained, masked)
        tasks = [self.live.pop(ordinal) for ordinal in ordinals]
        for task in tasks:
            self.memory.gone(task.ordinal)
        self.n_leased -= len(tasks)
        return tasks

    def head(self, n: int) -> list[int] | None:
        """The `n` oldest tasks that are not leased, in the order of issue; `None` unless all of them are ready."""
        ordinals: list[int] = []
        for ordinal, task in self.live.items():
            if task.state == "leased":
                continue
            if task.state != "ready":
                return None
            ordinals.append(ordinal)
            if len(ordinals) == n:
                return ordinals
        return None

    def settle(self) -> dict[str, Any]:
        """Checks that every token is somewhere, brings the ledger to the disk, and returns its tokens."""
        self.ledger.check()
        self.memory.settle()
        tokens: dict[str, Any] = self.ledger.tokens()
        return tokens

    def _stop(self, task: Task, generator: Generator | None) -> None:
        del self.running[task.ordinal]
        if generator is not None:
            generator.train.discard(task.ordinal)
