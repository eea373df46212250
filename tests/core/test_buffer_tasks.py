"""Trajectories taken by task: all or none, in the order asked, in one queue with everybody else who takes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from core.buffer_tools import conserved, numbers
from waiting import until

from sao import Segment, Termination, Trajectory, TrajectoryBuffer, _core
from sao.embed.buffer import Held
from sao.errors import ClosedError, DeadlineError, ValidationError


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def put(buffer: _core.Buffer, task: int, number: int | None = None) -> None:
    buffer.put(b"%d" % (task if number is None else number), b"x", min_version=0, timeout_s=60, task=task)


def trajectory(ordinal: int) -> Trajectory:
    mask = np.array([False, True, True])
    logprobs = np.where(mask, -0.5, np.nan).astype(np.float32)
    segment = Segment("execution", np.arange(3, dtype=np.int32), mask, logprobs, np.array([[1, 3, 7]]))
    return Trajectory(bytes(16), ordinal, 0, "test", (segment,), 1.0, Termination("finished"), 1.0)


def ordinals(held: list[Held]) -> list[int]:
    return [item.trajectory.task_ordinal for item in held]


def test_those_of_certain_tasks_in_the_order_asked() -> None:
    buffer = _core.Buffer(8, 1000)
    for number, task in enumerate([5, 3, -1, 3, 8]):
        put(buffer, task, number)
    leases = buffer.take([8, 3], 0.0)
    assert numbers(leases) == [4, 1] and [lease.task for lease in leases] == [8, 3]
    assert buffer.try_take([5, 8]) == [] and len(buffer) == 3
    assert numbers(buffer.try_take([3])) == [3], "given back at once, since nobody keeps it"
    del leases
    assert numbers(buffer.take(5, 0.0)) == [0, 1, 2, 3, 4]


def test_trajectories_are_found_by_their_ordinal() -> None:
    with TrajectoryBuffer(8, 1 << 20) as buffer:

        async def fill() -> None:
            for ordinal in (4, 7):
                await buffer.put_async(trajectory(ordinal), 60)

        asyncio.run(fill())
        for ordinal in (2, 9):
            buffer.put(trajectory(ordinal))
        assert buffer.snapshot()["task"].tolist() == [4, 7, 2, 9]
        held = buffer.take_tasks([9, 4], 0.0)
        assert ordinals(held) == [9, 4]
        for item in held:
            item.commit()
        assert buffer.try_take_tasks([4]) == []
        assert ordinals(asyncio.run(buffer.take_tasks_async((2, 7)))) == [2, 7]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], r"ordinals: 0 tasks are not in 1\.\.=3 \(max_trajectories\)"),
        ([0, 1, 2, 3], r"ordinals: 4 tasks are not in 1\.\.=3"),
        (range(10**13), r"ordinals: 10000000000000 tasks are not in 1\.\.=3"),  # there is no memory for so many
        ([0, -1], r"ordinals\[1\]: -1 is negative, a task ordinal is at least 0"),
        ([2, 0, 2], r"ordinals\[2\]: 2 was asked for at ordinals\[0\] already"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(asked: Sequence[int], message: str) -> None:
    buffer = TrajectoryBuffer(3, 1 << 20)
    for ordinal in range(3):
        buffer.put(trajectory(ordinal))
    calls: list[Callable[[], object]] = [
        lambda: buffer.take_tasks(asked),
        lambda: buffer.try_take_tasks(asked),
        lambda: asyncio.run(buffer.take_tasks_async(asked)),
    ]
    for call in calls:
        with pytest.raises(ValidationError, match=message):
            call()
    stats = buffer.stats()
    assert (stats["trajectories"], stats["leased"], stats["waiting_takes"]) == (3, 0, 0)
    with pytest.raises(ValidationError, match="task: -2 is neither a task ordinal, from 0, nor -1 for none"):
        put(buffer._core, -2)


def test_a_deadline_names_what_is_missing_and_leaves_the_queue() -> None:
    buffer = TrajectoryBuffer(4, 1 << 20)
    buffer.put(trajectory(1))
    with pytest.raises(DeadlineError, match=r"0.01 s for 3 trajectories by task, that of task 6 is missing \(1 ready"):
        buffer.take_tasks([1, 6, 5], 0.01)
    with pytest.raises(DeadlineError, match=r"0.01 s for the trajectories of 2 tasks"):
        asyncio.run(buffer.take_tasks_async([1, 6], 0.01))
    assert buffer.stats()["waiting_takes"] == 0
    assert ordinals(buffer.take(1, 0.0)) == [1]


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_coroutines_refuse_the_deadlines_that_threads_refuse(timeout_s: float) -> None:
    buffer = TrajectoryBuffer(4, 1 << 20)
    buffer.put(trajectory(1))
    for call in (
        lambda: buffer.take(1, timeout_s),
        lambda: asyncio.run(buffer.take_async(1, timeout_s)),
        lambda: asyncio.run(buffer.take_tasks_async([1], timeout_s)),
        lambda: asyncio.run(buffer.put_async(trajectory(2), timeout_s)),
    ):
        with pytest.raises(ValidationError, match=r"timeout_s: .* must be at least 0"):
            call()
    stats = buffer.stats()
    assert (stats["trajectories"], stats["waiting_takes"], stats["waiting_puts"]) == (1, 0, 0)


def test_it_is_not_overtaken(threads: ThreadPoolExecutor) -> None:
    """Had one of those behind taken task 0, the first would never be served."""
    buffer = _core.Buffer(16, 1000)
    calls = [threads.submit(buffer.take, [9, 0], 60)]
    until(lambda: buffer.stats()["waiting_takes"] == 1, 60)
    calls.append(threads.submit(buffer.take, 1, 60))
    until(lambda: buffer.stats()["waiting_takes"] == 2, 60)
    calls.append(threads.submit(buffer.take, [2], 60))
    until(lambda: buffer.stats()["waiting_takes"] == 3, 60)
    for task in range(4):
        put(buffer, task)
    assert buffer.try_take([3]) == [] and buffer.try_take(1) == []
    put(buffer, 9)
    assert [numbers(call.result(60)) for call in calls] == [[9, 0], [1], [2]]


def test_coroutines_and_threads_wait_in_one_queue(threads: ThreadPoolExecutor) -> None:
    buffer = TrajectoryBuffer(16, 1 << 20)

    async def main() -> tuple[list[int], list[int]]:
        first = asyncio.create_task(buffer.take_tasks_async([3, 0], 60))
        while buffer.stats()["waiting_takes"] < 1:
            await asyncio.sleep(0)
        left = asyncio.create_task(buffer.take_tasks_async([99]))
        while buffer.stats()["waiting_takes"] < 2:
            await asyncio.sleep(0)
        last = threads.submit(buffer.take_tasks, [1], 60)
        while buffer.stats()["waiting_takes"] < 3:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(lambda: [buffer.put(trajectory(ordinal)) for ordinal in range(4)])
        got = ordinals(await first)
        left.cancel()  # what can never be served is in the way until then
        return got, ordinals(await asyncio.to_thread(last.result, 60))

    assert asyncio.run(main()) == ([3, 0], [1])
    assert buffer.stats()["waiting_takes"] == 0


def test_close_wakes_who_waits_for_tasks(threads: ThreadPoolExecutor) -> None:
    buffer = TrajectoryBuffer(4, 1 << 20)
    waiting = threads.submit(buffer.take_tasks, [1])
    until(lambda: buffer.stats()["waiting_takes"] == 1, 60)

    async def main() -> None:
        task = asyncio.create_task(buffer.take_tasks_async([2]))
        while buffer.stats()["waiting_takes"] < 2:
            await asyncio.sleep(0)
        buffer.close()
        with pytest.raises(ClosedError):
            await task

    asyncio.run(main())
    with pytest.raises(ClosedError):
        waiting.result(60)
    with pytest.raises(ClosedError):
        buffer.try_take_tasks([1])


def test_all_or_none_under_churn(threads: ThreadPoolExecutor) -> None:
    """Groups asked for by threads and by coroutines, brought in another order, some given back and taken again."""
    groups, size = 300, 4
    buffer, taken, lock = _core.Buffer(groups * size, 1 << 20), [], threading.Lock()

    def members(group: int) -> list[int]:
        return list(range(group * size, (group + 1) * size))

    def produce(who: int) -> None:
        order = [task for group in range(groups) for task in members(group) if task % 2 == who]
        chance = random.Random(who)
        for start in range(0, len(order), 50):
            some = order[start : start + 50]
            chance.shuffle(some)
            for task in some:
                put(buffer, task)

    def consume(who: int) -> None:
        chance = random.Random(who)
        for group in range(who, groups, 3):
            asked = members(group)
            chance.shuffle(asked)
            for _ in range(chance.randrange(2)):
                back = buffer.take(asked, 60)
                assert numbers(back) == asked
                for lease in back:
                    lease.give_back()
            leases = buffer.take(asked, 60)
            assert numbers(leases) == [lease.task for lease in leases] == asked
            with lock:
                taken.extend(asked)
            for lease in leases:
                lease.commit()

    consumers = [threads.submit(consume, who) for who in range(3)]
    for producer in [threads.submit(produce, who) for who in range(2)]:
        producer.result(60)
    for consumer in consumers:
        consumer.result(60)
    assert sorted(taken) == list(range(groups * size))
    assert conserved(buffer) and buffer.stats()["bytes"] == 0
