"""Payloads through shared memory: whole, in order, bounded and in place."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.errors import ClosedError, DeadlineError, ValidationError
from sao.transport.shared import SharedReceiver, SharedSender


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_payloads_of_all_sizes_arrive_whole_and_in_order_through_a_small_ring(endpoint: str) -> None:
    rng = random.Random(0)
    sizes = [rng.choice([0, 1, 63, 64, 65, rng.randrange(3000)]) for _ in range(3000)]
    failures: list[BaseException] = []

    def send() -> None:
        try:
            with SharedSender(endpoint, 16_384) as sender:
                for i, size in enumerate(sizes):
                    sender.send(b"%d" % i, bytes([i % 251]) * size, timeout_s=20)
                sender.flush(20)
        except BaseException as error:
            failures.append(error)

    with SharedReceiver(endpoint) as receiver:
        thread = threading.Thread(target=send)
        thread.start()
        held = []
        for i, size in enumerate(sizes):
            got = receiver.receive(20)
            assert got.header == b"%d" % i
            assert bytes(got.payload) == bytes([i % 251]) * size
            assert got.payload.readonly
            held.append((got, i, size))
            # Released late and in another order, as far as the ring allows.
            if sum(size + 64 for _, _, size in held) > 5000:
                rng.shuffle(held)
                for other, j, length in held:
                    assert bytes(other.payload) == bytes([j % 251]) * length, "overwritten before it was released"
                    other.release()
                held.clear()
        for other, _, _ in held:
            other.release()
        thread.join(30)
    assert not failures and not thread.is_alive()


def test_what_is_not_released_bounds_the_sender(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 8192) as sender:
        sender.send(b"", bytes(8000))
        with pytest.raises(DeadlineError, match="room for 1000 bytes"):
            sender.send(b"", bytes(1000), timeout_s=0.05)
        got = receiver.receive(5)
        with pytest.raises(DeadlineError, match="1 payloads"):
            sender.flush(0.05)
        got.release()
        got.release()
        sender.flush(5)
        sender.send(b"", bytes(1000), timeout_s=5)
        with pytest.raises(ValidationError, match="can never fit"):
            sender.send(b"", bytes(9000))
    with pytest.raises(ClosedError):
        sender.send(b"", b"")
    with pytest.raises(ValidationError, match="capacity_bytes: 10"):
        SharedSender(endpoint, 10)


def test_nothing_is_received_within_the_deadline(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, pytest.raises(DeadlineError):
        receiver.receive(0.01)


@pytest.mark.parametrize("timeout_s", [None, 1e12, float("inf")])
def test_waits_without_end_end_when_there_is_something(endpoint: str, timeout_s: float | None) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 8192) as sender:
        sender.send(b"", bytes(6000))
        timer = threading.Timer(0.05, lambda: receiver.receive(30).release())
        timer.start()
        sender.send(b"", bytes(6000), timeout_s)
        timer.join()
        receiver.receive(timeout_s).release()
        timer = threading.Timer(0.05, sender.send, args=(b"", b"last"))
        timer.start()
        assert bytes(receiver.receive(timeout_s).payload) == b"last"
        timer.join()


def test_senders_take_turns(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, ExitStack() as senders:
        for name in (b"a", b"b", b"c"):
            sender = senders.enter_context(SharedSender(endpoint, 65_536))
            for i in range(20):
                sender.send(name, bytes([i]))
        got = [receiver.receive(5) for _ in range(60)]
        assert {b"".join(sorted(one.header for one in got[i : i + 3])) for i in range(3, 57, 3)} == {b"abc"}
        for name in (b"a", b"b", b"c"):
            assert [one.payload[0] for one in got if one.header == name] == list(range(20))


def test_who_joins_is_served_though_another_always_has_something(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 1 << 20) as first:
        first.send(b"first", b"")
        receiver.receive(5).release()
        with SharedSender(endpoint, 8192) as second:
            second.send(b"second", b"")
            for _ in range(200):
                first.send(b"first", b"")
                got = receiver.receive(5)
                got.release()
                if got.header == b"second":
                    return
    pytest.fail("200 payloads of one sender, none of the other")


def test_a_place_is_released_when_nobody_views_it_any_more(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 8192) as sender:
        sender.send(b"", b"x" * 6000)
        with receiver.receive(5) as got:
            part = got.payload[5000:]
            array = np.frombuffer(part, np.uint8)
        with pytest.raises(ValueError, match="released"):
            len(got.payload)
        with pytest.raises(DeadlineError):
            sender.send(b"", b"y" * 6000, timeout_s=0.01)
        assert bytes(part) == b"x" * 1000 and (array == ord("x")).all()
        del part, array, got
        gc.collect()
        sender.send(b"", b"y" * 6000, timeout_s=0)
        receiver.receive(5)  # neither released nor kept
        sender.flush(0)


def test_what_is_held_outlives_both_ends(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver:
        with SharedSender(endpoint, 8192) as sender:
            sender.send(b"h", b"held" * 500)
            sender.send(b"h", b"sent" * 500)
        got = receiver.receive(5)
        with pytest.raises(ClosedError):
            sender.flush(1)
        second = receiver.receive(5)
        assert (bytes(got.payload), bytes(second.payload)) == (b"held" * 500, b"sent" * 500)
        with pytest.raises(DeadlineError):
            receiver.receive(0.01)
    assert bytes(got.payload) == b"held" * 500
    got.release()
    with pytest.raises(ClosedError):
        receiver.receive(0)


def test_any_contiguous_bytes_go_and_others_are_refused(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 8 << 20) as sender:
        numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
        sender.send(memoryview(b"head"), numbers)
        with receiver.receive(5) as got:
            assert (got.header, bytes(got.payload)) == (b"head", numbers.tobytes())
        for header, payload, named in (
            (b"", numbers[:, 1], "payload: ndarray"),
            (b"", "text", "payload: str"),
            (3, b"", "header: int"),
        ):
            with pytest.raises(ValidationError, match=f"{named}, expected contiguous bytes"):
                sender.send(header, payload)
        with pytest.raises(ValidationError, match="header: 1048577 bytes, at most 1048576"):
            sender.send(bytes((1 << 20) + 1), b"")


def test_large_copies_let_other_threads_run_and_a_sender_is_for_one_thread(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 200 << 20) as sender:
        payload = bytes(150 << 20)
        for _ in range(20):
            thread = threading.Thread(target=sender.send, args=(b"", payload))
            thread.start()
            try:
                while thread.is_alive():
                    sender._writer.unreleased()
            except ValidationError as error:
                assert "another thread" in str(error)
                sender.close()  # when the copy is done
                with pytest.raises(ClosedError):
                    sender.send(b"", b"")
                return
            finally:
                thread.join()
                receiver.receive(5).release()
    pytest.fail("nothing ran beside a copy")


STEP = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 40), st.sampled_from([0, 1, 64, 1000, 2500, 3900])),
    st.tuples(st.just("receive")),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("flush"), st.integers(0, 1)),
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, max_size=80))
def test_it_is_two_bounded_queues(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]) -> None:
    endpoint = f"ipc://{tmp_path_factory.mktemp('model')}/s"
    queues: list[deque[tuple[bytes, bytes]]] = [deque(), deque()]
    unreleased = [0, 0]
    held: list[tuple[Any, int, tuple[bytes, bytes]]] = []
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, 4096) as a, SharedSender(endpoint, 4096) as b:
        senders = (a, b)
        for number, step in enumerate(steps):
            if step[0] == "send":
                _, which, header, payload = step
                content = (bytes([which]) + bytes([number]) * header, bytes([number]) * payload)
                try:
                    senders[which].send(*content, timeout_s=0)
                    queues[which].append(content)
                    unreleased[which] += 1
                except DeadlineError:
                    assert unreleased[which] > 0
            elif step[0] == "receive" and not any(queues):
                with pytest.raises(DeadlineError):
                    receiver.receive(0)
            elif step[0] == "receive":
                got = receiver.receive(5)
                which = got.header[0]
                assert (got.header, bytes(got.payload)) == queues[which].popleft()
                held.append((got, which, (got.header, bytes(got.payload))))
            elif step[0] == "release" and held:
                got, which, content = held.pop(step[1] % len(held))
                assert (got.header, bytes(got.payload)) == content
                got.release()
                unreleased[which] -= 1
            elif step[0] == "flush":
                if unreleased[step[1]]:
                    with pytest.raises(DeadlineError):
                        senders[step[1]].flush(0)
                else:
                    senders[step[1]].flush(0)
