"""Trajectories kept by reference: the same rules of order, budget and leases, without a copy."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from core.buffer_tools import conserved, until

from sao import TrajectoryBuffer, _core, encode
from sao.errors import DeadlineError, FullError, ValidationError
from sao.measure.workloads import trajectory


class Thing:
    """Something that can be watched while it goes away."""


def test_the_same_objects_come_out_in_order_and_are_let_go() -> None:
    buffer = _core.Buffer(8, 1000)
    things = [Thing() for _ in range(3)]
    watched = [weakref.ref(thing) for thing in things]
    for number, thing in enumerate(things):
        assert buffer.put_object(thing, 100, number) == 0
    assert buffer.stats()["bytes"] == 300
    [lease] = buffer.take(1)
    assert lease.object is things[0] and lease.min_version == 0
    assert bytes(lease.header) == b"" and bytes(lease.payload) == b""
    lease.give_back()
    assert buffer.drain(2) == things[:2]
    assert buffer.stats()["committed"] == 2 and buffer.stats()["bytes"] == 100 and conserved(buffer)
    things.clear()
    del lease, thing
    gc.collect()
    assert [ref() is None for ref in watched] == [True, True, False], "only the one inside is kept"
    buffer.close()
    assert watched[2]() is None
    assert buffer.stats()["bytes"] == 0


def test_references_obey_budget_and_policies() -> None:
    full = _core.Buffer(8, 250, "reject")
    full.put_object("a", 100)
    full.put_object("b", 150)
    with pytest.raises(FullError):
        full.put_object("c", 1)
    with pytest.raises(ValidationError, match="251 bytes can never fit"):
        full.put_object("c", 251)
    drops = _core.Buffer(8, 250, "drop_stalest")
    for name, version in (("new", 5), ("old", 1), ("newer", 6)):
        dropped = drops.put_object(name, 100, version)
    assert dropped == 1 and drops.drain(2) == ["new", "newer"]
    assert drops.retire(9, 9) == 0
    drops.put_object("stale", 1, 3)
    assert drops.retire(9, 9) == 1


def test_what_was_copied_in_and_what_is_kept_share_a_buffer() -> None:
    buffer = _core.Buffer(8, 1000)
    buffer.put(b"h", b"payload", min_version=0)
    buffer.put_object("kept")
    (header, payload), kept = buffer.drain(2)
    assert (bytes(header), bytes(payload), kept) == (b"h", b"payload", "kept")
    with pytest.raises(DeadlineError):
        buffer.drain(1, 0.01)


def test_a_producer_waits_for_room_and_order_is_kept() -> None:
    buffer, count = _core.Buffer(4, 1 << 20), 3000

    def produce(number: int) -> None:
        for index in range(count):
            buffer.put_object((number, index), 8, 0, 30)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(2)]
    for producer in producers:
        producer.start()
    last = [-1, -1]
    for _ in range(2 * count):
        [(number, index)] = buffer.drain(1, 30)
        assert index == last[number] + 1
        last[number] = index
    for producer in producers:
        producer.join()
    assert buffer.stats()["bytes"] == 0 and conserved(buffer)


def test_trajectories_by_reference() -> None:
    first, second = trajectory(200, 1), trajectory(200, 2)
    with TrajectoryBuffer(4, 1 << 20, by_reference=True) as buffer:
        buffer.put(first)
        buffer.put(second)
        assert buffer.stats()["bytes"] >= 2 * 9 * 200
        [held] = buffer.take(1)
        with held as got:
            assert got is first
        assert buffer.drain(1) == [second]
        assert buffer.stats()["committed"] == 2 and buffer.stats()["bytes"] == 0

        async def both() -> Any:
            await buffer.put_async(first, timeout_s=5)
            return await buffer.take_async(1, timeout_s=5)

        [held] = asyncio.run(both())
        assert held.trajectory is first
        held.commit()
    copies = TrajectoryBuffer(4, 1 << 20)
    copies.put(first)
    [got] = copies.drain(1)
    assert got is not first
    np.testing.assert_array_equal(got.segments[0].token_ids, first.segments[0].token_ids)


def test_what_is_put_in_place_is_what_encode_gives() -> None:
    from sao import encode

    for n in (3, 200, 9_000, 200_000):
        rollout = trajectory(n, n)
        buffer = _core.Buffer(4, 1 << 26)
        for _ in range(3):  # the second and third time in memory that was used before
            assert buffer.put_trajectory(rollout) == 0
            [lease] = buffer.take(1)
            assert (bytes(lease.header), bytes(lease.payload)) == encode(rollout)
            assert lease.min_version == rollout.min_version
            lease.commit()
            del lease
            until(lambda b=buffer: b.stats()["bytes"] == 0)  # type: ignore[misc]


def test_no_reference_is_lost_or_gained() -> None:
    buffer, thing = _core.Buffer(4, 1000, "reject"), Thing()
    before = sys.getrefcount(thing)
    for _ in range(100):
        buffer.put_object(thing)
        buffer.take(1)[0].commit()
        buffer.put_object(thing)
        assert buffer.drain(1)[0] is thing
        with pytest.raises(ValidationError):
            buffer.put_object(thing, 1001)
        with pytest.raises(ValidationError):
            buffer.put_object(thing, 1, -1)
    assert sys.getrefcount(thing) == before


@pytest.mark.parametrize("by_reference", [False, True])
def test_what_is_no_trajectory_is_refused_by_name(by_reference: bool) -> None:
    buffer: Any = TrajectoryBuffer(4, 1 << 20, by_reference=by_reference)
    for wrong in (encode(trajectory(9)), None):
        with pytest.raises(ValidationError, match=rf"^trajectory: <class '{type(wrong).__name__}'> is not a sao.Traj"):
            buffer.put(wrong)
        with pytest.raises(ValidationError, match=r"is not a sao\.Trajectory"):
            asyncio.run(buffer.put_async(wrong))
    assert len(buffer) == 0 and buffer.stats()["bytes"] == 0
