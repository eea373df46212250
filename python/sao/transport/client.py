"""The peer's end of the connection to the broker.

One I/O thread owns the socket; any number of threads may call. A call has a deadline of its own that leaves the client
usable. Whenever the connection was made anew the client greets, and what is unanswered is sent again; a broker that
falls silent for too long fails every waiter with a reason.
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
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import zmq
from msgspec import structs

from sao import errors
from sao.errors import ClosedError, DeadlineError, Error, TransportError, WireError
from sao.transport.encoding import Header, decode, encode
from sao.transport.keys import ClientKeys
from sao.transport.link import Link
from sao.transport.messages import Ack, Buffer, Bye, CancelCall, Hello, Message, Ping, Pong, Refusal, Welcome
from sao.transport.sockets import Limits, connect, make_dealer, receive, send
from sao.transport.watch import Watch

log = logging.getLogger(__name__)


class State(Enum):
    """Where a client is: `connect` is yet to be called, its greeting is unanswered, it is joined, it is over."""

    NEW, GREETING, JOINED, ENDED = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """What a client calls in its I/O thread. All must return at once: hand over, do not work."""

    pushed: Callable[[Message], Any] = lambda message: None
    """Everything that the broker sends on its own (tasks, weights, stop, ...), each exactly once."""
    lost: Callable[[Error], Any] = lambda error: None
    """Once, when the broker is silent for too long, has forgotten this peer or refuses its keys."""
    greet: Callable[[Hello], Hello] = lambda hello: hello
    """Completes a greeting with where this peer stands at the moment."""
    rejoined: Callable[[Welcome], Any] = lambda welcome: None
    """Before the first push of a new conversation: the broker was started again, or had given this peer up."""
    transient: tuple[type[Message], ...] = ()
    """Kinds of messages that mean nothing in a new conversation."""


class Client:
    """A DEALER with the identity `role:name:incarnation`. Make it after a fork, not before.

    With `limits.outage_s` the broker may be away for so long: one that was started again, or has given this peer up, is
    joined again and gets all that is unanswered, except for what is transient.

    >>> client = Client(endpoint, role="generator", name="g0", calls=Callbacks(pushed=print))
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
        limits: Limits = Limits(),  # noqa: B008 - frozen
        keys: ClientKeys | None = None,
        calls: Callbacks = Callbacks(),
    ) -> None:
        self.endpoint = endpoint
        self._limits, self._calls = limits, calls
        self._patience_s = max(limits.outage_s, limits.peer_timeout_s)
        self._pid = os.getpid()
        self._lock = threading.Condition()
        self._state, self._end = State.NEW, None  # type: State, Error | None
        self._hello = Hello(role, name, incarnation, secrets.token_hex(8))
        self._welcome: Future[Welcome] = Future()
        self._conversation = 0  # 0: never joined
        self._link = Link()
        self._outbox: deque[list[Buffer]] = deque()  # of this connection; empty until the greeting is answered
        self._waiters: dict[int, tuple[Future[Message], Message, float | None]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            identity = f"{role}:{name}:{incarnation}".encode()
            self._socket = make_dealer(self._context, endpoint, identity, limits, keys)
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
        with self._lock:
            self._raise_if_ended()
            self._hello = structs.replace(self._hello, **hello)
            self._greet()
        self._wake()
        try:
            return self._welcome.result(deadline_s)
        except DeadlineError:
            raise
        except TimeoutError:
            text = f"hello: no answer from {self.endpoint} within {deadline_s:g} s{self._why()}"
            raise DeadlineError(text) from None

    def call(self, message: Message, deadline_s: float | None = None) -> Future[Message]:
        """Sends a message, exactly once, and returns the future of its answer.

        The future raises `DeadlineError` after `deadline_s` (the broker gets a `CancelCall`, no one its answer),
        `TransportError` when the broker is lost, `ClosedError` at `close()`, and the error that the broker names.
        `call` itself raises `WireError` for an oversized message, and waits while the window of 4096 unanswered
        messages is full. The message's frames must not be changed before the answer.
        """
        if os.getpid() != self._pid:
            text = f"client was made in process {self._pid} and is used in {os.getpid()}: make a new one after fork"
            raise TransportError(text)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        future: Future[Message] = Future()
        with self._lock:
            while not (self._link.open or self._end):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineError(f"{message.kind}: no room to send to {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_ended()
            seq = self._link.number()
            try:
                wire = encode(message, self._limits.max_message_bytes, seq=seq, low=self._link.low)
            except WireError:
                self._link.settle(seq)
                raise
            self._link.sent(seq, wire)
            self._waiters[seq] = (future, message, deadline_s)
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, seq))
            if self._state is State.JOINED:
                self._outbox.append(wire)
        future.add_done_callback(partial(self._given_up, seq))
        self._wake()
        return future

    def flush(self, deadline_s: float) -> None:
        """Waits until everything sent so far was answered. Raises `DeadlineError` that says how many messages were
        not.
        """
        end = time.monotonic() + deadline_s
        with self._lock:
            while self._waiters and self._end is None:
                left = end - time.monotonic()
                if left <= 0:
                    kinds = sorted({message.kind for _, message, _ in self._waiters.values()})
                    count = f"{len(self._waiters)} messages ({', '.join(kinds)})"
                    raise DeadlineError(f"{count} not acknowledged by {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_ended()

    @property
    def pending(self) -> int:
        """Messages that wait for an answer."""
        with self._lock:
            return len(self._waiters)

    @property
    def lost(self) -> Error | None:
        """Why the broker is lost, `None` while it is not."""
        return None if isinstance(self._end, ClosedError) else self._end

    def close(self) -> None:
        """Takes leave and ends the I/O thread; every waiter gets `ClosedError`. Call `flush` first to wait for
        answers.
        """
        if os.getpid() != self._pid:
            return
        self._finish(ClosedError(f"client of {self.endpoint} is closed"))
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_if_ended(self) -> None:
        if self._end is not None:
            raise self._end

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write >= 0 and not self._woken:
                self._woken = True
                with suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")

    def _given_up(self, seq: int, future: Future[Message]) -> None:
        if future.cancelled() and self._take_waiter(seq) is not None:
            self._post(CancelCall(seq))
            self._wake()

    # -- the I/O thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._watch.socket, zmq.POLLIN)
        try:
            received_at = beaten = time.monotonic()
            while self._end is None:
                sends = self._outbox and self._watch.connected
                poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if sends else 0))
                events = dict(poller.poll(self._timeout_ms(received_at, beaten)))
                if self._wake_read in events:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._woken = False  # after the read: who comes between has left its message where it is found
                if self._watch.socket in events:
                    self._connection_changed()
                if self._receive():
                    received_at = time.monotonic()
                now = time.monotonic()
                if not self._conversation:
                    received_at = now
                elif now - received_at > self._patience_s:
                    self._finish(
                        TransportError(f"{self.endpoint}: broker silent for {now - received_at:.1f} s{self._why()}")
                    )
                elif now - beaten >= self._limits.heartbeat_s:
                    beaten = now
                    if not self._outbox:
                        self._post(Ping())
                self._expire(now)
                self._transmit()
        except Exception as error:  # a bug here must reach the waiters
            log.exception("client thread failed")
            self._finish(TransportError(f"{self.endpoint}: client thread failed: {error!r}"))
        finally:
            self._leave()

    def _timeout_ms(self, received_at: float, beaten: float) -> int | None:
        with self._lock:
            times = [self._deadlines[0][0]] if self._deadlines else []
        if self._conversation:
            times += [beaten + self._limits.heartbeat_s, received_at + self._patience_s]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _connection_changed(self) -> None:
        made = self._watch.read()
        if self._watch.fatal is not None:
            self._finish(self._watch.fatal)
        elif made and self._state in (State.GREETING, State.JOINED):
            self._greet()

    def _greet(self) -> None:
        """Begins a connection, or a conversation: until this is answered nothing else is sent."""
        hello = self._calls.greet(self._hello)
        with self._lock:
            self._state = State.GREETING
            self._outbox.clear()
            self._outbox.append(encode(hello, self._limits.max_message_bytes))

    def _transmit(self) -> None:
        while self._outbox and self._watch.connected:
            try:
                send(self._socket, self._outbox[0])
            except zmq.Again:
                return
            self._outbox.popleft()

    def _post(self, message: Message, re: int = 0) -> None:
        """Sends what needs no answer; what is lost with a connection is not missed."""
        with self._lock:
            if self._state is State.JOINED:
                self._outbox.append(encode(message, self._limits.max_message_bytes, re=re, low=self._link.low))

    def _receive(self) -> bool:
        got = False
        for _ in range(256):
            try:
                parts = receive(self._socket, 1 << 16)
            except zmq.Again:
                break
            got = True
            try:
                received = decode([part.buffer for part in parts], self._limits.max_message_bytes)
                message = received.message()
            except WireError as error:
                log.warning("%s: bad message from the broker: %s", self.endpoint, error)
                continue
            self._dispatch(received.header, message)
        return got

    def _dispatch(self, header: Header, message: Message) -> None:
        unknown = isinstance(message, Refusal) and message.unknown and self._limits.outage_s > 0
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Refusal) and not header.re and not unknown:
            self._finish(_as_error(message))
        elif self._state is not State.JOINED:
            return  # of the connection or conversation before: it comes again if it counts
        elif unknown:
            self._greet()
        elif isinstance(message, Ack):
            self._answered((header.re, *message.more), message)
        elif header.re:
            self._answered((header.re,), message)
        elif not isinstance(message, Pong):
            self._pushed(header, message)

    def _welcomed(self, welcome: Welcome) -> None:
        """The broker knows this peer, still or again: what is unanswered is sent once more, in order."""
        first, anew = not self._conversation, self._conversation != welcome.conversation
        waiters: list[Future[Message]] = []
        with self._lock:
            self._state, self._conversation = State.JOINED, welcome.conversation
            if anew:
                self._link.restart()
                transient = self._calls.transient
                over = [seq for seq, (_, message, _) in self._waiters.items() if isinstance(message, transient)]
                waiters = [self._waiters.pop(seq)[0] for seq in over if self._link.settle(seq)]
            self._outbox.clear()
            self._outbox.extend(self._link.unanswered())
            self._lock.notify_all()
        for future in waiters:
            _complete(future, Ack())
        if first:
            self._welcome.set_result(welcome)
        elif anew:
            log.info("%s: joined again", self.endpoint)
            self._calls.rejoined(welcome)

    def _answered(self, seqs: Sequence[int], message: Message) -> None:
        """The answer to a message, or the acknowledgement of many."""
        with self._lock:
            done = [self._waiters.pop(seq, None) for seq in seqs if self._link.settle(seq)]
            self._lock.notify_all()
        result = _as_error(message) if isinstance(message, Refusal) else message
        for waiter in done:
            if waiter is not None:  # else it was given up
                _complete(waiter[0], result)
        if isinstance(message, Refusal) and message.gone:
            self._finish(_as_error(message))

    def _pushed(self, header: Header, message: Message) -> None:
        with self._lock:
            fresh = self._link.fresh(header.seq, header.low)
        if fresh:
            self._call(self._calls.pushed, message)
        if header.seq:
            self._post(Ack(), re=header.seq)

    def _expire(self, now: float) -> None:
        while True:
            with self._lock:
                if not self._deadlines or self._deadlines[0][0] > now:
                    return
                _, seq = heapq.heappop(self._deadlines)
            waiter = self._take_waiter(seq)
            if waiter is not None:
                future, message, deadline_s = waiter
                self._post(CancelCall(seq))
                text = f"{message.kind}: no answer from {self.endpoint} within {deadline_s:g} s{self._why()}"
                _complete(future, DeadlineError(text))

    def _take_waiter(self, seq: int) -> tuple[Future[Message], Message, float | None] | None:
        """Nobody waits for this any more."""
        with self._lock:
            self._link.settle(seq)
            self._lock.notify_all()
            return self._waiters.pop(seq, None)

    def _why(self) -> str:
        return f": {self._watch.trouble}" if self._watch.trouble else ""

    def _finish(self, error: Error) -> None:
        """Ends the client; the first reason counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            waiters, self._waiters = [future for future, _, _ in self._waiters.values()], {}
            self._lock.notify_all()
        for future in waiters:
            _complete(future, error)
        if not self._welcome.done():
            self._welcome.set_exception(error)
        if not isinstance(error, ClosedError):
            self._call(self._calls.lost, error)

    def _call(self, callback: Callable[[Any], Any], argument: Any) -> None:
        """A callback that fails does not end the client."""
        try:
            callback(argument)
        except Exception:
            log.exception("a callback failed on %r", argument)

    def _leave(self) -> None:
        with suppress(zmq.ZMQError):
            self._outbox.clear()
            self._post(Bye())
            self._transmit()
        with self._lock:
            self._state = State.ENDED
        with suppress(zmq.ZMQError):
            self._watch.close()
        self._context.destroy(linger=200)
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1


def _complete(future: Future[Any], result: Message | Error) -> None:
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
