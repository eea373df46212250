"""The ready store of the broker: finished trajectories until they are trained."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from sao import _core
from sao.errors import FullError
from sao.transport.messages import Buffer


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
