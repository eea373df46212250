"""Trajectories from producer processes on the same host through shared memory: one copy in, read in place.

Each sender owns a piece of anonymous memory (a memfd, sealed so that it can never shrink under a reader) and passes it
to the receiver over a socket when it connects. It copies payload and header in and publishes where they lie; the
receiver reads them there, and releases them in any order. What is not released bounds the sender. As long as neither
side has to wait nothing else passes between them: the socket carries a byte when the other one sleeps, and its end says
that the other one has closed, or was killed with all children it forked while it was connected. Nothing stays behind
when a process is killed: the memory goes with the last one that has it, and what a killed sender had published is still
delivered.

Every number that the other side writes into the memory is checked before it is used. Who reads must not trust the bytes
of payloads and headers before they are decoded or copied, as with any frame.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from sao import _core
from sao.errors import DeadlineError, Error, TransportError, ValidationError
from sao.transport.sockets import check_endpoint, check_private, clear_stale

log = logging.getLogger(__name__)

Received = _core.SharedPayload

_HELLO = struct.Struct("<4sQ")  # magic, bytes of data; with it comes the descriptor of the memory
_MAGIC = b"SAO2"
_MAX_BYTES = 1 << 40
_CONNECT_S = 10.0
_GREET_S = 10.0  # for a greeting, from when the connection is taken
_LOCK_S = 10.0  # for the folder of an endpoint, which another one that begins to listen there holds for a moment
_RETRY_S = 0.01
_BACKLOG = 4096  # who connects when so many wait to be let in is refused
_LONGEST_S = 1e6  # what `poll` takes in one call


class SharedSender:
    """The sending end, for one thread of one process. `capacity_bytes` bounds what is sent and not yet released.

    The receiver must exist. Raises `ValidationError` for a capacity below one page, `TransportError` when nobody
    listens.
    """

    def __init__(self, endpoint: str, capacity_bytes: int = 64 << 20) -> None:
        if not mmap.PAGESIZE <= capacity_bytes <= _MAX_BYTES:
            raise ValidationError(f"capacity_bytes: {capacity_bytes} is not in {mmap.PAGESIZE}..{_MAX_BYTES}")
        path = _path(endpoint)
        capacity = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = os.memfd_create("sao-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, _core.shared_bytes(capacity))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(_CONNECT_S)
                try:
                    line.connect(str(path))
                    socket.send_fds(line, [_HELLO.pack(_MAGIC, capacity)], [memory])
                except OSError as error:
                    raise TransportError(f"endpoint {endpoint!r}: cannot connect: {error}") from None
                line.settimeout(0)
                self._writer = _core.SharedWriter(memory, line.detach(), capacity)
        finally:
            os.close(memory)
        self._poll = select.poll()
        self._poll.register(self._writer.fileno(), select.POLLIN)

    def send(self, header: bytes, payload: Any, timeout_s: float | None = None) -> None:
        """Copies `payload` (contiguous bytes) into the shared memory and sends it; waits for room up to `timeout_s`
        (None: without end).

        A header has at most 1 MiB and counts too. Raises `DeadlineError`; `ValidationError` at once for a payload
        larger than the memory; `TransportError` when the receiver is gone, which may be noticed only when there is no
        room; `ClosedError`.
        """
        if not self._writer.send(header, payload):
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self._writer.send(header, payload):
                self._wait(deadline, f"room for {memoryview(payload).nbytes} bytes in shared memory", timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything sent has been released, up to `timeout_s` (None: without end). Raises `DeadlineError`,
        `TransportError`, `ClosedError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while left := self._writer.unreleased():
            self._wait(deadline, f"{left} payloads to be released", timeout_s)

    def close(self) -> None:
        """Gives the memory up; the receiver keeps what it has mapped, and still gets what was sent."""
        self._writer.close()

    def _wait(self, deadline: float | None, what: str, timeout_s: float | None) -> None:
        """Until the receiver rings. The caller looks once more after the deadline before this raises."""
        if self._writer.gone:
            raise TransportError(f"shared memory: the receiver is gone, while waiting for {what}")
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s < 0:
            raise DeadlineError(f"waited {timeout_s} s for {what}")
        if self._poll.poll(None if left_s is None else int(min(left_s, _LONGEST_S) * 1e3) + 1):
            self._writer.hear()

    def __enter__(self) -> SharedSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedReceiver:
    """The receiving end of any number of senders, for one thread. `endpoint` is an ipc address in a private folder.
    `dropped_pending`: connections that were closed because they did not greet in time.

    Raises `TransportError` for any other, for a folder that others may enter, and when somebody listens there already;
    `DeadlineError` when another process keeps the folder locked.
    """

    def __init__(self, endpoint: str) -> None:
        self._path = _path(endpoint)
        check_private(self._path.parent)
        self._pending: dict[int, tuple[socket.socket, float]] = {}  # have not greeted; until when they may
        self.dropped_pending = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            with _alone(self._path.parent):
                clear_stale(self._path)
                self._listener.bind(str(self._path))
                self._listener.listen(_BACKLOG)
            self._epoll = select.epoll()
            self._readers = _core.SharedReaders(self._epoll.fileno())
        except Error:
            self._listener.close()
            raise
        except OSError as error:
            self._listener.close()
            raise TransportError(f"endpoint {endpoint!r}: cannot listen: {error}") from None
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def receive(self, timeout_s: float | None = None) -> Received:
        """The next payload, of all senders in turn, each in its order; to be released when it is no longer needed.

        Waits up to `timeout_s` (None: without end). Raises `DeadlineError`; `TransportError` for a sender that breaks
        the protocol, which is dropped; `ClosedError`.
        """
        got = self._readers.take()
        return got if got is not None else self._wait(timeout_s)

    def close(self) -> None:
        """Lets the senders go; memory stays mapped while a payload in it is in use."""
        if not self._epoll.closed:
            self._readers.close()
            for line, _ in self._pending.values():
                line.close()
            self._pending.clear()
            self._epoll.close()
            # In this order: once nobody listens, the path may be that of another receiver.
            self._path.unlink(missing_ok=True)
            self._listener.close()

    def _wait(self, timeout_s: float | None) -> Received:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ends = [end for _, end in self._pending.values()]
            until = min(ends if deadline is None else [*ends, deadline], default=None)
            left_s = None if until is None else min(max(0.0, until - time.monotonic()), _LONGEST_S)
            # Not asleep: there is something to take, and this is only a look at who joined and who went.
            asleep = self._readers.doze()
            for number, _ in self._epoll.poll(left_s if asleep else 0):
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._pending:
                    self._greet(*self._pending.pop(number))
                else:
                    self._readers.hear(number)
            self._drop_late()
            if (got := self._readers.take()) is not None:
                return got
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"waited {timeout_s} s for a payload")

    def _accept(self) -> None:
        """All who want to join now, so that those who come together are served together."""
        for _ in range(_BACKLOG):
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                raise TransportError(f"shared memory: a sender cannot join: {error}") from None
            line.setblocking(False)
            self._epoll.register(line.fileno(), select.EPOLLIN)
            self._greet(line, time.monotonic() + _GREET_S)

    def _drop_late(self) -> None:
        """Closes connections whose greeting is overdue, and not merely unread because this process stood still."""
        now = time.monotonic()
        for number in [number for number, (_, end) in self._pending.items() if end <= now]:
            self._greet(*self._pending.pop(number))
            if number in self._pending:
                self._epoll.unregister(number)  # a forked child may hold a copy, which would keep it there
                self._pending.pop(number)[0].close()
                self.dropped_pending += 1
                log.warning("shared memory: a connection that did not greet within %g s is dropped", _GREET_S)

    def _greet(self, line: socket.socket, end: float) -> None:
        """Maps the memory that a sender passes, if it is a sealed one of the announced size."""
        descriptors: list[int] = []
        try:
            space = socket.CMSG_SPACE(struct.calcsize("i"))
            try:
                hello, extra, _, _ = line.recvmsg(_HELLO.size, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:  # not yet
                self._pending[line.fileno()] = line, end
                return
            for level, kind, data in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
            if not hello:
                return  # it went again
            if len(hello) != _HELLO.size or len(descriptors) != 1:
                raise TransportError(
                    f"shared memory: a greeting of {len(hello)} bytes and {len(descriptors)} descriptors, expected "
                    f"{_HELLO.size} and 1"
                )
            magic, capacity = _HELLO.unpack(hello)
            if magic != _MAGIC:
                raise TransportError(f"shared memory: not a greeting of a sender: {magic!r}")
            self._readers.add(descriptors[0], line.detach(), capacity)
        except OSError as error:
            raise TransportError(f"shared memory: no greeting of a sender: {error}") from None
        finally:
            if line.fileno() not in self._pending:
                line.close()
            for descriptor in descriptors:
                os.close(descriptor)

    def __enter__(self) -> SharedReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: what is bound and does not listen yet looks like what a killed one left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"waited {_LOCK_S:g} s for the lock on {folder}") from None
                time.sleep(_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _path(endpoint: str) -> Path:
    path = check_endpoint(endpoint)
    if path is None:
        raise TransportError(f"endpoint {endpoint!r}: shared memory needs ipc://PATH")
    return path
