"""Shared memory when the other side is killed, goes, lies, or is no sender: no hang, no crash, nothing left."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from sao import _core
from sao.errors import DeadlineError, TransportError
from sao.transport.shared import SharedReceiver, SharedSender

HELLO = struct.Struct("<4sQ")
CAPACITY = 8192
PUBLISHED, WANTED, RELEASED, ASLEEP, ENTRIES, DATA = 0, 128, 256, 384, 4096, 4096 + 8192
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def put(memory: mmap.mmap, offset: int, *numbers: int) -> None:
    struct.pack_into(f"<{len(numbers)}Q", memory, offset, *numbers)


def get(memory: mmap.mmap, offset: int) -> int:
    return int.from_bytes(memory[offset : offset + 8], "little")


def greet(endpoint: str, hello: bytes, *descriptors: int) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(endpoint.removeprefix("ipc://"))
    socket.send_fds(line, [hello], list(descriptors))
    return line


def memfd(size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextmanager
def liar(endpoint: str) -> Iterator[tuple[mmap.mmap, socket.socket]]:
    """A sender in name only: its memory, to be written to at will, and its line."""
    fd = memfd(_core.shared_bytes(CAPACITY))
    try:
        memory, line = mmap.mmap(fd, _core.shared_bytes(CAPACITY)), greet(endpoint, HELLO.pack(b"SAO2", CAPACITY), fd)
    finally:
        os.close(fd)
    with memory, line:
        yield memory, line


def held_by_this_process() -> tuple[int, int]:
    """Descriptors, and mappings of shared memory of ours."""
    maps = Path("/proc/self/maps").read_text()
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), maps.count("memfd:sao-shared")


def child(code: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=stdin, stdout=subprocess.PIPE)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


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
    before = held_by_this_process()
    with SharedReceiver(endpoint) as receiver:
        process = child(PRODUCER, endpoint)
        assert process.stdout is not None and process.stdout.readline() == b"sent\n"
        got = [receiver.receive(30)]
        kill(process)
        got += [receiver.receive(30) for _ in range(2)]
        assert [bytes(one.payload) for one in got] == [bytes([i]) * 100_000 for i in range(3)]
        assert held_by_this_process()[1] == before[1] + 1
        del got
        with pytest.raises(DeadlineError):
            receiver.receive(0.01)
        assert held_by_this_process()[1] == before[1], "no mapping is left of a sender that is gone"
    assert held_by_this_process() == before


COPIER = """
import sys
from sao.transport.shared import SharedSender
sender = SharedSender(sys.argv[1], 40 << 20)
for i in range(1_000_000):
    sender.send(b"%d" % i, bytes([i % 251]) * (8 << 20))
"""


def test_a_sender_killed_in_the_middle_of_a_copy_leaves_only_whole_payloads(endpoint: str) -> None:
    rng, before = random.Random(0), held_by_this_process()
    with SharedReceiver(endpoint) as receiver:
        for _ in range(4):
            process, received, end = child(COPIER, endpoint), 0, None
            while True:
                try:
                    got = receiver.receive(60 if end is None else 0.3)
                except DeadlineError:
                    break
                first = got.payload[0]
                assert got.header == b"%d" % received and first == received % 251
                assert bytes(got.payload[:: 1 << 12]) == bytes([first]) * (1 << 11)
                got.release()
                received += 1
                if end is None and received == 3:
                    time.sleep(rng.random() * 0.01)  # somewhere in one of the copies that never end
                    kill(process)
                    end = received
            assert end is not None and len(receiver._readers) == 0
    del got
    assert held_by_this_process() == before


def test_what_was_published_but_not_rung_for_is_delivered(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver:
        with liar(endpoint) as (memory, _):
            with pytest.raises(DeadlineError):
                receiver.receive(0.05)
            assert get(memory, ASLEEP) == 0, "awake again"
            memory[DATA + 128 : DATA + 135] = b"payload"
            memory[DATA + 192 : DATA + 198] = b"header"
            put(memory, ENTRIES, 128, 7, 6)
            put(memory, PUBLISHED, 1)
        # Killed between the two: the end of the line wakes the receiver.
        with receiver.receive(30) as got:
            assert (got.header, bytes(got.payload)) == (b"header", b"payload")
        with pytest.raises(DeadlineError):
            receiver.receive(0.01)
        assert len(receiver._readers) == 0


def test_the_end_of_a_line_wakes_a_receiver_that_sleeps(endpoint: str) -> None:
    code = """
