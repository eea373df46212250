"""The finished trajectories of the broker until they are trained: the ready store, in the core's buffer, and the leases
on it: who asks for batches, which trajectories are with the learner, and until when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sao import _core
from sao.broker.metrics import StepMeter
from sao.broker.outbox import Outbox
from sao.broker.run import Run
from sao.broker.tasks import TaskBook
from sao.broker.versions import Versions
from sao.config import Config
from sao.errors import FullError, TransportError, ValidationError
from sao.storage.failpoints import failpoint
from sao.transport.messages import Batch, Buffer, Stop

STARVING_S: Final = 60.0


class ReadyStore:
    """The core's buffer, bounded by count and bytes, and what did not fit into it. Room is kept for the rollouts that
    run, so that what they bring home fits; should it not, because they are larger than any before, it waits outside
    the buffer and nothing new is started until it is in.
    """

    def __init__(self, max_trajectories: int, max_bytes: int, expected_bytes: int) -> None:
        self.max_trajectories, self.max_bytes = max_trajectories, max_bytes
        self.largest_bytes = expected_bytes
        self.buffer = _core.Buffer(max_trajectories, max_bytes, "reject")
        self.waiting: deque[tuple[int, Sequence[Buffer], int]] = deque()

    def put(self, ordinal: int, frames: Sequence[Buffer], min_version: int) -> None:
        """Takes a trajectory (header, payload, sidecars). Raises `ValidationError` for one that can never fit."""
        self.largest_bytes = max(self.largest_bytes, sum(memoryview(frame).nbytes for frame in frames))
        self.waiting.append((ordinal, frames, min_version))
        if len(self.waiting) == 1:
            self.refill()

    def refill(self) -> bool:
        """Moves what waits into the room that has become free; whether anything moved."""
        before = len(self.waiting)
        while self.waiting:
            ordinal, frames, version = self.waiting.popleft()
            try:
                self.buffer.put(*frames[:2], min_version=version, timeout_s=0.0, sidecars=frames[2:], task=ordinal)
            except FullError:
                self.waiting.appendleft((ordinal, frames, version))
                break
        return len(self.waiting) < before

    def room(self, leased: int, ready: int, running: int) -> int:
        """Rollouts that may still be started when all that run come home as large as the largest seen so far."""
        if self.waiting:
            return 0
        by_count = self.max_trajectories - leased - ready - running
        by_bytes = (self.max_bytes - self.buffer.stats()["bytes"]) // self.largest_bytes - running
        return max(0, min(by_count, by_bytes))

    def take(self, what: int | Sequence[int]) -> list[Any]:
        """The buffer's leases of so many in order of completion, or of these tasks; empty unless all are there."""
        if not isinstance(what, int) and not 0 < len(what) <= self.max_trajectories:
            return []  # what it can never hold is an error to the buffer
        return self.buffer.try_take(what)

    def discard(self, ordinal: int) -> None:
        """Frees the trajectory of this task, wherever it waits."""
        for lease in self.take([ordinal]):
            lease.commit()
        self.waiting = deque(entry for entry in self.waiting if entry[0] != ordinal)

    def clear(self) -> None:
        """Frees everything that waits or is ready."""
        self.waiting.clear()
        self.buffer.close()


@dataclass(slots=True)
class Take:
    """A learner's request that waits for `n` trajectories; `key` names it to the outbox."""

    key: Hashable
    n: int
    since: float
    warned: float


@dataclass(slots=True)
class OpenLease:
    """Trajectories that are with the learner, by the `take` that asked for them (None: an earlier broker's)."""

    key: Hashable
    ordinals: list[int]
    copies: list[Any]
    """The buffer's leases of them, but for those that the log has lost: these only the learner has."""


