"""The buffer: bounded in bytes, first come first served, nothing lost, nobody left waiting."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from core.buffer_tools import conserved, numbers, put
from waiting import until

from sao import Segment, Termination, Trajectory, TrajectoryBuffer, _core
from sao.errors import ClosedError, DeadlineError, FullError, ValidationError, WireError


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


# In and out


def test_what_goes_in_comes_out_in_order_of_completion() -> None:
    buffer = _core.Buffer(8, 1000)
    payloads = [random.Random(i).randbytes(i) for i in range(5)]
    for i, payload in enumerate(payloads):
        assert buffer.put(b"%d" % i, payload, min_version=i, timeout_s=0.0) == []
    assert len(buffer) == 5
    leases = buffer.take(3, 0.0) + buffer.take(2, 0.0)
    assert numbers(leases) == [0, 1, 2, 3, 4]
    assert [lease.min_version for lease in leases] == [0, 1, 2, 3, 4]
    assert [lease.sequence for lease in leases] == [0, 1, 2, 3, 4]
    assert [bytes(lease.payload) for lease in leases] == payloads
    assert [len(lease.payload) for lease in leases] == [0, 1, 2, 3, 4]


def test_take_is_all_or_nothing() -> None:
    buffer = _core.Buffer(8, 1000)
    put(buffer, 0)
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for 2 trajectories \(1 ready, 0 leased"):
        buffer.take(2, 0.05)
    assert buffer.try_take(2) == [] == buffer.try_take(0)
    assert len(buffer) == 1
    assert numbers(buffer.try_take(1)) == [0]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_contiguous_bytes_go_in_and_are_copied(make: Callable[[bytes], Any]) -> None:
    buffer = _core.Buffer(2, 1000)
    buffer.put(make(b"head"), make(b"body"), min_version=0)
    (lease,) = buffer.take(1, 0.0)
    assert (bytes(lease.header), bytes(lease.payload)) == (b"head", b"body")


@pytest.mark.parametrize(
    "wrong", ["text", 3, None, [1], np.zeros(3, np.int32), np.zeros(8, np.uint8)[::2], memoryview(b"abcd")[::-1]]
)
def test_other_objects_are_refused(wrong: Any) -> None:
    buffer = _core.Buffer(2, 1000)
    with pytest.raises(TypeError, match="payload: expected contiguous bytes"):
        buffer.put(b"", wrong, min_version=0)
    with pytest.raises(TypeError, match="header: expected contiguous bytes"):
        buffer.put(wrong, b"", min_version=0)
    assert buffer.stats()["bytes"] == 0


def test_views_are_aligned_and_read_only() -> None:
    buffer = _core.Buffer(64, 1 << 24)
    for i, size in enumerate([1, 63, 4096, 100_000, 300_000, 5_000_000]):
        put(buffer, i, size)
        (lease,) = buffer.take(1, 0.0)
        array = np.frombuffer(lease.payload, np.uint8)
        assert len(array) == size and array.ctypes.data % 64 == 0
        assert not array.flags.writeable
        with pytest.raises((ValueError, TypeError)):
            memoryview(lease.payload)[0] = 1
        with pytest.raises((BufferError, TypeError)):
            (ctypes.c_char * size).from_buffer(lease.payload)
        lease.commit()


# Leases


def test_given_back_trajectories_return_to_their_place() -> None:
    buffer = _core.Buffer(8, 1000)
    for i in range(5):
        put(buffer, i)
    a, b, c = buffer.take(3, 0.0)
    b.commit()
    c.give_back()
    a.give_back()
    assert numbers(buffer.take(4, 0.0)) == [0, 2, 3, 4]


def test_a_dropped_lease_is_given_back() -> None:
    buffer = _core.Buffer(8, 1000)
    put(buffer, 7)
    buffer.take(1, 0.0)
    gc.collect()
    assert numbers(buffer.take(1, 0.0)) == [7]


def test_a_lease_is_settled_once() -> None:
    buffer = _core.Buffer(8, 1000)
    put(buffer, 0)
    put(buffer, 1)
    first, second = buffer.take(2, 0.0)
    first.commit()
    second.give_back()
    for lease in (first, second):
        for call in (lease.commit, lease.give_back, lambda lease=lease: lease.payload):
            with pytest.raises(ClosedError, match="committed or given back already"):
                call()
    assert buffer.stats()["committed"] == 1 and conserved(buffer)


def test_a_view_keeps_its_memory_and_its_bytes_counted() -> None:
    buffer = _core.Buffer(4, 100)
    buffer.put(b"", b"x" * 100, min_version=0)
    (lease,) = buffer.take(1, 0.0)
    array = np.frombuffer(lease.payload, np.uint8)
    lease.commit()
    del lease
    gc.collect()
    assert buffer.stats()["bytes"] == 100
    with pytest.raises(DeadlineError, match="room for a trajectory of 1 bytes"):
        put(buffer, 1, 0, timeout_s=0.02)
    assert set(array.tolist()) == {ord("x")}
    del array
    gc.collect()
    assert buffer.stats()["bytes"] == 0
    put(buffer, 1, 99)


def test_views_outlive_the_buffer() -> None:
    buffer = _core.Buffer(4, 1000)
    buffer.put(b"", b"abc" * 100, min_version=0)
    (lease,) = buffer.take(1, 0.0)
    view = memoryview(lease.payload)
    buffer.close()
    del buffer
    gc.collect()
    lease.give_back()
    del lease
    gc.collect()
    junk = [bytes([i]) * 300 for i in range(100)]  # would overwrite freed memory
    assert bytes(view) == b"abc" * 100 and junk


# Bounds and policies


def test_memory_is_bounded_in_bytes_and_trajectories() -> None:
    by_count = _core.Buffer(2, 1000)
    put(by_count, 0)
    put(by_count, 1)
    with pytest.raises(DeadlineError):
        put(by_count, 2)
    (lease,) = by_count.take(1, 0.0)
    with pytest.raises(DeadlineError):  # leased ones count
        put(by_count, 2)
    lease.commit()
    put(by_count, 2)
    by_bytes = _core.Buffer(100, 100)
    put(by_bytes, 0, 49)
    put(by_bytes, 1, 49)
    with pytest.raises(DeadlineError):
        put(by_bytes, 2, 0)
    assert by_bytes.stats()["bytes"] == 100


@pytest.mark.parametrize("policy", ["block", "reject", "drop_oldest", "drop_stalest"])
def test_what_can_never_fit_is_refused_at_once(policy: str) -> None:
    buffer = _core.Buffer(4, 100, policy)
    put(buffer, 0, 10)
    with pytest.raises(ValidationError, match="101 bytes can never fit into max_bytes = 100"):
        put(buffer, 1, 100, timeout_s=None)
    assert len(buffer) == 1
    for n in (-1, 0, 5, 10**9):
        with pytest.raises(ValidationError, match=rf"n: {n} is"):
            buffer.take(n)
    with pytest.raises(ValidationError, match="min_version: -1"):
        put(buffer, 1, 1, version=-1)


def test_reject_says_what_is_held() -> None:
    buffer = _core.Buffer(2, 100, "reject")
    put(buffer, 0, 10)
    put(buffer, 1, 10)
    with pytest.raises(FullError, match="no room for 6 bytes: 2 of 2 trajectories and 22 of 100 bytes are held"):
        put(buffer, 2, 5, timeout_s=None)


def test_drop_oldest() -> None:
    buffer = _core.Buffer(4, 100, "drop_oldest")
    for i in range(4):
        assert put(buffer, i, version=9 - i) == []
    assert put(buffer, 4) == [0]
    assert put(buffer, 5, 90) == [1, 2, 3]
    assert numbers(buffer.take(2, 0.0)) == [4, 5]
    assert buffer.stats()["dropped"] == {"drop_oldest": 4}


def test_drop_stalest() -> None:
    buffer = _core.Buffer(4, 1000, "drop_stalest")
    for i, version in enumerate([5, 3, 4, 3]):
        put(buffer, i, version=version)
    dropped = [put(buffer, 4 + i, version=6) for i in range(3)]
    assert dropped == [[1], [3], [2]]
    assert numbers(buffer.take(4, 0.0)) == [0, 4, 5, 6]


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_stalest"])
def test_what_is_leased_is_never_dropped(policy: str, threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(2, 1000, policy)
    put(buffer, 0)
    put(buffer, 1)
    first, second = buffer.take(2, 0.0)
    waiting = threads.submit(put, buffer, 2, timeout_s=10)
    until(lambda: buffer.stats()["waiting_puts"] == 1)
    first.commit()
    assert waiting.result(5) == []
    second.give_back()
    assert put(buffer, 3) in ([1], [2])
    assert conserved(buffer)


def test_advance_drops_what_is_too_old() -> None:
    buffer = _core.Buffer(8, 1000)
    for i, version in enumerate([5, 3, 7, 4]):
        put(buffer, i, version=version)
    assert buffer.advance(8) == []
    assert buffer.advance(9, keep_from=5) == [1, 3]
    assert buffer.stats()["dropped"] == {"stale": 2} and buffer.stats()["version"] == 9
    with pytest.raises(ValidationError, match="version: 8 is below the current version 9"):
        buffer.advance(8)
    assert numbers(buffer.take(2, 0.0)) == [0, 2]


def test_many_that_are_too_old_are_freed_at_once() -> None:
    buffer = _core.Buffer(2000, 20_000)
    for _ in range(1000):
        buffer.put(b"1234", b"56789", min_version=0)
    assert buffer.advance(1, keep_from=1) == [-1] * 1000
    assert (len(buffer), buffer.stats()["bytes"]) == (0, 0)
    buffer.put(b"", bytes(20_000), min_version=1, timeout_s=0)
    assert conserved(buffer)


def test_room_made_by_advance_reaches_a_waiting_producer(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(1, 1000)
    put(buffer, 0, version=1)
    waiting = threads.submit(put, buffer, 1, version=5, timeout_s=10)
    until(lambda: buffer.stats()["waiting_puts"] == 1)
    buffer.advance(5, keep_from=4)
    waiting.result(5)
    assert numbers(buffer.take(1, 0.0)) == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10), "max_trajectories: 0"),
        ((1, 0), "max_bytes: 0"),
        ((-1, 10), "max_trajectories: -1"),
        ((1, 1, "drop"), 'policy: "drop" is not'),
    ],
)
def test_limits_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _core.Buffer(*arguments)


def test_snapshot_shows_every_trajectory() -> None:
    buffer = _core.Buffer(8, 1000)
    for i in range(3):
        put(buffer, i, 7, version=i)
    lease = buffer.take(1, 0.0)
    held = buffer.snapshot()
    assert held["sequence"].tolist() == held["min_version"].tolist() == held["task"].tolist() == [0, 1, 2]
    assert held["leased"].tolist() == [True, False, False] and held["bytes"].tolist() == [8, 8, 8]
    assert lease


# Decoded trajectories


def trajectory(number: int, n: int = 12) -> Trajectory:
    mask = np.arange(n) >= 4
    segment = Segment(
        kind="execution",
        token_ids=np.full(n, number, np.int32),
        action_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(np.nan)),
        version_spans=np.array([[4, n, number]], np.int64),
    )
    return Trajectory(
        id=number.to_bytes(16, "big"),
        task_ordinal=number,
        attempt=0,
        env="test",
        segments=(segment,),
        reward=1.0,
        termination=Termination("finished", ""),
        temperature=1.0,
    )


def test_trajectories_in_and_out() -> None:
    with TrajectoryBuffer(8, 1 << 20) as buffer:
        for i in range(3):
            assert buffer.put(trajectory(i)) == 0
        first, second = buffer.take(2, 0.0)
        assert (len(buffer), buffer.stats()["leased"]) == (1, 2)
        assert first.trajectory.segments[0].token_ids.tolist() == [0] * 12
        with first as inside:
            assert inside.task_ordinal == 0
        with pytest.raises(RuntimeError, match="worse"), second:
            raise RuntimeError("worse")
        assert [held.trajectory.task_ordinal for held in buffer.try_take(2)] == [1, 2]
        assert buffer.stats()["committed"] == 1
        assert buffer.try_take(5) == []
    with pytest.raises(ClosedError):
        buffer.put(trajectory(3))


def test_old_trajectories_are_dropped_on_request() -> None:
    buffer = TrajectoryBuffer(8, 1 << 20, "drop_stalest")
    for i in (3, 1, 2):
        buffer.put(trajectory(i))
    assert buffer.advance(4, keep_from=2) == 1
    assert [held.trajectory.task_ordinal for held in buffer.take(2, 0.0)] == [3, 2]


def test_a_failed_decode_gives_the_trajectories_back() -> None:
    buffer = TrajectoryBuffer(8, 1 << 20)
    buffer.put(trajectory(1))
    buffer._core.put(b"garbage", b"", min_version=0)
    with pytest.raises(WireError):
        buffer.take(2, 0.0)
    gc.collect()
    assert len(buffer) == 2
