"""Coroutines that wait for a buffer: no thread, one queue with those who park, cancelled ones leave it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from sao import Segment, Termination, Trajectory, TrajectoryBuffer
from sao.errors import ClosedError, DeadlineError, FullError, ValidationError


def trajectory(ordinal: int) -> Trajectory:
    mask = np.array([False, True, True])
    logprobs = np.where(mask, -0.5, np.nan).astype(np.float32)
    segment = Segment("execution", np.arange(3, dtype=np.int32), mask, logprobs, np.array([[1, 3, 7]]))
    return Trajectory(bytes(16), ordinal, 0, "test", (segment,), 1.0, Termination("finished"), 1.0)


def test_a_coroutine_takes_what_a_thread_puts_later() -> None:
    buffer = TrajectoryBuffer(8, 1 << 20)
    threads = threading.active_count()

    async def main() -> int:
        waiting = asyncio.create_task(buffer.take_async(2, 20))
        while buffer.stats()["waiting_takes"] == 0:
            await asyncio.sleep(0)
        assert threading.active_count() == threads
        putter = threading.Thread(target=lambda: [buffer.put(trajectory(i)) for i in range(2)])
        putter.start()
        held = await waiting
        putter.join()
        for item in held:
            item.commit()
        return len(held)

    assert asyncio.run(main()) == 2
    assert buffer.stats()["committed"] == 2


def test_hundreds_of_coroutines_share_one_loop() -> None:
    buffer, n = TrajectoryBuffer(4, 1 << 20), 300

    async def main() -> list[int]:
        async def produce(i: int) -> None:
            await buffer.put_async(trajectory(i), 60)

        async def consume() -> int:
            [held] = await buffer.take_async(1, 60)
            with held as taken:
                return taken.task_ordinal

        consumers = [asyncio.create_task(consume()) for _ in range(n)]
        await asyncio.gather(*(produce(i) for i in range(n)))
        return await asyncio.gather(*consumers)

    assert sorted(asyncio.run(main())) == list(range(n))
    stats = buffer.stats()
    assert (stats["committed"], stats["waiting_takes"], stats["waiting_puts"]) == (n, 0, 0)


def test_a_deadline_and_a_cancellation_leave_the_queue() -> None:
    buffer = TrajectoryBuffer(1, 1 << 20)

    async def main() -> None:
        with pytest.raises(DeadlineError, match=r"0.01 s for 1 trajectories"):
            await buffer.take_async(1, 0.01)
        task = asyncio.create_task(buffer.take_async(1))
        await asyncio.sleep(0.01)
        assert buffer.stats()["waiting_takes"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert buffer.stats()["waiting_takes"] == 0
        await buffer.put_async(trajectory(0))
        with pytest.raises(DeadlineError, match="room for a trajectory"):
            await buffer.put_async(trajectory(1), 0.01)
        assert buffer.stats()["waiting_puts"] == 0
        [held] = await buffer.take_async(1, 5)
        held.commit()

    asyncio.run(main())


def test_a_coroutine_ahead_in_the_queue_is_served_before_a_thread_behind_it() -> None:
    buffer = TrajectoryBuffer(4, 1 << 20)

    async def main() -> list[int]:
        first = asyncio.create_task(buffer.take_async(2, 20))
        while buffer.stats()["waiting_takes"] < 1:
            await asyncio.sleep(0)
        got: list[int] = []
        second = threading.Thread(target=lambda: got.extend(h.trajectory.task_ordinal for h in buffer.take(1, 20)))
        second.start()
        while buffer.stats()["waiting_takes"] < 2:
            await asyncio.sleep(0.001)
        for i in range(3):
            buffer.put(trajectory(i))
        ahead = [held.trajectory.task_ordinal for held in await first]
        await asyncio.to_thread(second.join)
        return ahead + got

    assert asyncio.run(main()) == [0, 1, 2]


def test_errors_are_those_of_the_calls_that_park() -> None:
    async def main() -> None:
        buffer = TrajectoryBuffer(1, 1 << 20, "reject")
        with pytest.raises(ValidationError, match="n: 2"):
            await buffer.take_async(2)
        await buffer.put_async(trajectory(0))
        with pytest.raises(FullError):
            await buffer.put_async(trajectory(1))
        oldest = TrajectoryBuffer(1, 1 << 20, "drop_oldest")
        assert [await oldest.put_async(trajectory(i)) for i in range(3)] == [0, 1, 1]
        empty = TrajectoryBuffer(1, 1 << 20)
        waiting = asyncio.create_task(empty.take_async(1))
        await asyncio.sleep(0.01)
        empty.close()
        with pytest.raises(ClosedError):
            await waiting

    asyncio.run(main())


def test_snapshot_in_columns() -> None:
    buffer = TrajectoryBuffer(8, 1 << 20)
    for i in range(5):
        buffer.put(trajectory(i))
    held = buffer.take(2)
    snapshot = buffer.snapshot()
    assert snapshot["sequence"].tolist() == [0, 1, 2, 3, 4]
    assert snapshot["leased"].tolist() == [True, True, False, False, False]
    assert int(np.sum(snapshot["bytes"])) == buffer.stats()["bytes"]
    for item in held:
        item.commit()
    assert buffer.snapshot()["sequence"].tolist() == [2, 3, 4]
