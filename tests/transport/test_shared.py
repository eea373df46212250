"""Payloads through shared memory: whole, in order, bounded, in place, and nothing left when a process is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sao.errors import ClosedError, DeadlineError, TransportError, ValidationError
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


PRODUCER = """
import os, sys, time
from sao.transport.shared import SharedSender
sender = SharedSender(sys.argv[1], 1 << 20)
for i in range(3):
    sender.send(b"%d" % i, bytes([i]) * 100_000)
print("sent", flush=True)
time.sleep(60)
"""


def test_a_killed_producer_takes_nothing_with_it_and_leaves_nothing_behind(endpoint: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    with SharedReceiver(endpoint) as receiver:
        process = subprocess.Popen([sys.executable, "-c", PRODUCER, endpoint], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"sent\n"
        got = [receiver.receive(10)]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        got += [receiver.receive(10) for _ in range(2)]
        assert [bytes(one.payload) for one in got] == [bytes([i]) * 100_000 for i in range(3)]
        for one in got:
            one.release()
    assert {path.name for path in set(Path("/dev/shm").iterdir()) - before if "sao-shared" in path.name} == set()


def test_foreign_greetings_are_refused(endpoint: str, tmp_path: Path) -> None:
    import struct

    import zmq

    file = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    hello = struct.Struct("<4sIIQ")
    with SharedReceiver(endpoint) as receiver, zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for greeting in (
            b"",
            b"x" * hello.size,
            hello.pack(b"SAO1", os.getpid(), file, 4096),
            hello.pack(b"SAO1", os.getpid(), 99_999, 4096),
            hello.pack(b"SAO1", os.getpid(), file, 1 << 60),
        ):
            socket.send(greeting)
            with pytest.raises(TransportError):
                receiver.receive(5)
        socket.send_multipart((b"header", b"place"))
        with pytest.raises(TransportError, match="unexpected"):
            receiver.receive(5)
    os.close(file)