import mmap, os, struct, sys, time
sys.path.insert(0, sys.argv[2])
import test_shared_peers as t
with t.liar(sys.argv[1]) as (memory, line):
    while not t.get(memory, t.ASLEEP):  # of a test: the receiver knows nothing of it
        time.sleep(0.001)
    t.put(memory, t.ENTRIES, 0, 5, 0)
    t.put(memory, t.PUBLISHED, 1)
    os.kill(os.getpid(), 9)
"""
    with SharedReceiver(endpoint) as receiver:
        process = child(code, endpoint, str(Path(__file__).parent))
        assert bytes(receiver.receive(60).payload) == bytes(5)
        kill(process)


RECEIVER = """
import sys, time
from sao.transport.shared import SharedReceiver
with SharedReceiver(sys.argv[1]) as receiver:
    print("ready", flush=True)
    kept = [receiver.receive(60) for _ in range(2)]
    time.sleep(60)
"""


def test_a_sender_that_waits_learns_that_the_receiver_died(endpoint: str) -> None:
    for how in ("send", "flush"):
        process = child(RECEIVER, endpoint)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with SharedSender(endpoint, CAPACITY) as sender:
            sender.send(b"", bytes(6000))
            with pytest.raises(DeadlineError):
                sender.send(b"", bytes(6000), 0.05)
            killer = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {process.pid}"])
            with pytest.raises(TransportError, match="the receiver is gone"):
                sender.send(b"", bytes(6000), 60) if how == "send" else sender.flush(60)
            killer.wait(30)
        kill(process)
    # The file of the killed one does not keep the next one from listening, and nobody listens there now.
    with pytest.raises(TransportError, match="cannot connect"):
        SharedSender(endpoint, CAPACITY)
    with SharedReceiver(endpoint), pytest.raises(TransportError, match="another process listens"):
        SharedReceiver(endpoint)
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_of_receivers_that_begin_or_end_at_once_one_listens(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: dict[str, Callable[[], None]] = {}

    class Socket(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            moments.pop("listen", lambda: None)()
            super().listen(backlog)

        def close(self) -> None:
            super().close()
            moments.pop("close", lambda: None)()

    monkeypatch.setattr("sao.transport.shared.socket.socket", Socket)
    others: list[SharedReceiver | TransportError] = []

    def other() -> None:
        try:
            others.append(SharedReceiver(endpoint))
        except TransportError as error:
            others.append(error)

    def beside() -> None:
        thread.start()
        thread.join(0.3)  # it has to wait

    thread = threading.Thread(target=other)
    moments["listen"] = beside
    receiver = SharedReceiver(endpoint)
    thread.join(30)
    assert "another process listens" in str(others.pop())
    moments["close"] = other
    receiver.close()
    (successor,) = others
    assert isinstance(successor, SharedReceiver)
    with successor, SharedSender(endpoint) as sender:
        sender.send(b"", b"one")
        successor.receive(5).release()


def test_a_flush_counts_what_was_released_before_the_receiver_went(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, SharedSender(endpoint, CAPACITY) as sender:
        sender.send(b"", b"one")
        receiver.receive(5).release()
        receiver.close()
        sender.flush(5)
        sender.send(b"", b"two")
        with pytest.raises(TransportError, match="gone, while waiting for 1 payloads"):
            sender.flush(5)


@contextmanager
def forked() -> Iterator[None]:
    """A child that holds copies of all descriptors, as workers of a data loader do."""
    ends, end = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(end)
        os.close(ends)
        os.waitpid(process, 0)


def test_a_forked_child_hides_nobodys_end(endpoint: str) -> None:
    code = """
