"""The task book of the broker: every unfinished training task, where it is, and the ledger that says the same on disk.

    issued -> generating -> ready -> leased -> trained
       ^__________|___________|         |_____ given back: ready
       requeued, next attempt           dropped(reason): from everywhere but a lease

Ordinals are handed out once, in order; a task that is started again keeps its ordinal and gets the next attempt. Tasks
k * size ... (k + 1) * size - 1 are group k, for estimators that compare rollouts of one prompt; with size 1 every task
is a group.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sao import _core
from sao.broker.persistence import Persistence
from sao.transport.messages import Buffer

Split = Literal["train", "eval"]
MAX_ATTEMPTS: Final = 5  # of a task whose generators keep dying; a restart of the run is not its fault
MAX_REASONS: Final = 64  # different reasons of drops; further ones of environments are counted as "other"


def task_seed(run_seed: int, split: Split, index: int) -> int:
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

    def describe(self, metadata: dict[str, Any]) -> None:
        """Takes over what the header of its trajectory says of its tokens."""
        self.n_tokens, self.sampled_tokens = metadata["n_tokens"], metadata["n_actions"]
        self.min_version, self.max_version = metadata["min_version"], metadata["max_version"]


class TaskBook:
    """The unfinished tasks in the order in which they were issued. Every change is written to the ledger first."""

    def __init__(self, persistence: Persistence, group_size: int = 1) -> None:
        """Goes on with what an earlier broker has left in the ledger."""
        self.persistence, self.ledger, self.group_size = persistence, persistence.ledger, group_size
        goes_on, ledger = persistence.found.goes_on, self.ledger
        if not goes_on:
            for lease, _ in ledger.leases():
                ledger.give_back(lease)
        self.live: dict[int, TrainingTask] = {}
        self.running: dict[int, TrainingTask] = {}  # in the order of their start
        self.n_leased = 0
        for ordinal, attempt, phase in ledger.unfinished():  # of an earlier broker
            self.live[ordinal] = self._restored(ordinal, attempt, phase, goes_on)
        self.next_ordinal: int = ledger.next_ordinal
        self.dropped: Counter[str] = Counter()
        self.commits = 0  # of this broker
        self.trained_before: int = ledger.counts()["trained"]
        self._queue: list[int] = sorted(o for o, task in self.live.items() if task.state == "queued")

    @property
    def n_queued(self) -> int:
        """Tasks that wait to be started again."""
        return len(self._queue)

    @property
    def n_ready(self) -> int:
        """Finished trajectories that wait for the learner."""
        return len(self.live) - len(self.running) - len(self._queue) - self.n_leased

    # -- issued, generating

    def start(self, generator: str, now: float) -> TrainingTask:
        """Starts a task on a generator: the oldest of those to be started again, else a new one."""
        if self._queue:
            task = self.live[heapq.heappop(self._queue)]
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

    def turns(self, ordinal: int) -> list[tuple[bytes, bytes]]:
        """The turns that are kept of a task, which its next attempt goes on after."""
        prefix = self.persistence.prefixes.get(ordinal)
        return prefix.turns if prefix else []

    def turn(
        self, ordinal: int, attempt: int, part: int, tokens: int, version: int, header: Buffer, payload: Buffer
    ) -> None:
        """Keeps a turn of a rollout that runs; of any other it is left out."""
        task = self.running.get(ordinal)
        if task is not None and task.attempt == attempt:
            self.persistence.turn(ordinal, part, tokens, version, header, payload)

    def diverged(self, ordinal: int, attempt: int) -> None:
        """A rollout could not go on after its turns and was begun anew: their tokens are dropped."""
        task = self.running.get(ordinal)
        if task is not None and task.attempt == attempt:
            self._drop_turns(task, "diverged")

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
        self.persistence.trajectory(task.ordinal, frames)
        del self.running[task.ordinal]
        task.state, task.finished = "ready", now

    def head(self, n: int) -> list[int] | None:
        """The `n` oldest tasks that are not leased, in the order of issue; None unless all of them are ready."""
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

    def whole_groups(self, n: int) -> list[int] | None:
        """The `n` ordinals of the groups that were complete first; None when there are fewer."""
        groups: dict[int, list[TrainingTask]] = defaultdict(list)
        for task in self.live.values():
            if task.state == "ready":
                groups[task.ordinal // self.group_size].append(task)
        whole = [tasks for tasks in groups.values() if len(tasks) == self.group_size]
        whole.sort(key=lambda tasks: (max(task.finished for task in tasks), tasks[0].ordinal))
        ordinals = [task.ordinal for tasks in whole for task in sorted(tasks, key=lambda task: task.ordinal)]
        return ordinals[:n] if len(ordinals) >= n else None

    # -- leased, trained

    def lease(self, number: int, ordinals: list[int]) -> list[TrainingTask]:
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

    def trained(self, number: int, ordinals: Iterable[int], step: int, trained: int, masked: int) -> list[TrainingTask]:
        """A committed step used the lease. A learner that went back to a checkpoint repeats steps; the ledger goes
        on.
        """
        self.ledger.trained(number, max(step, (self.ledger.last_step or 0) + 1), trained, masked)
        tasks = [self.live.pop(ordinal) for ordinal in ordinals]
        self.n_leased -= len(tasks)
        self.commits += 1
        return tasks

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
            tokens = max(tokens or 0, self.persistence.prefix_tokens(task.ordinal))
        self.ledger.requeue(task.ordinal, reason, tokens)
        if not goes_on:
            self.persistence.begin_anew(task.ordinal)
        self.running.pop(task.ordinal, None)
        task.state, task.attempt = "queued", task.attempt + 1
        heapq.heappush(self._queue, task.ordinal)

    def rewind(self, version: int, capacity: int) -> list[int]:
        """Takes back what newer weights than `version` have sampled, and what is ready beyond the `capacity` oldest
        tasks; returns the ordinals whose trajectories are no longer wanted.
        """
        ahead = set(sorted(self.live)[:capacity])
        ready = [task for task in self.live.values() if task.state == "ready"]
        back = [task for task in ready if task.max_version > version or task.ordinal not in ahead]
        for task in back:
            self.requeue(task, "rewound")
        for ordinal, prefix in list(self.persistence.prefixes.items()):
            if prefix.version > version:
                self._drop_turns(self.live[ordinal], "rewound")
        return [task.ordinal for task in back]

    def drop(self, task: TrainingTask, reason: str, tokens: int = 0) -> None:
        """Ends a task that is not leased without training; `tokens`: sampled for one that is not ready."""
        if task.state == "queued":
            self._queue.remove(task.ordinal)
            heapq.heapify(self._queue)
            task.attempt = self.ledger.issue(task.ordinal)
        if task.state == "ready":
            tokens = task.sampled_tokens
        tokens = max(tokens, self.persistence.prefix_tokens(task.ordinal))
        self.ledger.drop(task.ordinal, task.attempt, reason, tokens)
        self.persistence.forget_turns(task.ordinal)
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
        lost = []
        for task in self.live.values():
            first = task.ordinal // self.group_size * self.group_size
            issued = range(first, min(first + self.group_size, self.next_ordinal))
            if any(member not in self.live for member in issued):
                lost.append(task)
        return lost

    # -- inside

    def _restored(self, ordinal: int, attempt: int, phase: str, goes_on: bool) -> TrainingTask:
        """A task as an earlier broker has left it: with its trajectory, with its generator, or to be started again."""
        task, left = TrainingTask(ordinal, attempt), self.persistence.found.trajectories.get(ordinal)
        if left is not None:
            task.describe(_core.summary(left[0]))
        if phase == "leased":
            self.n_leased += 1
            task.state = "leased"
        elif left is not None:
            task.state = "ready"
        elif goes_on and phase == "generating":
            task.state = "running"
            self.running[ordinal] = task
        elif phase != "requeued":  # turns that are kept of it go on with the next attempt
            self.ledger.requeue(ordinal, "log_damaged" if phase == "ready" and goes_on else "restart")
            task.attempt += 1
        return task

    def _drop_turns(self, task: TrainingTask, reason: str) -> None:
        tokens = self.persistence.begin_anew(task.ordinal)
        if tokens:
            self.ledger.waste(reason, tokens)
