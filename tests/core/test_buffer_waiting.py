"""Waiting on the buffer: deadlines, order, closing, signals, and many threads at once."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from core.buffer_tools import conserved, numbers, put
from waiting import until

from sao import _core
from sao.errors import ClosedError, DeadlineError, ValidationError


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


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
    """A large trajectory is not overtaken by small ones that would fit already."""
    buffer = _core.Buffer(16, 100)
    put(buffer, 0, 49)
    calls = []
    for i, size in ((1, 89), (2, 59), (3, 59)):
        calls.append(threads.submit(put, buffer, i, size, 0, 10))
        until(lambda: buffer.stats()["waiting_puts"] == len(calls))
    with pytest.raises(DeadlineError):
        put(buffer, 4, 0)
    for i in range(4):
        (lease,) = buffer.take(1, 5)
        assert numbers([lease]) == [i]
        lease.commit()
        del lease
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
            call.result(20)
    assert time.monotonic() - begin < 20
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
import signal
from sao import _core

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it, and so would we

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
        assert time.monotonic() - begin < 10
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