import sys
from sao.transport.shared import SharedSender
with SharedSender(sys.argv[1], 8192) as sender:
    sender.send(b"", b"one")
    sys.stdin.read(1)
    if sys.argv[2] == "stays":
        try:
            sender.flush(30)
        except Exception as error:
            print(type(error).__name__)
"""
    with SharedReceiver(endpoint) as receiver:
        goes, stays = (child(code, endpoint, how, stdin=subprocess.PIPE) for how in ("goes", "stays"))
        kept = [receiver.receive(60) for _ in range(2)]
        with forked():
            goes.communicate(b"!")
            with pytest.raises(DeadlineError):
                receiver.receive(0.1)
            assert len(receiver._readers) == 1
            assert receiver._epoll.poll(0) == []  # or each wait would be a loop
            receiver.close()
            assert stays.communicate(b"!")[0] == b"TransportError\n"
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("published", "entry"),
    [
        (257, (0, 1, 1)),
        ((1 << 64) - 1, (0, 1, 1)),
        (1, (1, 1, 1)),
        (1, (CAPACITY + 64, 0, 0)),
        (1, ((1 << 64) - 64, 128, 0)),
        (1, (64, CAPACITY, 0)),
        (1, (0, (1 << 64) - 1, 1)),
        (1, (0, CAPACITY, 1)),
        (1, (0, 1, CAPACITY)),
        (1, (0, 1, (1 << 64) - 1)),
    ],
)
def test_a_sender_that_lies_is_dropped_and_the_others_go_on(
    endpoint: str, published: int, entry: tuple[int, int, int]
) -> None:
    with (
        SharedReceiver(endpoint) as receiver,
        SharedSender(endpoint, CAPACITY) as honest,
        liar(endpoint) as (memory, line),
    ):
        put(memory, ENTRIES, *entry)
        put(memory, PUBLISHED, published)
        with pytest.raises(TransportError, match=r"shared memory: .* (expected|of 8192)"):
            receiver.receive(5)
        honest.send(b"h", b"honest")
        assert bytes(receiver.receive(5).payload) == b"honest"
        assert line.recv(1) == b"", "it is told"


def test_a_sender_cannot_take_back_what_it_published(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver, liar(endpoint) as (memory, _):
        put(memory, PUBLISHED, 2)
        receiver.receive(5), receiver.receive(5)
        put(memory, PUBLISHED, 1)
        with pytest.raises(TransportError, match="1 payloads published, expected 2"):
            receiver.receive(5)


class Flickering:
    """What a sender looks like that publishes something whenever one looks, and takes it back before it is taken."""

    def doze(self) -> bool:
        return False

    def take(self) -> None:
        return None

    def close(self) -> None:
        pass


def test_a_sender_that_changes_its_mind_all_the_time_does_not_outlast_a_deadline(endpoint: str) -> None:
    with SharedReceiver(endpoint) as receiver:
        receiver._readers = cast(Any, Flickering())
        with pytest.raises(DeadlineError):
            receiver.receive(0.02)


def test_random_bytes_in_the_control_page_harm_nobody(endpoint: str) -> None:
    rng = random.Random(1)
    with SharedReceiver(endpoint) as receiver:
        for _ in range(150):
            with liar(endpoint) as (memory, line):
                memory[512:DATA] = rng.randbytes(DATA - 512)
                for offset in (PUBLISHED, WANTED, RELEASED, ASLEEP):
                    put(memory, offset, rng.choice([0, 1, 5, 300, rng.getrandbits(64)]))
                for i in range(6):
                    put(memory, ENTRIES + 32 * i, rng.randrange(200) * 64, rng.randrange(9000), rng.randrange(500))
                line.send(rng.randbytes(rng.randrange(1000)))
                for _ in range(300):
                    try:
                        with receiver.receive(0.005) as got:
                            assert len(bytes(got.payload)) + len(got.header) <= CAPACITY
                    except (TransportError, DeadlineError):
                        break
                else:
                    pytest.fail("more payloads than there are places")
        with SharedSender(endpoint, CAPACITY) as honest:
            honest.send(b"h", b"honest")
            while True:
                try:
                    got = receiver.receive(5)
                except TransportError:
                    continue
                if bytes(got.payload) == b"honest":
                    break


@pytest.mark.parametrize("released", [2, 1 << 32, (1 << 64) - 1])
def test_a_receiver_that_lies_is_an_error_of_its_sender(tmp_path: Path, released: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with SharedSender(f"ipc://{tmp_path}/s", CAPACITY) as sender:
            line, _ = listener.accept()
            hello, [fd], _, _ = socket.recv_fds(line, 64, 1)
            assert HELLO.unpack(hello) == (b"SAO2", CAPACITY)
            with mmap.mmap(fd, _core.shared_bytes(CAPACITY)) as memory, line:
                os.close(fd)
                sender.send(b"", b"one")
                for offset in (PUBLISHED, WANTED, ASLEEP):  # what it wrote itself it never reads, and may be woken for
                    put(memory, offset, 1 << 63)
                put(memory, RELEASED, released)
                for use in (lambda: sender.send(b"", b"two", 1), lambda: sender.flush(1)):
                    with pytest.raises(TransportError, match=f"{released} payloads released, expected 0 to 1"):
                        use()


def test_hundreds_of_senders_come_and_go_and_leave_nothing_behind(endpoint: str) -> None:
    before = held_by_this_process()
    with SharedReceiver(endpoint) as receiver:
        # The last one to be seen may be noticed to have gone only by the next look.
        for _ in range(4):
            senders = [SharedSender(endpoint, 4096) for _ in range(80)]
            for i, sender in enumerate(senders):
                sender.send(b"%d" % i, b"x")
            kept = [receiver.receive(5) for _ in senders]
            assert {int(got.header) for got in kept} == set(range(80))
            for sender in senders:
                sender.close()
            with pytest.raises(DeadlineError):
                receiver.receive(0.01)
            assert len(receiver._readers) == 0
            assert held_by_this_process()[1] == before[1] + 80, "what is held stays mapped"
            assert all(bytes(got.payload) == b"x" for got in kept)
            kept.clear()
            assert held_by_this_process()[1] == before[1]
    assert held_by_this_process() == before


def test_foreign_greetings_are_refused(endpoint: str, tmp_path: Path) -> None:
    size = _core.shared_bytes(CAPACITY)
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, size)
    good, short, soft = memfd(size), memfd(size - 4096), memfd(size, 0)
    right = HELLO.pack(b"SAO2", CAPACITY)
    before = held_by_this_process()
    with SharedReceiver(endpoint) as receiver:
        for hello, descriptors in (
            (right, ()),
            (right, (good, good)),
            (right[:5], (good,)),
            (b"x" * HELLO.size, (good,)),
            (HELLO.pack(b"SAO1", CAPACITY), (good,)),
            (HELLO.pack(b"SAO2", 0), (good,)),
            (HELLO.pack(b"SAO2", CAPACITY + 1), (good,)),
            (HELLO.pack(b"SAO2", (1 << 64) - 1), (good,)),
            (right, (short,)),
            (right, (soft,)),
            (right, (plain,)),
        ):
            with greet(endpoint, hello, *descriptors), pytest.raises(TransportError, match="shared memory"):
                receiver.receive(5)
        greet(endpoint, b"").close()  # looked whether somebody listens
        with pytest.raises(DeadlineError):
            receiver.receive(0.01)
    assert held_by_this_process() == before
    for descriptor in (plain, good, short, soft):
        os.close(descriptor)


def test_other_folders_and_addresses_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(TransportError, match="mode 0700"):
        SharedReceiver(f"ipc://{tmp_path}/open/s")
    for end in (SharedReceiver, SharedSender):
        with pytest.raises(TransportError, match="needs ipc://PATH"):
            end("tcp://127.0.0.1:5555")
