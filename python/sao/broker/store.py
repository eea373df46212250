"""The ready store of the broker: finished trajectories until they are trained."""

from __future__ import annotations

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
        self._buffer = _core.Buffer(max_trajectories, max_bytes, "reject")
        self._waiting: deque[tuple[int, Sequence[Buffer], int]] = deque()

    @property
    def n_waiting(self) -> int:
        """Trajectories that did not fit."""
        return len(self._waiting)

    def stats(self) -> dict[str, Any]:
        """The buffer's counters."""
        return self._buffer.stats()

    def put(self, ordinal: int, frames: Sequence[Buffer], min_version: int) -> None:
        """Takes an encoded trajectory: header, payload, sidecars; never blocks. Raises `ValidationError` for one that
        can never fit.
        """
        self.largest_bytes = max(self.largest_bytes, sum(memoryview(frame).nbytes for frame in frames))
        if self._waiting or not self._fits(ordinal, frames, min_version):
            self._waiting.append((ordinal, frames, min_version))

    def refill(self) -> bool:
        """Moves what waits into the room that has become free; whether anything moved."""
        before = len(self._waiting)
        while self._waiting and self._fits(*self._waiting[0]):
            self._waiting.popleft()
        return len(self._waiting) < before

    def room(self, leased: int, ready: int, running: int) -> int:
        """Rollouts that may still be started when all that run come home as large as the largest seen so far."""
        if self._waiting:
            return 0
        by_count = self.max_trajectories - leased - ready - running
        by_bytes = (self.max_bytes - self._buffer.stats()["bytes"]) // self.largest_bytes - running
        return max(0, min(by_count, by_bytes))

    def take(self, n: int) -> list[tuple[int, Any]]:
        """`n` (ordinal, lease) pairs in order of completion; empty when there are fewer."""
        return [(lease.task, lease) for lease in self._buffer.try_take(n)]

    def take_tasks(self, ordinals: Sequence[int]) -> list[tuple[int, Any]]:
        """(ordinal, lease) pairs of these tasks, in this order; empty unless all are in the buffer."""
        if not 0 < len(ordinals) <= self.max_trajectories:  # what it can never hold is an error to the buffer
            return []
        return [(lease.task, lease) for lease in self._buffer.try_take(ordinals)]

    def discard(self, ordinal: int) -> None:
        """Frees the trajectory of this task, wherever it waits."""
        for _, lease in self.take_tasks([ordinal]):
            lease.commit()
        self._waiting = deque(entry for entry in self._waiting if entry[0] != ordinal)

    def keep_from(self, version: int, oldest: int | None) -> list[int]:
        """Tells the buffer the policy version; drops what is older than `oldest` and returns the ordinals."""
        return self._buffer.advance(version, oldest)

    def clear(self) -> None:
        """Frees everything that waits or is ready."""
        self._waiting.clear()
        self._buffer.close()

    def _fits(self, ordinal: int, frames: Sequence[Buffer], min_version: int) -> bool:
        header, payload, *sidecars = frames
        try:
            self._buffer.put(header, payload, min_version=min_version, timeout_s=0.0, sidecars=sidecars, task=ordinal)
        except FullError:
            return False
        return True
