"""A bounded buffer of finished trajectories between threads of one process.

Memory is bounded in bytes: room is reserved before a trajectory is copied in, and given back when its memory is freed.
What goes in is checked and encoded into the buffer's memory; what comes out are read-only views of that copy. A
trajectory taken out is *held*: it must be committed (it was trained) or given back (it goes back to its place), and
one that is dropped without either is given back. Waiting calls park, keep their order and notice signals; the last
resort against waiting too long is the deadline that each takes.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.errors import DeadlineError, ValidationError
from sao.trajectory import Trajectory, decode, encode_frames

Result = TypeVar("Result")


class Held:
    """A trajectory taken out of a `TrajectoryBuffer`; use `with`, or settle it by `commit` or `give_back`.

    Leaving the `with` block normally commits, leaving it by an exception gives back, unless it was settled inside.
    Arrays of `trajectory` stay valid after settling; as long as any of them lives, its bytes count against the budget.
    """

    __slots__ = ("_lease", "_settled", "trajectory")

    def __init__(self, lease: _core.Lease) -> None:
        self._lease = lease
        self._settled = False
        self.trajectory = decode(lease.header, lease.payload, sidecars=lease.sidecars)

    @property
    def sequence(self) -> int:
        """Position in the order of completion, from 0."""
        return self._lease.sequence

    def commit(self) -> None:
        """The trajectory was used up. Raises `ClosedError` if already settled."""
        self._lease.commit()
        self._settled = True

    def give_back(self) -> None:
        """The trajectory returns to its place in the order of completion. Raises `ClosedError` if already settled."""
        self._lease.give_back()
        self._settled = True

    def __enter__(self) -> Trajectory:
        return self.trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            (self.commit if kind is None else self.give_back)()


class TrajectoryBuffer:
    """Trajectories in order of completion or of tasks, for any number of producer and consumer threads.

    `take` gives the next in order of completion. `take_tasks` gives those of certain tasks, which is what groups need
    (an ordinal for each member), and a windowed FIFO: start tasks in the order of their ordinals while `sao.Admission`
    permits, and take the oldest `batch` of them for each step; no token is then older than `max_lag` versions
    (docs/explanation/window.md has the proof, docs/how-to/embed.md a program).

    Args:
        max_trajectories: trajectories kept at most, held ones included.
        max_bytes: encoded bytes kept at most, held ones and those still viewed included.
        policy: what `put` does when there is no room: `block` waits, `reject` raises `FullError`, `drop_oldest` drops
            the first in order, `drop_stalest` the one with the oldest policy version. Held trajectories are never
            dropped; when nothing else is left the dropping policies wait.

    Raises `ValidationError` for a limit below 1 or an unknown policy.
    """

    def __init__(
        self,
        max_trajectories: int,
        max_bytes: int,
        policy: Literal["block", "reject", "drop_oldest", "drop_stalest"] = "block",
    ) -> None:
        self._core = _core.Buffer(max_trajectories, max_bytes, policy)

    def put(self, trajectory: Trajectory, timeout_s: float | None = None) -> int:
        """Puts `trajectory` in; returns how many the policy dropped for it.

        Waits up to `timeout_s` seconds (None: without end) for room. Raises `DeadlineError`, `FullError` (policy
        `reject`), `ClosedError`, and at once `ValidationError` for one that can never fit.
        """
        return len(self._core.put_trajectory(trajectory, timeout_s))

    def take(self, n: int, timeout_s: float | None = None) -> list[Held]:
        """The next `n` trajectories, all of them or none.

        Waits up to `timeout_s` seconds (None: without end). Raises `DeadlineError`, `ClosedError`, and at once
        `ValidationError` unless 1 <= n <= max_trajectories.
        """
        return [Held(lease) for lease in self._core.take(n, timeout_s)]

    def try_take(self, n: int) -> list[Held]:
        """As `take` without waiting: an empty list when fewer than `n` are ready or others wait for theirs."""
        return [Held(lease) for lease in self._core.try_take(n)]

    def take_tasks(self, ordinals: Sequence[int], timeout_s: float | None = None) -> list[Held]:
        """The trajectories of exactly these tasks (`task_ordinal`), in the order asked, all of them or none; of several
        of one task the one that finished first.

        Waits up to `timeout_s` seconds (None: without end) in one queue with `take`: what it waits for holds up those
        behind it. What it waits for must find room: with policy `block`, `max_trajectories` and `max_bytes` must cover
        all tasks that may be in flight; one that another policy dropped is waited for until it is put again. Raises
        `DeadlineError`, which names a task that is missing if it was first in the queue, `ClosedError`, and at once
        `ValidationError` unless there are 1 to max_trajectories ordinals, each at least 0 and named once.
        """
        return [Held(lease) for lease in self._core.take(ordinals, timeout_s)]

    def try_take_tasks(self, ordinals: Sequence[int]) -> list[Held]:
        """As `take_tasks` without waiting: an empty list when not all are ready or others wait for theirs."""
        return [Held(lease) for lease in self._core.try_take(ordinals)]

    def drain(self, n: int, timeout_s: float | None = None) -> list[Trajectory]:
        """As `take`, committed at once: for consumers that need not be able to give anything back."""
        taken = self.take(n, timeout_s)
        for held in taken:
            held.commit()
        return [held.trajectory for held in taken]

    async def put_async(self, trajectory: Trajectory, timeout_s: float | None = None) -> int:
        """As `put`, for coroutines: the event loop goes on while it waits, and no thread waits for it."""
        header, payload, *sidecars = encode_frames(trajectory)
        sampled = any(len(segment.version_spans) for segment in trajectory.segments)
        version = trajectory.min_version if sampled else 0
        size = sum(len(frame) for frame in (header, payload, *sidecars))
        waiter = self._core.wait_to_put(size)
        attempt = lambda: waiter.put(header, payload, version, sidecars, task=trajectory.task_ordinal)  # noqa: E731
        return len(await _until(waiter, attempt, timeout_s, f"room for a trajectory of {size} bytes"))

    async def take_async(self, n: int, timeout_s: float | None = None) -> list[Held]:
        """As `take`, for coroutines. They stand in one queue with threads; a cancelled one leaves it."""
        waiter = self._core.wait_to_take(n)
        return [Held(lease) for lease in await _until(waiter, waiter.take, timeout_s, f"{n} trajectories")]

    async def take_tasks_async(self, ordinals: Sequence[int], timeout_s: float | None = None) -> list[Held]:
        """As `take_tasks`, for coroutines; its `DeadlineError` names no task."""
        what = f"the trajectories of {len(ordinals)} tasks"
        waiter = self._core.wait_to_take(ordinals)
        return [Held(lease) for lease in await _until(waiter, waiter.take, timeout_s, what)]

    def advance(self, version: int, keep_from: int | None = None) -> int:
        """Notes the policy version; drops what is ready and older than `keep_from`, and returns how many that were."""
        return len(self._core.advance(version, keep_from))

    def snapshot(self) -> dict[str, NDArray[np.generic]]:
        """The trajectories, in order of completion: arrays sequence, leased, bytes, min_version and task (-1: none), an
        entry a trajectory.

        Producers and consumers go on meanwhile: what is held from beginning to end is in it exactly once.
        """
        return self._core.snapshot()

    def stats(self) -> dict[str, Any]:
        """Counters: trajectories (ready to be taken), leased, copying, bytes, received, committed, dropped (by reason),
        waiting_takes, waiting_puts, version, closed. received = trajectories + leased + committed + all dropped.
        """
        return self._core.stats()

    def close(self) -> None:
        """Wakes everybody who waits with `ClosedError` and frees what is ready; held trajectories stay valid."""
        self._core.close()

    def __len__(self) -> int:
        return len(self._core)

    def __enter__(self) -> "TrajectoryBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _until(
    waiter: _core.Waiter, attempt: Callable[[], Result | None], timeout_s: float | None, what: str
) -> Result:
    """The result of `attempt`, tried again whenever the waiter is notified."""
    import asyncio  # here, because it is heavier than the rest of this module

    loop = asyncio.get_running_loop()
    notified = asyncio.Event()
    try:
        if timeout_s is not None and not timeout_s >= 0:  # a NaN would come between the timers of the loop
            raise ValidationError(f"timeout_s: {timeout_s} must be at least 0")
        if (result := attempt()) is not None:
            return result
        loop.add_reader(waiter.fileno(), notified.set)
        try:
            async with asyncio.timeout(timeout_s):
                while (result := attempt()) is None:
                    await notified.wait()
                    notified.clear()
                return result
        except TimeoutError:
            raise DeadlineError(f"waited {timeout_s} s for {what}") from None
        finally:
            loop.remove_reader(waiter.fileno())
    finally:
        waiter.close()
