"""The peer's end of the line to the broker.

One I/O thread owns the socket; any number of threads may call. A message is sent again until it is answered, a call
has a deadline of its own that leaves the client usable, and a broker that falls silent fails every waiter with a
reason.
"""

from __future__ import annotations

import heapq
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import zmq

from sao import errors
from sao.errors import ClosedError, DeadlineError, Error, TransportError, WireError
from sao.transport.encoding import Header, decode, encode
from sao.transport.keys import ClientKeys
from sao.transport.legacy import message_of
from sao.transport.link import Link
from sao.transport.messages import (
    Ack,
    Buffer,
    Bye,
    CancelCall,
    Hello,
    Message,
    Ping,
    Pong,
    Refusal,
    Welcome,
)
from sao.transport.sockets import connect, make_dealer, receive, send
from sao.transport.watch import Watch

log = logging.getLogger(__name__)


class Client:
    """A DEALER with the identity `role:name:incarnation`.

    `on_push(message)` is called in the I/O thread for everything that the broker sends on its own (tasks, version,
    stop, step, ...), each exactly once; it must return at once (hand over, do not work). `on_lost(error)` is called
    once when the broker is silent for `peer_timeout_s`, has forgotten this peer or refuses its `keys`. Make the client
    after a fork, not before.

    With `outage_s` the broker may be away for so long: a broker that was started again, or has given this peer up, is
    greeted again with the fields of `connect` and what `on_greet(hello)` adds, and gets all that is unanswered, except
    messages of the kinds `transient`; `on_rejoin(welcome)` is called before the first push of the new conversation.
    Both are called in the I/O thread.

    >>> client = Client(endpoint, role="generator", name="g0", on_push=print)
    >>> welcome = client.connect(deadline_s=10.0)
    >>> reply = client.call(Slots(free=8, received=0), deadline_s=5.0).result()
    """

    def __init__(
        self,
        endpoint: str,
        *,
        role: str,
        name: str,
        incarnation: int = 0,
        max_message_bytes: int = 1 << 28,
        heartbeat_s: float = 1.0,
        peer_timeout_s: float = 15.0,
        keys: ClientKeys | None = None,
        outage_s: float = 0.0,
        transient: tuple[type[Message], ...] = (),
        on_greet: Callable[[Hello], Hello] | None = None,
        on_rejoin: Callable[[Welcome], None] | None = None,
        on_push: Callable[[Message], None] | None = None,
        on_lost: Callable[[Error], None] | None = None,
    ) -> None:
        self.endpoint, self.role, self.name, self.incarnation = endpoint, role, name, incarnation
        self._max_message_bytes = max_message_bytes
        self._heartbeat_s, self._peer_timeout_s = heartbeat_s, peer_timeout_s
        self._on_push, self._on_lost = on_push, on_lost
        self._comes_back, self._patience_s = outage_s > 0, max(outage_s, peer_timeout_s)
        self._transient, self._on_greet, self._on_rejoin = transient, on_greet, on_rejoin
        self._hello = Hello(role, name, incarnation, "", secrets.token_hex(8))
        self._greeting: tuple[int, list[Buffer]] | None = None
        self._quiet = False  # the broker is away: only signs of life are sent until it is heard again
        self._pid = os.getpid()
        self._lock = threading.Condition()
        self._link = Link(resend_s=max(heartbeat_s, 0.2))
        self._waiters: dict[int, tuple[Future[Message], Message, float | None]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._outbox: deque[list[Buffer]] = deque()
        self._failure: Error | None = None
        self._joined = False
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            identity = f"{role}:{name}:{incarnation}".encode()
            self._socket = make_dealer(self._context, endpoint, identity, max_message_bytes, keys)
            self._watch = Watch(self._socket, endpoint, keys)
            connect(self._socket, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = False
        self._thread = threading.Thread(target=self._run, name=f"sao-client-{name}", daemon=True)
        self._thread.start()

    # -- calls, from any thread

    def connect(self, deadline_s: float = 30.0, **hello: Any) -> Welcome:
        """Joins; returns the answer. `hello` adds fields to the greeting.

        Raises `DeadlineError` that names the endpoint when nothing answers in time, `TransportError` when refused.
        """
        self._hello = msgspec.structs.replace(self._hello, name=self.name, **hello)
        welcome = self.call(self._greeting_body(), deadline_s=deadline_s).result()
        assert isinstance(welcome, Welcome)
        with self._lock:
            self._joined = True
        self._wake()
        return welcome

    def call(
        self,
        message: Message | str,
        body: Any = None,
        frames: Sequence[Buffer] = (),
        deadline_s: float | None = None,
    ) -> Future[Message]:
        """Sends a message and returns the future of its answer.

        The future raises `DeadlineError` after `deadline_s` (the answer of a call that was given up reaches nobody,
        and the broker is told), `TransportError` when the broker is lost, `ClosedError` at `close()`, and the error
        that the broker names. `call` itself raises `WireError` for an oversized message, and waits while the window
        of 4096 unanswered messages is full. `frames` must not be changed before the answer.
        """
        if os.getpid() != self._pid:
            text = f"client was made in process {self._pid} and is used in {os.getpid()}: make a new one after fork"
            raise TransportError(text)
        if isinstance(message, str):
            message = message_of(message, body, frames)
        now = time.monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        future: Future[Message] = Future()
        with self._lock:
            while not (self._link.open or self._failure or self._closing):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineError(f"{message.kind}: no room to send to {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_unusable()
            seq, low = self._link.number(), self._link.low
        try:
            wire = encode(message, self._max_message_bytes, seq=seq, low=low)
        except WireError:
            with self._lock:
                self._link.settle(seq)
                self._lock.notify_all()
            raise
        with self._lock:
            self._raise_if_unusable()
            self._waiters[seq] = (future, message, deadline_s)
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, seq))
            self._link.sent(seq, wire, now)
            self._outbox.append(wire)
        future.add_done_callback(partial(self._given_up, seq))
        self._wake()
        return future

    def send(self, message: Message | str, body: Any = None, frames: Sequence[Buffer] = ()) -> Future[Message]:
        """`call` without a deadline: delivered exactly once, or the future says why not. The answer may be ignored."""
        return self.call(message, body, frames)

    def flush(self, deadline_s: float) -> None:
        """Waits until everything sent so far was answered. Raises `DeadlineError` that says how many messages were
        not.
        """
        end = time.monotonic() + deadline_s
        with self._lock:
            while self._waiters and self._failure is None and not self._closing:
                left = end - time.monotonic()
                if left <= 0:
                    kinds = sorted({message.kind for _, message, _ in self._waiters.values()})
                    count = f"{len(self._waiters)} messages ({', '.join(kinds)})"
                    raise DeadlineError(f"{count} not acknowledged by {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_unusable()

    @property
    def pending(self) -> int:
        """Messages that wait for an answer."""
        with self._lock:
            return len(self._waiters)

    @property
    def lost(self) -> Error | None:
        """Why the broker is lost, `None` while it is not."""
        return self._failure

    def close(self) -> None:
        """Says goodbye and ends the I/O thread; every waiter gets `ClosedError`. Call `flush` first to wait for
        answers.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_if_unusable(self) -> None:
        if self._closing:
            raise ClosedError(f"client of {self.endpoint} is closed")
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write >= 0 and not self._woken:
                self._woken = True
                with suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")

    def _given_up(self, seq: int, future: Future[Message]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            if self._waiters.pop(seq, None) is None:
                return
            self._link.settle(seq)
            self._lock.notify_all()
        with suppress(Error):
            self._post(CancelCall(seq))
            self._wake()

    # -- the I/O thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._watch.socket, zmq.POLLIN)
        try:
            heard = beaten = time.monotonic()
            while not self._closing and self._failure is None:
                poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
                events = dict(poller.poll(self._timeout_ms(heard, beaten)))
                if self._wake_read in events:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._woken = False  # after the read: who comes between has left its message where it is found
                if self._watch.socket in events:
                    self._watch.read()
                    if self._watch.fatal is not None:
                        self._fail(self._watch.fatal)
                if self._receive():
                    heard = time.monotonic()
                now = time.monotonic()
                with self._lock:
                    joined = self._joined
                    self._quiet = joined and now - heard > 2 * self._heartbeat_s
                    if not self._quiet:
                        self._outbox.extend(self._link.due(now))
                if not joined:
                    heard = now
                elif now - heard > self._patience_s:
                    self._fail(TransportError(f"{self.endpoint}: broker silent for {now - heard:.1f} s{self._why()}"))
                elif now - beaten >= self._heartbeat_s:
                    beaten = now
                    self._beat()
                self._expire(now)
                self._transmit()
        except Exception as error:  # a bug here must reach the waiters
            log.exception("client thread failed")
            self._fail(TransportError(f"{self.endpoint}: client thread failed: {error!r}"))
        finally:
            self._end()

    def _timeout_ms(self, heard: float, beaten: float) -> int | None:
        with self._lock:
            due = None if self._quiet else self._link.next_due()
            times = [t for t in (due, self._deadlines[0][0] if self._deadlines else None) if t is not None]
            if self._joined:
                times += [beaten + self._heartbeat_s, heard + self._patience_s]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _transmit(self) -> None:
        while self._outbox and self._greeting is None:
            try:
                send(self._socket, self._outbox[0])
            except zmq.Again:
                return
            self._outbox.popleft()

    def _post(self, message: Message, re: int = 0) -> None:
        with self._lock:
            low = self._link.low
        self._outbox.append(encode(message, self._max_message_bytes, re=re, low=low))

    def _receive(self) -> bool:
        got = False
        for _ in range(256):
            try:
                parts = receive(self._socket, 1 << 16)
            except zmq.Again:
                break
            got = True
            try:
                received = decode([part.buffer for part in parts], self._max_message_bytes)
                message = received.message()
            except WireError as error:
                log.warning("%s: bad message from the broker: %s", self.endpoint, error)
                continue
            header = received.header
            if isinstance(message, Refusal) and message.unknown and self._comes_back and self._joined:
                self._greet_again()
            elif header.re:
                if isinstance(message, Ack) and message.more:
                    self._acknowledged((header.re, *message.more))
                else:
                    self._answer(header.re, message)
            elif isinstance(message, Refusal):
                self._fail(_as_error(message))
            elif not isinstance(message, Pong):
                self._push(header, message)
        return got

    def _greeting_body(self) -> Hello:
        hello = msgspec.structs.replace(self._hello, nonce=secrets.token_hex(8))
        return hello if self._on_greet is None else self._on_greet(hello)

    def _greet_again(self) -> None:
        """The broker does not know this peer (any more)."""
        if self._greeting is not None:
            return
        with self._lock:
            seq, low = self._link.number(), self._link.low
        wire = encode(self._greeting_body(), self._max_message_bytes, seq=seq, low=low)
        self._greeting = (seq, wire)
        self._beat()

    def _beat(self) -> None:
        if self._greeting is None:
            self._post(Ping())
            return
        with suppress(zmq.Again):
            send(self._socket, self._greeting[1])

    def _welcomed(self, seq: int, welcome: Welcome) -> None:
        """Greeted again: what is unanswered is sent once more, in order."""
        with self._lock:
            self._greeting = None
            self._link.settle(seq)
            over = [seq for seq, (_, message, _) in self._waiters.items() if isinstance(message, self._transient)]
            waiters = [self._waiters.pop(seq) for seq in over]
            self._link.drop(over)
            self._outbox.clear()
            self._outbox.extend(self._link.again(time.monotonic()))
            self._lock.notify_all()
        for future, _, _ in waiters:
            _complete(future, Ack())
        log.info("%s: joined again", self.endpoint)
        if self._on_rejoin is not None:
            self._on_rejoin(welcome)

    def _acknowledged(self, seqs: tuple[int, ...]) -> None:
        """Many plain acknowledgements at once."""
        if self._greeting is not None:
            return  # of a conversation that is over
        done = []
        with self._lock:
            for seq in seqs:
                if self._link.settle(seq) and (waiter := self._waiters.pop(seq, None)):
                    done.append(waiter[0])
            self._lock.notify_all()
        for future in done:
            _complete(future, Ack())

    def _answer(self, seq: int, message: Message) -> None:
        if self._greeting is not None and seq == self._greeting[0]:
            if isinstance(message, Refusal):
                self._fail(_as_error(message))
            elif isinstance(message, Welcome):
                self._welcomed(seq, message)
            return
        with self._lock:
            self._link.settle(seq)
            waiter = self._waiters.pop(seq, None)
            self._lock.notify_all()
        if waiter is None:
            return  # given up before, or a second answer
        if not isinstance(message, Refusal):
            _complete(waiter[0], message)
            return
        error = _as_error(message)
        _complete(waiter[0], error)
        if message.gone:
            self._fail(error)

    def _push(self, header: Header, message: Message) -> None:
        if self._greeting is not None:
            return  # of a conversation that is over
        with self._lock:
            fresh = self._link.fresh(header.seq, header.low)
        if fresh and self._on_push is not None:
            try:
                self._on_push(message)
            except Exception:
                log.exception("on_push failed on %r", message.kind)
        if header.seq:
            self._post(Ack(), re=header.seq)

    def _expire(self, now: float) -> None:
        while True:
            with self._lock:
                if not self._deadlines or self._deadlines[0][0] > now:
                    return
                _, seq = heapq.heappop(self._deadlines)
                waiter = self._waiters.pop(seq, None)
                if waiter is None:
                    continue
                self._link.settle(seq)
                self._lock.notify_all()
            future, message, deadline_s = waiter
            self._post(CancelCall(seq))
            text = f"{message.kind}: no answer from {self.endpoint} within {deadline_s:g} s{self._why()}"
            _complete(future, DeadlineError(text))

    def _why(self) -> str:
        return f": {self._watch.trouble}" if self._watch.trouble else ""

    def _fail(self, error: Error) -> None:
        with self._lock:
            if self._failure is not None or self._closing:
                return
            self._failure = error
            self._lock.notify_all()
        self._drain(error)
        if self._on_lost is not None:
            try:
                self._on_lost(error)
            except Exception:
                log.exception("on_lost failed")

    def _drain(self, error: Error) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, {}
            self._deadlines.clear()
            self._lock.notify_all()
        for future, _, _ in waiters.values():
            _complete(future, error)

    def _end(self) -> None:
        with suppress(zmq.ZMQError):
            self._outbox.clear()
            self._post(Bye())
            self._transmit()
        self._drain(self._failure or ClosedError(f"client of {self.endpoint} was closed"))
        with suppress(zmq.ZMQError):
            self._watch.close()
        self._context.destroy(linger=200)
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1


def _complete(future: Future[Message], result: Message | Error) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Message):
        future.set_result(result)
    else:
        future.set_exception(result)


def _as_error(refusal: Refusal) -> Error:
    kind = getattr(errors, refusal.error, TransportError)
    usable = isinstance(kind, type) and issubclass(kind, Error) and kind is not errors.EnvironmentFailure
    return (kind if usable else TransportError)(refusal.text[:4096])