@dataclass(slots=True)
class LeaseTable:
    """The waiting takes and the open leases of the one learner. Numbers are given once in a run."""

    config: Config
    run: Run
    book: TaskBook
    store: ReadyStore
    versions: Versions
    meter: StepMeter
    outbox: Outbox
    takes: deque[Take] = field(default_factory=deque)
    open: dict[int, OpenLease] = field(default_factory=dict)
    session: str = ""
    """Of the learner that has joined last; who comes back with it holds what it was given."""
    back_by: float | None = None
    """When the leases of a silent learner are given back, unless it answers before."""
    next_number: int = 1
    last_number: int = 0
    """Of the lease that was trained last."""

    def ask(self, key: Hashable, n: int, now: float) -> None:
        """A `take` of `n` trajectories waits until there are as many. Raises `ValidationError`."""
        limit = self.config.learner.batch_trajectories
        if not 1 <= n <= limit or n % self.book.group_size:
            what = f"{n} is not in [1, learner.batch_trajectories = {limit}]"
            raise ValidationError(f"take.n: {what}, or no multiple of algorithm.group_size = {self.book.group_size}")
        if self.run.ending:
            self.outbox.answer(key, Stop(self.run.ending))
        else:
            self.takes.append(Take(key, n, now, now))

    def serve(self, now: float) -> None:
        """Answers the takes whose trajectories are ready, in the order in which they came."""
        while self.takes and (copies := self._ready(self.takes[0].n)):
            self._lease(self.takes.popleft(), copies, now)

    def starving(self, now: float) -> bool:
        """Whether a take has waited for `STARVING_S`, and again after as long."""
        hungry = [take for take in self.takes if now - take.warned >= STARVING_S]
        for take in hungry:
            take.warned = now
        return bool(hungry)

    def refuse(self, reason: str) -> None:
        """Answers all waiting takes: the run ends."""
        while self.takes:
            self.outbox.answer(self.takes.popleft().key, Stop(reason))

    def of(self, *keys: Hashable) -> list[int]:
        """Numbers of the open leases that have answered these takes."""
        return [number for number, lease in self.open.items() if lease.key in keys]

    def give_back(self, number: int) -> None:
        """Makes leased trajectories that the learner has not used ready again; those that the log lost start again."""
        lease = self.open.pop(number)
        self.book.give_back(number, lease.ordinals)
        for copy in lease.copies:
            copy.give_back()
        for ordinal in set(lease.ordinals).difference(copy.task for copy in lease.copies):
            self.book.requeue(self.book.live[ordinal], "log_damaged")

    def committed(self, number: int, step: int) -> bool:
        """Whether this very commit was taken before. Raises `TransportError` for a lease that is not open."""
        if number in self.open:
            return False
        if (number, step) != (self.last_number, self.run.step):
            raise TransportError(f"commit.lease: {number} is not open")
        return True

    def trained(self, number: int, step: int, trained: int, masked: int) -> None:
        """Step `step` has used an open lease. Raises `LedgerError` when the tokens are not those of the lease."""
        lease = self.open[number]
        for task in self.book.trained(number, lease.ordinals, step, trained, masked):
            self.meter.ended(task.n_tokens, True)
        del self.open[number]
        self.last_number = number
        for copy in lease.copies:
            copy.commit()

    def note(self) -> dict[str, Any]:
        """The state that `restore` needs beside the ledger's leases."""
        return {"next_lease": self.next_number, "last_lease": self.last_number, "learner": self.session}

    def restore(self, note: dict[str, Any], now: float) -> None:
        """Opens the leases of an earlier broker; its learner may come back for `transport.outage_s`. Those of their
        trajectories that are not in the store the log has lost.
        """
        self.next_number, self.last_number, self.session = note["next_lease"], note["last_lease"], note["learner"]
        self.back_by = now + self.config.transport.outage_s
        for number, ordinals in self.book.ledger.leases():
            copies = [copy for ordinal in ordinals for copy in self.store.take([ordinal])]
            self.open[number] = OpenLease(None, ordinals, copies)

    def _ready(self, n: int) -> list[Any]:
        """Copies of `n` trajectories in order of completion or of issue (`window`); empty while there are fewer.

        `window`: the `n` oldest tasks must all be ready. When a task is started at most (max_lag + 1) * batch - 1
        others are before it, so it is used in the (max_lag + 1)-th update from then at the latest: no token exceeds
        `max_lag`.
        """
        if self.config.staleness.order == "window":
            return self.store.take(self.book.head(n))
        return self.store.take(n if self.book.group_size == 1 else self.book.whole_groups(n))

    def _lease(self, take: Take, copies: list[Any], now: float) -> None:
        number, ordinals = self.next_number, [copy.task for copy in copies]
        tasks = self.book.lease(number, ordinals)
        self.open[number], self.next_number = OpenLease(take.key, ordinals, copies), number + 1
        for task in tasks:
            self.meter.taken(self.versions.current - task.min_version, now - task.finished)
        self.meter.wait_s += now - take.since
        batch = Batch(
            lease=number,
            version=self.versions.current,
            ordinals=tuple(ordinals),
            attempts=tuple(task.attempt for task in tasks),
            step=self.run.step,
            ages_s=tuple(now - task.finished for task in tasks),
            ended=min(self.book.live, default=self.book.next_ordinal),
            frames=tuple(memoryview(part) for copy in copies for part in (copy.header, copy.payload, *copy.sidecars)),
        )
        failpoint("broker.leased")
        self.outbox.answer(take.key, batch)
