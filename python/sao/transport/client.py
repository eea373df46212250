"""The peer's end of the connection to the broker.

One I/O thread owns the socket; any number of threads may call. A call has a deadline of its own that leaves the client
usable. Whenever the connection was made anew the client greets, and what is unanswered is sent again; a broker that
falls silent for too long fails every waiter with a reason.
"""

from __future__ import annotations

import heapq
import logging
import math
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
from sao.transport.keys import Keys
from sao.transport.link import Link, Sent
from sao.transport.messages import Ack, Buffer, Bye, CancelCall, Hello, Message, Ping, Pong, Refusal, Welcome
from sao.transport.sockets import Limits, connect, make_dealer, receive, send
from sao.transport.watch import Watch

log = logging.getLogger(__name__)


class State(Enum):
    """Where a client is: `connect` is yet to be called, its greeting is unanswered, it is joined, it is over."""

    NEW, GREETING, JOINED, ENDED = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The callbacks of a client, called in its I/O thread. All must return at once: hand over, do not work."""

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
        keys: Keys | None = None,
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
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
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
        with self._lock:
            while not (self._link.open or self._end):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineError(f"{message.kind}: no room to send to {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_ended()
            seq, sent = self._link.send(message, self._limits.max_message_bytes, deadline_s)
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, seq))
            if self._state is State.JOINED:
                self._outbox.append(sent.wire)
        sent.answer.add_done_callback(partial(self._given_up, seq))
        self._wake()
        return sent.answer

    def flush(self, deadline_s: float) -> None:
        """Waits until everything sent so far was answered. Raises `DeadlineError` that says how many were not."""
        end = time.monotonic() + deadline_s
        with self._lock:
            while (unanswered := self._link.sent) and self._end is None:
                left = end - time.monotonic()
                if left <= 0:
                    kinds = sorted({sent.message.kind for sent in unanswered.values()})
                    count = f"{len(unanswered)} messages ({', '.join(kinds)})"
                    raise DeadlineError(f"{count} not acknowledged by {self.endpoint} within {deadline_s:g} s")
                self._lock.wait(left)
            self._raise_if_ended()

    @property
    def pending(self) -> int:
        """Messages that wait for an answer."""
        with self._lock:
            return len(self._link.sent)

    @property
    def lost(self) -> Error | None:
        """Why the broker is lost, `None` while it is not."""
        return None if isinstance(self._end, ClosedError) else self._end

    def close(self) -> None:
        """Takes leave and ends the I/O thread; every waiter gets `ClosedError`. To wait for answers `flush` first."""
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
            if self._state is not State.ENDED:
                os.eventfd_write(self._bell, 1)

    def _settle(self, *seqs: int) -> list[Sent]:
        """Nobody waits for these any more; those that somebody has waited for."""
        with self._lock:
            self._lock.notify_all()
            return [sent for seq in seqs if (sent := self._link.settle(seq)) is not None]

    def _given_up(self, seq: int, answer: Future[Message]) -> None:
        if answer.cancelled() and self._settle(seq):
            self._post(CancelCall(seq))
            self._wake()

    # -- the I/O thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._watch.socket, zmq.POLLIN)
        try:
            now = received_at = beaten = time.monotonic()
            while self._end is None:
                sends = self._outbox and self._watch.connected
                poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if sends else 0))
                with self._lock:
                    due = min(beaten + self._limits.heartbeat_s, self._deadlines[0][0] if self._deadlines else math.inf)
                events = dict(poller.poll(max(0, int((due - now) * 1000) + 1)))
                if self._bell in events:
                    os.eventfd_read(self._bell)
                if self._watch.socket in events:
                    self._connection_changed()
                received, now = self._receive(), time.monotonic()
                if received or not self._conversation:
                    received_at = now
                if now - beaten >= self._limits.heartbeat_s:
                    beaten = now
                    if now - received_at > self._patience_s:
                        text = f"{self.endpoint}: broker silent for {now - received_at:.1f} s{self._why()}"
                        self._finish(TransportError(text))
                    elif self._conversation and not self._outbox:
                        self._post(Ping())
                self._expire(now)
                self._transmit()
        except Exception as error:  # a bug here must reach the waiters
            log.exception("client thread failed")
            self._finish(TransportError(f"{self.endpoint}: client thread failed: {error!r}"))
        finally:
            self._leave()

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
        over: list[Sent] = []
        with self._lock:
            self._state, self._conversation = State.JOINED, welcome.conversation
            if anew:
                self._link.restart()
                transient = self._calls.transient
                over = self._settle(*(n for n, sent in self._link.sent.items() if isinstance(sent.message, transient)))
            self._outbox.clear()
            self._outbox.extend(self._link.unanswered())
        for sent in over:
            _complete(sent, Ack())
        if first:
            self._welcome.set_result(welcome)
        elif anew:
            log.info("%s: joined again", self.endpoint)
            self._calls.rejoined(welcome)

    def _answered(self, seqs: Sequence[int], message: Message) -> None:
        """The answer to a message, or the acknowledgement of many."""
        result = _as_error(message) if isinstance(message, Refusal) else message
        for sent in self._settle(*seqs):
            _complete(sent, result)
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
            for sent in self._settle(seq):
                self._post(CancelCall(seq))
                what = f"{sent.message.kind}: no answer from {self.endpoint} within {sent.deadline_s:g} s"
                _complete(sent, DeadlineError(f"{what}{self._why()}"))

    def _why(self) -> str:
        return f": {self._watch.trouble}" if self._watch.trouble else ""

    def _finish(self, error: Error) -> None:
        """Ends the client; the first reason counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            unanswered = self._settle(*self._link.sent)
        for sent in unanswered:
            _complete(sent, error)
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
            os.close(self._bell)
        with suppress(zmq.ZMQError):
            self._watch.close()
        self._context.destroy(linger=200)


def _complete(sent: Sent, result: Message | Error) -> None:
    if not sent.answer.set_running_or_notify_cancel():
        return
    if isinstance(result, Message):
        sent.answer.set_result(result)
    else:
        sent.answer.set_exception(result)


def _as_error(refusal: Refusal) -> Error:
    kind = getattr(errors, refusal.error, TransportError)
    usable = isinstance(kind, type) and issubclass(kind, Error) and kind is not errors.EnvironmentFailure
    return (kind if usable else TransportError)(refusal.text[:4096])
