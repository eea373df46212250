"""The buffer: bounded in bytes, first come first served, nothing lost, nobody left waiting."""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sao import Segment, Termination, Trajectory, TrajectoryBuffer, _core
from sao.errors import ClosedError, DeadlineError, FullError, ValidationError, WireError


def put(buffer: _core.Buffer, number: int, size: int = 8, version: int = 0, timeout_s: float | None = 0.0) -> Any:
    return buffer.put(b"%d" % number, bytes(size), min_version=version, timeout_s=timeout_s)


def numbers(leases: list[_core.Lease]) -> list[int]:
    return [int(bytes(lease.header)) for lease in leases]


def conserved(buffer: _core.Buffer) -> bool:
    s = buffer.stats()
    return s["received"] == s["trajectories"] + s["leased"] + s["committed"] + sum(s["dropped"].values())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


# In and out


def test_what_goes_in_comes_out_in_order_of_completion() -> None:
    buffer = _core.Buffer(8, 1000)
    payloads = [random.Random(i).randbytes(i) for i in range(5)]
    for i, payload in enumerate(payloads):
        assert buffer.put(b"%d" % i, payload, min_version=i, timeout_s=0.0) is None
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
    for n in (0, 5, 10**9):
        with pytest.raises(ValidationError, match=rf"n: {n} is not in 1..=4"):
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
        assert put(buffer, i, version=9 - i) is None
    assert put(buffer, 4) == {"reason": "drop_oldest", "headers": [b"0"]}
    assert put(buffer, 5, 90) == {"reason": "drop_oldest", "headers": [b"1", b"2", b"3"]}
    assert numbers(buffer.take(2, 0.0)) == [4, 5]
    assert buffer.stats()["dropped"] == {"drop_oldest": 4}


def test_drop_stalest() -> None:
    buffer = _core.Buffer(4, 1000, "drop_stalest")
    for i, version in enumerate([5, 3, 4, 3]):
        put(buffer, i, version=version)
    dropped = [put(buffer, 4 + i, version=6)["headers"] for i in range(3)]
    assert dropped == [[b"1"], [b"3"], [b"2"]]
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
    assert waiting.result(5) is None
    second.give_back()
    assert put(buffer, 3)["headers"] in ([b"1"], [b"2"])
    assert conserved(buffer)


def test_advance_drops_what_is_too_old() -> None:
    buffer = _core.Buffer(8, 1000)
    for i, version in enumerate([5, 3, 7, 4]):
        put(buffer, i, version=version)
    assert buffer.advance(8) == []
    assert buffer.advance(9, keep_from=5) == [b"1", b"3"]
    assert buffer.stats()["dropped"] == {"stale": 2} and buffer.stats()["version"] == 9
    with pytest.raises(ValidationError, match="version: 8 is below the current version 9"):
        buffer.advance(8)
    assert numbers(buffer.take(2, 0.0)) == [0, 2]


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
    assert buffer.snapshot() == [
        {"sequence": i, "state": "leased" if i == 0 else "ready", "bytes": 8, "min_version": i} for i in range(3)
    ]
    assert lease


# Waiting


def test_waits_end_at_their_deadline() -> None:
    buffer = _core.Buffer(1, 1000)
    for call in (lambda t: buffer.take(1, t), lambda t: put(buffer, 1, timeout_s=t)):
        begin = time.monotonic()
        with pytest.raises(DeadlineError):
            call(0.2)
        assert 0.19 <= time.monotonic() - begin < 2
        for wrong in (-0.1, float("nan")):
            with pytest.raises(ValidationError, match="timeout_s"):
                call(wrong)
        put(buffer, 0) if len(buffer) == 0 else None
    assert buffer.stats()["waiting_takes"] == buffer.stats()["waiting_puts"] == 0


def test_consumers_are_served_in_the_order_they_came(threads: ThreadPoolExecutor) -> None:
    """A large take at the head is not overtaken by small ones behind it, nor by one that does not wait."""
    buffer = _core.Buffer(16, 1000)
    calls = []
    for n in (4, 1, 2):
        calls.append(threads.submit(buffer.take, n, 10))
        until(lambda: buffer.stats()["waiting_takes"] == len(calls))
    for i in range(3):
        put(buffer, i)
    assert buffer.try_take(1) == []
    assert not any(call.done() for call in calls)
    for i in range(3, 7):
        put(buffer, i)
    assert [numbers(call.result(5)) for call in calls] == [[0, 1, 2, 3], [4], [5, 6]]


