"""Trajectories from producer processes on the same host through shared memory: one copy in, read in place.

Each sender owns a piece of anonymous memory (a memfd, sealed so that it can never shrink under a reader), fills it as a
ring and sends header and position over a ZeroMQ socket; the receiver maps it once, reads where the bytes lie, and
releases them in any order. What is not released bounds the sender. Nothing stays behind when a process is killed: the
memory goes with the last one that has it. Who reads must not trust the bytes before they are decoded or copied, as
with any frame.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import zmq

from sao.errors import ClosedError, DeadlineError, TransportError, ValidationError

_HELLO = struct.Struct("<4sIIQ")  # magic, pid, file descriptor, bytes
_PLACE = struct.Struct("<QQQ")  # ticket, offset, length
_ACK = struct.Struct("<Q")  # tickets below this are free
_MAGIC = b"SAO1"
_ALIGN = 64
_RELEASES = 4  # told at once; few, because a sender may have room for few
_MAX_BYTES = 1 << 40


class SharedSender:
    """The sending end, for one thread. `capacity_bytes` bounds what is sent and not yet released.

    Raises `ValidationError` for a capacity below one page.
    """

    def __init__(self, endpoint: str, capacity_bytes: int = 64 << 20) -> None:
        if not mmap.PAGESIZE <= capacity_bytes <= _MAX_BYTES:
            raise ValidationError(f"capacity_bytes: {capacity_bytes} is not in {mmap.PAGESIZE}..{_MAX_BYTES}")
        self._capacity = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.memfd_create("sao-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self._capacity)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self._fd, self._capacity, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._view = memoryview(self._memory)
        self._unreleased: deque[tuple[int, int, int]] = deque()  # ticket, start, stop
        self._ticket, self._end = 0, 0
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by the memory
        self._socket.connect(endpoint)
        self._socket.send(_HELLO.pack(_MAGIC, os.getpid(), self._fd, self._capacity))

    def send(self, header: bytes, payload: Any, timeout_s: float | None = None) -> None:
        """Copies `payload` (contiguous bytes) into the shared memory and sends it; waits for room up to `timeout_s`.

        Raises `DeadlineError`; `ValidationError` at once for a payload larger than the memory; `ClosedError`.
        """
        with memoryview(payload).cast("B") as source:
            length = len(source)
            if length > self._capacity - _ALIGN:
                raise ValidationError(f"payload: {length} bytes can never fit into {self._capacity}")
            if self._socket.closed:
                raise ClosedError("the sender is closed")
            while self._socket.get(zmq.EVENTS) & zmq.POLLIN:
                self._acknowledged()
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while (start := self._room(length)) is None:
                self._wait(deadline, f"room for {length} bytes in shared memory", timeout_s)
            self._view[start : start + length] = source
        stop = start + max(length, 1)
        self._unreleased.append((self._ticket, start, stop))
        self._end = stop
        self._socket.send_multipart((header, _PLACE.pack(self._ticket, start, length)), copy=True)
        self._ticket += 1

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything sent has been released. Raises `DeadlineError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._unreleased:
            self._wait(deadline, f"{len(self._unreleased)} payloads to be released", timeout_s)

    def close(self) -> None:
        """Gives the memory up; the receiver keeps what it has mapped."""
        if not self._socket.closed:
            self._socket.close()
            self._view.release()
            self._memory.close()
            os.close(self._fd)

    def _room(self, length: int) -> int | None:
        """Where `length` bytes fit in a row: behind the newest, up to the oldest or the end, or at the start."""
        if not self._unreleased:
            return 0
        need, start = max(length, 1), -(-self._end // _ALIGN) * _ALIGN
        oldest, newest = self._unreleased[0][1], self._unreleased[-1][1]
        if newest < oldest:  # wrapped: free between the newest and the oldest
            return start if start + need <= oldest else None
        if start + need <= self._capacity:
            return start
        return 0 if need <= oldest else None

    def _wait(self, deadline: float | None, what: str, timeout_s: float | None) -> None:
        left_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1e3) + 1)
        if not self._socket.poll(left_ms) or (deadline is not None and time.monotonic() >= deadline):
            raise DeadlineError(f"waited {timeout_s} s for {what}")
        self._acknowledged()

    def _acknowledged(self) -> None:
        (below,) = _ACK.unpack(self._socket.recv())
        while self._unreleased and self._unreleased[0][0] < below:
            self._unreleased.popleft()

    def __enter__(self) -> SharedSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Peer:
    identity: bytes
    memory: mmap.mmap
    view: memoryview
    released: set[int] = field(default_factory=set)
    below: int = 0  # all tickets below this are released
    told: int = 0  # what the sender knows of that


class Received:
    """A payload where its sender wrote it; `release` lets the sender use the place again."""

    __slots__ = ("_peer", "_receiver", "_ticket", "header", "payload")

    def __init__(self, receiver: SharedReceiver, peer: _Peer, ticket: int, header: bytes, payload: memoryview) -> None:
        self._receiver, self._peer, self._ticket = receiver, peer, ticket
        self.header = header
        self.payload = payload

    def release(self) -> None:
        """The payload is no longer needed; views of it must not be used from here on. A second call does nothing."""
        if self._ticket >= 0:
            self.payload.release()
            self._receiver._release(self._peer, self._ticket)
            self._ticket = -1

    def __enter__(self) -> Received:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SharedReceiver:
    """The receiving end of any number of senders, for one thread. `endpoint` is an ipc address in a private folder."""

    def __init__(self, endpoint: str) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by the senders' memory
        self._socket.bind(endpoint)

    def receive(self, timeout_s: float | None = None) -> Received:
        """The next payload of any sender. Raises `DeadlineError`; `TransportError` for a message that is none."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1e3) + 1)
            if not self._socket.get(zmq.EVENTS) & zmq.POLLIN:
                for peer in self._peers.values():
                    self._tell(peer)
                if not self._socket.poll(left_ms):
                    raise DeadlineError(f"waited {timeout_s} s for a payload")
            identity, first, *rest = self._socket.recv_multipart()
            if not rest:
                self._peers[identity] = _map(identity, first)
                continue
            sender = self._peers.get(identity)
            if sender is None or len(rest) != 1 or len(rest[0]) != _PLACE.size:
                raise TransportError(f"shared memory: unexpected message of {1 + len(rest)} frames")
            ticket, offset, length = _PLACE.unpack(rest[0])
            if offset + length > len(sender.view):
                raise TransportError(f"shared memory: {length} bytes at {offset} of {len(sender.view)}")
            return Received(self, sender, ticket, first, sender.view[offset : offset + length].toreadonly())

    def close(self) -> None:
        """Tells all releases and closes the socket; memory stays mapped while a payload in it is in use."""
        if not self._socket.closed:
            for peer in self._peers.values():
                self._tell(peer)
            self._socket.close()
        self._peers.clear()

    def _release(self, peer: _Peer, ticket: int) -> None:
        if self._socket.closed:
            return
        if ticket != peer.below:
            peer.released.add(ticket)
            return
        peer.below += 1
        while peer.below in peer.released:
            peer.released.remove(peer.below)
            peer.below += 1
        # While more is waiting to be received, several releases are told at once; before a pause, all are.
        if peer.below - peer.told >= _RELEASES or not self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._tell(peer)

    def _tell(self, peer: _Peer) -> None:
        if peer.told < peer.below:
            self._socket.send_multipart((peer.identity, _ACK.pack(peer.below)))
            peer.told = peer.below

    def __enter__(self) -> SharedReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(identity: bytes, hello: bytes) -> _Peer:
    """Maps the memory that a sender announces, if it is a sealed one of the announced size."""
    if len(hello) != _HELLO.size:
        raise TransportError(f"shared memory: a greeting of {len(hello)} bytes, expected {_HELLO.size}")
    magic, pid, number, capacity = _HELLO.unpack(hello)
    if magic != _MAGIC or not mmap.PAGESIZE <= capacity <= _MAX_BYTES:
        raise TransportError("shared memory: not a greeting of a sender")
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"shared memory of process {pid}: {error}") from None
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != capacity:
            raise TransportError(f"shared memory of process {pid}: not sealed, or not of {capacity} bytes")
        memory = mmap.mmap(fd, capacity, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise TransportError(f"shared memory of process {pid}: {error}") from None
    finally:
        os.close(fd)
    return _Peer(identity, memory, memoryview(memory))
