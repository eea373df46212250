"""The task book of the broker: every unfinished training task, where it is, and the ledger that says the same on disk.

    issued -> generating -> ready -> leased -> trained
       ^__________|___________|         |_____ given back: ready
       requeued, next attempt           dropped(reason): from everywhere but a lease

Ordinals are handed out once, in order; a task that is started again keeps its ordinal and gets the next attempt. Tasks
k * size ... (k + 1) * size - 1 are group k, for estimators that compare rollouts of one prompt; with size 1 every task
is a group.
"""

import hashlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Final, Literal

import msgspec

from sao import _core
from sao.broker.persistence import Persistence
from sao.transport.messages import Buffer, KeptTurn

MAX_ATTEMPTS: Final = 5  # of a task whose generators keep dying; a restart of the run is not its fault
MAX_REASONS: Final = 64  # different reasons of drops; further ones of environments are counted as "other"


def task_seed(run_seed: int, split: Literal["train", "eval"], index: int) -> int:
    """The seed of a task, 53 bits so that it survives a double: a function of the run's seed, the split and the index
    alone. A repeated attempt gets the same task; the train and eval splits never share a stream.
    """
    digest = hashlib.blake2b(f"{run_seed}:{split}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def reason_code(text: str) -> str:
    """A failure's reason as a short counter name, so that text from an environment cannot grow the set of counters."""
    return re.sub(r"[^a-z0-9_]+", "_", text.lower()).strip("_")[:40] or "unknown"


@dataclass(slots=True)
class TrainingTask:
    """One unfinished training task. `queued`: to be started again; times are seconds of the broker's clock."""

    ordinal: int
    attempt: int
    state: Literal["queued", "running", "ready", "leased"] = "queued"
    generator: str = ""
    """Name of the generator that has started it last; empty when an earlier broker knew."""
    started: float = 0.0
    finished: float = 0.0
    timed_out: bool = False
    losses: int = 0
    n_tokens: int = 0
    sampled_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    turns: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Header and payload of each turn that is kept while it runs, so that its next attempt goes on after them."""
    turn_tokens: int = 0
    turn_version: int = 0
    """The newest version that has sampled any of them."""

    def describe(self, metadata: dict[str, Any]) -> None:
        """Takes over what the header of its trajectory says of its tokens."""
        self.n_tokens, self.sampled_tokens = metadata["n_tokens"], metadata["n_actions"]
        self.min_version, self.max_version = metadata["min_version"], metadata["max_version"]


class TaskBook:
    """The unfinished tasks in the order in which they were issued. Every change is written to the ledger first."""

    def __init__(self, persistence: Persistence, group_size: int = 1) -> None:
        """Goes on with what an earlier broker has left in the ledger."""
        self.persistence, self.ledger, self.group_size = persistence, persistence.ledger, group_size
        if not persistence.note:
            for lease, _ in self.ledger.leases():
                self.ledger.give_back(lease)
        self.live: dict[int, TrainingTask] = {}
        self.running: dict[int, TrainingTask] = {}  # in the order of their start
        self.queue: list[int] = []  # a heap of those to be started again
        self.turn_bytes = 0
        self.restored: dict[int, tuple[bytes, ...]] = {}
        """The trajectories that an earlier broker has left: header, payload, sidecars."""
        for ordinal, attempt, phase in self.ledger.unfinished():
            self.live[ordinal] = self._restored(ordinal, attempt, phase)
        self.next_ordinal: int = self.ledger.next_ordinal
        self.dropped: Counter[str] = Counter()
        self.commits = 0  # of this broker
        self.trained_before: int = self.ledger.counts()["trained"]

    # -- issued, generating

    def start(self, generator: str, now: float) -> TrainingTask:
        """Starts a task on a generator: the oldest of those to be started again, else a new one."""
        if self.queue:
            task = self.live[heapq.heappop(self.queue)]
        else:
            task = self.live[self.next_ordinal] = TrainingTask(self.next_ordinal, 0)
            self.next_ordinal += 1
        task.attempt = self.ledger.issue(task.ordinal)
        self.ledger.generating(task.ordinal, task.attempt)
        task.generator, task.started, task.state = generator, now, "running"
        self.running[task.ordinal] = task
        return task

    def running_on(self, generator: str) -> list[TrainingTask]:
        """The running tasks of a generator, in order of issue; of "": those that no generator has claimed."""
        found = [task for task in self.running.values() if task.generator == generator]
        return sorted(found, key=lambda task: task.ordinal)

    def claim(self, ordinal: int, attempt: int, generator: str) -> bool:
        """Whether this attempt runs and is the generator's; one that an earlier broker has started becomes so."""
        task = self.running.get(ordinal)
        if task is None or task.attempt != attempt or task.generator not in ("", generator):
            return False
        task.generator = generator
        return True

    def turn(self, message: KeptTurn) -> None:
        """Keeps the next turn of a rollout that runs; one of another attempt or out of order is left out. A rollout
        that finds no room in `buffer.prefix_bytes` would begin anew, should it be lost.
        """
        task, turn = self.running.get(message.ordinal), (bytes(message.frames[0]), bytes(message.frames[1]))
        if task is None or task.attempt != message.attempt:
            return
        if message.part == 0 and task.turns and task.turns[0] != turn:
            self._begin_anew(task)
        if message.part != len(task.turns):
            return
        if self.turn_bytes + len(turn[0]) + len(turn[1]) > self.persistence.prefix_bytes:
            self._begin_anew(task)
            return
        self._keep(task, message.tokens, message.version, turn)
        if self.persistence.frames:
            numbers = msgspec.msgpack.encode((message.tokens, message.version))
            self.persistence.write(lambda: self.ledger.turn(task.ordinal, message.part, (numbers, *turn)))

    def diverged(self, ordinal: int, attempt: int) -> None:
        """A rollout could not go on after its turns and was begun anew: their tokens are dropped."""
        task = self.running.get(ordinal)
        if task is not None and task.attempt == attempt:
            self._begin_anew(task, "diverged")

    def current(self, ordinal: int, attempt: int, tokens: int) -> TrainingTask | str:
        """The running task that an answer belongs to, or why it is refused; tokens of late answers are counted."""
        task = self.live.get(ordinal)
        if ordinal >= self.next_ordinal or (task is not None and attempt > task.attempt):
            return "unknown task"
        if not self.ledger.answered(ordinal, attempt):
            return "duplicate"
        if task is not None and task.attempt == attempt and task.state != "queued":
            return task if task.state == "running" else "duplicate"
        self.ledger.waste("late", tokens)
        self.dropped["late"] += 1
        return "late"

    # -- ready

    def ready(self, task: TrainingTask, metadata: dict[str, Any], frames: Sequence[Buffer], now: float) -> None:
        """A running task is finished: `frames` are its trajectory (header, payload, sidecars)."""
        task.describe(metadata)
        self.ledger.ready(task.ordinal, task.attempt, task.sampled_tokens)
        if self.persistence.frames:
            self.persistence.write(lambda: self.ledger.trajectory(task.ordinal, frames))
        self._forget_turns(task)  # they are in it
        del self.running[task.ordinal]
        task.state, task.finished = "ready", now

    def head(self, n: int) -> list[int]:
        """The `n` oldest tasks that are not leased, in the order of issue; empty unless all of them are ready."""
        waiting = (task for task in self.live.values() if task.state != "leased")
        ready = islice(takewhile(lambda task: task.state == "ready", waiting), n)
        ordinals = [task.ordinal for task in ready]
        return ordinals if len(ordinals) == n else []

    def whole_groups(self, n: int) -> list[int]:
        """The `n` ordinals of the groups that were complete first; empty when there are fewer."""
        groups: dict[int, list[TrainingTask]] = defaultdict(list)
        for task in self.live.values():
            if task.state == "ready":
                groups[task.ordinal // self.group_size].append(task)
        whole = [tasks for tasks in groups.values() if len(tasks) == self.group_size]
        whole.sort(key=lambda tasks: (max(task.finished for task in tasks), tasks[0].ordinal))
        ordinals = [task.ordinal for tasks in whole for task in sorted(tasks, key=lambda task: task.ordinal)]
        return ordinals[:n] if len(ordinals) >= n else []

    # -- leased, trained

    def lease(self, number: int, ordinals: list[int]) -> list[TrainingTask]:
        """Hands ready tasks to the learner."""
        self.ledger.lease(ordinals, number)
        tasks = [self.live[ordinal] for ordinal in ordinals]
        for task in tasks:
            task.state = "leased"
        return tasks

    def give_back(self, number: int, ordinals: Iterable[int]) -> None:
        """Leased tasks are ready again."""
        self.ledger.give_back(number)
        for ordinal in ordinals:
            self.live[ordinal].state = "ready"

    def trained(self, number: int, ordinals: Iterable[int], step: int, trained: int, masked: int) -> list[TrainingTask]:
        """A committed step used the lease. A learner that went back repeats steps, which the ledger numbers anew."""
        self.ledger.trained(number, max(step, (self.ledger.last_step or 0) + 1), trained, masked)
        self.commits += 1
        return [self.live.pop(ordinal) for ordinal in ordinals]

    def settle(self) -> None:
        """Checks that every token is somewhere and brings the ledger to the disk. Raises `LedgerError`."""
        self.ledger.check()
        self.persistence.settle()

    # -- started again, dropped

    def again(self, task: TrainingTask, reason: str, tokens: int = 0, *, goes_on: bool = False) -> bool:
        """Puts a running task back to be started again, its `tokens` counted under `reason`, or to go on after the
        turns that are kept of it (`goes_on`). False: that was its last attempt, nothing has changed.
        """
        if task.losses + 1 >= MAX_ATTEMPTS:
            return False
        task.losses += 1
        self.requeue(task, reason, tokens, goes_on=goes_on)
        return True

    def requeue(self, task: TrainingTask, reason: str, tokens: int | None = None, *, goes_on: bool = False) -> None:
        """Puts a task that is not queued back to be started again; `tokens` None: those it is known to have."""
        if task.state == "running" and not goes_on:
            tokens = max(tokens or 0, task.turn_tokens)
        self.ledger.requeue(task.ordinal, reason, tokens)
        if not goes_on:
            self._begin_anew(task)
        self.running.pop(task.ordinal, None)
        task.state, task.attempt = "queued", task.attempt + 1
        heapq.heappush(self.queue, task.ordinal)

    def rewind(self, version: int, capacity: int) -> list[int]:
        """Takes back what newer weights than `version` have sampled, and what is ready beyond the `capacity` oldest
        tasks; returns the ordinals of the ready ones.
        """
        ahead = set(sorted(self.live)[:capacity])
        ready = [task for task in self.live.values() if task.state == "ready"]
        back = [task for task in ready if task.max_version > version or task.ordinal not in ahead]
        for task in back:
            self.requeue(task, "rewound")
        for task in self.live.values():
            if task.turn_version > version:
                self._begin_anew(task, "rewound")
        return [task.ordinal for task in back]

    def drop(self, task: TrainingTask, reason: str, tokens: int = 0) -> None:
        """Ends a task that is not leased without training; `tokens`: sampled for one that is not ready."""
        if task.state == "queued":
            self.queue.remove(task.ordinal)
            heapq.heapify(self.queue)
            task.attempt = self.ledger.issue(task.ordinal)
        if task.state == "ready":
            tokens = task.sampled_tokens
        self.ledger.drop(task.ordinal, task.attempt, reason, max(tokens, task.turn_tokens))
        self._forget_turns(task)
        self.dropped[reason] += 1
        self.running.pop(task.ordinal, None)
        del self.live[task.ordinal]

    def reason(self, text: str) -> str:
        """The code under which a failure is counted, as `failed_...`; past `MAX_REASONS` different ones "other"."""
        code = reason_code(text)
        return code if f"failed_{code}" in self.dropped or len(self.dropped) < MAX_REASONS else "other"

    def group(self, ordinal: int) -> list[TrainingTask]:
        """The unfinished tasks of the group of `ordinal`, itself included."""
        first = ordinal // self.group_size * self.group_size
        found = (self.live.get(member) for member in range(first, first + self.group_size))
        return [task for task in found if task is not None]

    def broken_groups(self) -> list[TrainingTask]:
        """Unfinished tasks whose group has lost a member, as a killed broker may leave them."""
        size, issued = self.group_size, self.next_ordinal
        tasks = ((task, issued - task.ordinal // size * size) for task in self.live.values())
        return [task for task, members in tasks if len(self.group(task.ordinal)) < min(size, members)]

    # -- inside

    def _restored(self, ordinal: int, attempt: int, phase: str) -> TrainingTask:
        """A task as an earlier broker has left it: with its trajectory, with its generator, or to be started again."""
        task, goes_on = TrainingTask(ordinal, attempt), bool(self.persistence.note)
        frames = self.ledger.frames(ordinal)
        if phase not in ("ready", "leased"):
            for numbers, header, payload in frames if self.persistence.prefix_bytes else ():
                tokens, version = msgspec.msgpack.decode(numbers)
                self._keep(task, tokens, version, (header, payload))
        elif frames:
            self.restored[ordinal] = frames[0]
            task.describe(_core.summary(frames[0][0]))
        if phase == "leased":
            task.state = "leased"
        elif ordinal in self.restored:
            task.state = "ready"
        elif goes_on and phase == "generating":
            task.state = "running"
            self.running[ordinal] = task
        else:  # turns that are kept of it go on with the next attempt
            if phase != "requeued":
                self.ledger.requeue(ordinal, "log_damaged" if phase == "ready" and goes_on else "restart")
                task.attempt += 1
            heapq.heappush(self.queue, ordinal)
        return task

    def _keep(self, task: TrainingTask, tokens: int, version: int, turn: tuple[bytes, bytes]) -> None:
        task.turns.append(turn)
        task.turn_tokens, task.turn_version = task.turn_tokens + tokens, max(task.turn_version, version)
        self.turn_bytes += len(turn[0]) + len(turn[1])

    def _begin_anew(self, task: TrainingTask, reason: str = "") -> None:
        """The turns of a task count no longer; with a reason their tokens are dropped under it."""
        if task.turns:
            self.ledger.begin_anew(task.ordinal)
        if reason and task.turn_tokens:
            self.ledger.waste(reason, task.turn_tokens)
        self._forget_turns(task)

    def _forget_turns(self, task: TrainingTask) -> None:
        self.turn_bytes -= sum(len(header) + len(payload) for header, payload in task.turns)
        task.turns, task.turn_tokens, task.turn_version = [], 0, 0