def test_producers_are_served_in_the_order_they_came(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(16, 100)
    put(buffer, 0, 99)
    calls = []
    for i, size in ((1, 89), (2, 4), (3, 4)):
        calls.append(threads.submit(put, buffer, i, size, 0, 10))
        until(lambda: buffer.stats()["waiting_puts"] == len(calls))
    with pytest.raises(DeadlineError):
        put(buffer, 4, 0)
    order = []
    for _ in range(4):
        (lease,) = buffer.take(1, 5)
        order += numbers([lease])
        lease.commit()
        del lease
    assert order[:2] == [0, 1] and sorted(order[2:]) == [2, 3]
    for call in calls:
        call.result(5)


def test_a_waiter_that_gives_up_lets_the_next_one_go(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(16, 1000)
    large = threads.submit(buffer.take, 5, 0.3)
    until(lambda: buffer.stats()["waiting_takes"] == 1)
    small = threads.submit(buffer.take, 1, 10)
    until(lambda: buffer.stats()["waiting_takes"] == 2)
    put(buffer, 0)
    with pytest.raises(DeadlineError):
        large.result(5)
    assert numbers(small.result(1)) == [0]


def test_close_wakes_everybody(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(1, 1000)
    put(buffer, 0)
    (lease,) = buffer.take(1, 0.0)
    calls = [threads.submit(buffer.take, 1, None) for _ in range(3)]
    calls += [threads.submit(put, buffer, 1, timeout_s=None) for _ in range(3)]
    until(lambda: buffer.stats()["waiting_takes"] == buffer.stats()["waiting_puts"] == 3)
    begin = time.monotonic()
    buffer.close()
    for call in calls:
        with pytest.raises(ClosedError, match="the buffer is closed"):
            call.result(5)
    assert time.monotonic() - begin < 1
    for call in (lambda: put(buffer, 1), lambda: buffer.take(1), lambda: buffer.try_take(1), lambda: buffer.advance(3)):
        with pytest.raises(ClosedError):
            call()
    buffer.close()
    lease.give_back()
    assert buffer.stats()["dropped"] == {"closed": 1} and conserved(buffer) and buffer.stats()["closed"]


def test_waiting_leaves_the_interpreter_to_others(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(1, 1000)
    waiting = threads.submit(buffer.take, 1, 1.0)
    count = 0
    while not waiting.done():
        count += 1
    with pytest.raises(DeadlineError):
        waiting.result()
    assert count > 100_000


def test_ping_pong_through_one_slot(threads: ThreadPoolExecutor) -> None:
    buffer, rounds = _core.Buffer(1, 1000), 20_000

    def produce() -> None:
        for i in range(rounds):
            put(buffer, i, timeout_s=10)

    producer = threads.submit(produce)
    for i in range(rounds):
        (lease,) = buffer.take(1, 10)
        assert numbers([lease]) == [i]
        lease.commit()
    producer.result(10)


@pytest.mark.parametrize(
    "call",
    [
        "_core.Buffer(1, 100).take(1, 30)",
        "full().put(b'', b'x', min_version=0, timeout_s=30)",
        "full().put(b'', b'x', min_version=0)",
        "_core.VersionClock().wait(1, 30)",
    ],
)
def test_ctrl_c_ends_a_wait(call: str) -> None:
    code = f"""
import time
from sao import _core

def full():
    buffer = _core.Buffer(1, 100)
    buffer.put(b"", b"", min_version=0)
    return buffer

print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begin < 1
        assert child.wait(10) == 0


# Many threads


def test_items_are_never_mixed_lost_or_doubled(threads: ThreadPoolExecutor) -> None:
    """4 producers whose trajectories hold one number throughout, 2 consumers that check, commit or give back."""
    buffer, each = _core.Buffer(16, 200_000), 400
    taken: Counter[int] = Counter()
    lock = threading.Lock()

    def produce(who: int) -> None:
        chance = random.Random(who)
        for i in range(each):
            number = who * each + i
            body = np.full(chance.randrange(1, 4000), number, np.int32).tobytes()
            buffer.put(b"%d" % number, body, min_version=0, timeout_s=30)

    def consume(who: int) -> None:
        chance = random.Random(who)
        while True:
            try:
                leases = buffer.take(chance.randrange(1, 4), 30)
            except ClosedError:
                return
            for lease in leases:
                number = int(bytes(lease.header))
                assert set(np.frombuffer(lease.payload, np.int32).tolist()) == {number}
                if chance.random() < 0.1:
                    lease.give_back()
                else:
                    lease.commit()
                    with lock:
                        taken[number] += 1

    consumers = [threads.submit(consume, i) for i in range(2)]
    for producer in [threads.submit(produce, i) for i in range(4)]:
        producer.result(60)

    def finish() -> bool:
        # Fewer may be left than a consumer waits for; what is given back is taken here.
        for lease in buffer.try_take(1):
            taken[int(bytes(lease.header))] += 1
            lease.commit()
        return buffer.stats()["committed"] == 4 * each or buffer.stats()["waiting_takes"] == 2

    until(finish, 30)
    rest = buffer.stats()["trajectories"]
    buffer.close()
    for consumer in consumers:
        consumer.result(10)
    assert max(taken.values()) == 1
    assert taken.total() + rest == 4 * each
    assert conserved(buffer) and buffer.stats()["bytes"] == 0


def test_all_methods_at_once_with_a_close_in_the_middle(threads: ThreadPoolExecutor) -> None:
    buffer = _core.Buffer(4, 2000, "drop_oldest")
    end = time.monotonic() + 3

    def play(seed: int) -> int:
        chance, calls = random.Random(seed), 0
        held: list[_core.Lease] = []
        while time.monotonic() < end:
            calls += 1
            try:
                match chance.randrange(8):
                    case 0 | 1:
                        put(buffer, calls, chance.randrange(600), chance.randrange(5), 0.01)
                    case 2:
                        held += buffer.take(chance.randrange(1, 3), 0.01)
                    case 3:
                        held += buffer.try_take(1)
                    case 4:
                        buffer.advance(5, chance.choice([None, 2]))
                    case 5:
                        buffer.stats(), buffer.snapshot(), len(buffer)
                    case 6 if held:
                        held.pop().commit()
                    case 7 if held:
                        held.pop().give_back()
            except (DeadlineError, ClosedError):
                held[:1] = []
        return calls

    players = [threads.submit(play, seed) for seed in range(8)]
    time.sleep(1.5)
    assert conserved(buffer)
    buffer.close()
    assert all(player.result(20) > 50 for player in players)
    gc.collect()
    assert conserved(buffer)
    assert buffer.stats()["bytes"] == 0 and buffer.stats()["leased"] == 0


# Against a model


class Model(RuleBasedStateMachine):
    """Random operations on the buffer and on a plain list."""

    policy = "block"
    max_trajectories, max_bytes = 5, 60

    def __init__(self) -> None:
        super().__init__()
        self.buffer = _core.Buffer(self.max_trajectories, self.max_bytes, self.policy)
        self.ready: list[tuple[int, int, int]] = []  # number, bytes, version
        self.leased: list[tuple[_core.Lease, tuple[int, int, int]]] = []
        self.next = 0

    def held_bytes(self) -> int:
        return sum(b for _, b, _ in self.ready) + sum(entry[1] for _, entry in self.leased)

    def has_room(self, size: int) -> bool:
        return len(self.ready) + len(self.leased) < self.max_trajectories and self.held_bytes() + size <= self.max_bytes

    @rule(size=st.integers(0, 50), version=st.integers(0, 6))
    def put(self, size: int, version: int) -> None:
        header = b"%06d" % self.next
        entry = (self.next, size + 6, version)
        expected: list[bytes] = []
        while not self.has_room(entry[1]) and self.ready and self.policy.startswith("drop"):
            key = (lambda e: e[0]) if self.policy == "drop_oldest" else (lambda e: (e[2], e[0]))
            victim = min(self.ready, key=key)
            self.ready.remove(victim)
            expected.append(b"%06d" % victim[0])
        try:
            result = self.buffer.put(header, bytes(size), min_version=version, timeout_s=0.0)
        except (DeadlineError, FullError):
            assert not self.has_room(entry[1])
            return
        assert self.has_room(entry[1])
        assert (result["headers"] if result else []) == expected
        self.ready.append(entry)
        self.next += 1

    @rule(n=st.integers(1, 3))
    def take(self, n: int) -> None:
        leases = self.buffer.try_take(n)
        assert len(leases) == (n if len(self.ready) >= n else 0)
        for lease in leases:
            entry = self.ready.pop(0)
            assert (int(bytes(lease.header)), lease.min_version) == (entry[0], entry[2])
            self.leased.append((lease, entry))

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), how=st.sampled_from(["commit", "give_back", "forget"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        lease, entry = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        if how != "forget":
            getattr(lease, how)()
        if how != "commit":
            self.ready = sorted([*self.ready, entry])

    @rule(keep_from=st.integers(0, 6))
    def advance(self, keep_from: int) -> None:
        old = sorted((v, i) for i, _, v in self.ready if v < keep_from)
        assert self.buffer.advance(6, keep_from) == [b"%06d" % i for _, i in old]
        self.ready = [entry for entry in self.ready if entry[2] >= keep_from]

    @invariant()
    def agrees(self) -> None:
        stats = self.buffer.stats()
        assert (stats["trajectories"], stats["leased"]) == (len(self.ready), len(self.leased))
        assert stats["bytes"] == self.held_bytes() <= self.max_bytes
        assert conserved(self.buffer)


class OldestModel(Model):
    policy = "drop_oldest"


class StalestModel(Model):
    policy = "drop_stalest"


class RejectModel(Model):
    policy = "reject"


for machine in (Model, OldestModel, StalestModel, RejectModel):
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    globals()[f"Test{machine.__name__}"] = case
del machine, case


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
