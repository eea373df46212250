"""An actor: a mailbox (ROUTER), a handler per kind of message, timers, and a deadline on every wait.

Single-threaded. The loop sleeps in the poller until a message, a signal or the next timer; it never polls and never
blocks on a peer. Delivery is at least once on the wire and exactly once for handlers (see `link`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from sao.errors import Error, TransportError, WireError
from sao.transport.link import Link
from sao.transport.messages import Buffer, Message, check, decode, encode
from sao.transport.sockets import bind_router

log = logging.getLogger(__name__)
MAX_FRAMES: Final = 8


@dataclass(eq=False, slots=True)
class Peer:
    """One joined peer. `role`, `name` and `incarnation` are what its greeting said; `state` belongs to the actor's
    owner.
    """

    identity: bytes
    role: str
    name: str
    incarnation: int
    hello: dict[str, Any]
    link: Link
    heard: float
    unreachable_since: float | None = None
    gone: bool = False
    state: Any = None


@dataclass(frozen=True, slots=True)
class Request:
    """A message of a joined peer, as a handler sees it."""

    peer: Peer
    message: Message

    @property
    def body(self) -> dict[str, Any]:
        """The message's body."""
        return self.message.body


@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler answers; `LATER` when the answer comes by `Actor.reply` in its own time."""

    kind: str = "ack"
    body: dict[str, Any] = field(default_factory=dict)
    frames: tuple[Buffer, ...] = ()


LATER: Final = Reply("later")
Handler = Callable[[Request], Reply | None]


class Actor:
    """The listening end. `on_join(peer)` returns the body of `welcome` or raises to refuse; `on_leave(peer, reason)`
    is called once when a joined peer says goodbye, is fenced by a newer incarnation, is unreachable or silent for
    `peer_timeout_s`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_join: Callable[[Peer], dict[str, Any]],
        on_leave: Callable[[Peer, str], None],
        max_message_bytes: int = 1 << 28,
        heartbeat_s: float = 1.0,
        peer_timeout_s: float = 15.0,
    ) -> None:
        self._on_join, self._on_leave = on_join, on_leave
        self._max_message_bytes, self._heartbeat_s, self._peer_timeout_s = (
            max_message_bytes,
            heartbeat_s,
            peer_timeout_s,
        )
        self._handlers: dict[str, tuple[Handler, frozenset[str]]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.peers: dict[bytes, Peer] = {}
        self.bad_messages = 0
        self._stopped = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._router, self.endpoint = bind_router(self._context, endpoint, max_message_bytes)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def on(self, kind: str, handler: Handler, *roles: str) -> None:
        """Registers the handler of a kind; `roles` are the peers that may send it (none given: all)."""
        self._handlers[kind] = (handler, frozenset(roles))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls `callback` once in the loop, `delay_s` seconds from now."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in the loop every `period_s` seconds."""

        def again() -> None:
            self.after(period_s, again)
            callback()

        self.after(period_s, again)

    def push(self, peer: Peer, kind: str, body: dict[str, Any], frames: Sequence[Buffer] = ()) -> None:
        """Sends on the actor's own account; resent until the peer acknowledges it or is gone (then `on_leave` is
        called).
        """
        if peer.gone:
            return
        if not peer.link.open:
            self.drop(peer, "does not acknowledge what it is sent")
            return
        seq = peer.link.number()
        wire = encode(Message(kind, body, tuple(frames), seq=seq, low=peer.link.low), self._max_message_bytes)
        peer.link.sent(seq, wire, time.monotonic())
        self._transmit(peer, wire)

    def reply(self, request: Request, reply: Reply) -> None:
        """Answers a request now or later; without effect when the peer is gone."""
        peer, seq = request.peer, request.message.seq
        if peer.gone or seq == 0:
            return
        try:
            wire = encode(Message(reply.kind, reply.body, reply.frames, re=seq), self._max_message_bytes)
        except WireError as error:
            wire = encode(Message("error", {"error": "WireError", "text": str(error)}, re=seq), self._max_message_bytes)
        peer.link.answered(seq, wire)
        self._transmit(peer, wire)

    def drop(self, peer: Peer, reason: str) -> None:
        """Forgets a peer. What it says from now on is answered with an error that makes it leave."""
        if self.peers.get(peer.identity) is peer:
            del self.peers[peer.identity]
        if not peer.gone:
            peer.gone = True
            self._on_leave(peer, reason)

    def stop(self) -> None:
        """Ends `run` after the message in hand. May be called from a signal handler or another thread."""
        self._stopped = True
        with suppress(OSError):
            os.write(self._wake_write, b"x")

    def run(self) -> None:
        """Serves until `stop`. Exceptions of `sao` in handlers are answered; any other one ends the loop."""
        self.every(self._heartbeat_s, self._check_peers)
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._stopped:
            poller.poll(max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1))
            for _ in range(256):
                try:
                    parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._receive(parts[0].bytes, [part.buffer for part in parts[1:]])
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now and not self._stopped:
                heapq.heappop(self._timers)[2]()

    def close(self, linger_s: float = 1.0) -> None:
        """Closes the socket after giving queued messages `linger_s` seconds to leave."""
        self._context.destroy(linger=int(linger_s * 1000))
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- inside the loop

    def _receive(self, identity: bytes, frames: list[Buffer]) -> None:
        try:
            message = decode(frames, self._max_message_bytes, max_frames=MAX_FRAMES)
        except WireError as error:
            self.bad_messages += 1
            log.warning("bad message from %r: %s", identity[:64], error)
            return
        peer = self.peers.get(identity)
        try:
            check(message)
            if message.kind == "hello":
                peer = self._join(identity, message)
                if peer is None:
                    return
            elif peer is None:
                if message.kind != "bye" and not message.re:
                    self._refuse(identity, message, "this peer has not joined, or was given up; join again", gone=True)
                return
        except WireError as error:
            self.bad_messages += 1
            self._refuse(identity, message, str(error), error="WireError")
            return
        peer.heard, peer.unreachable_since = time.monotonic(), None
        if message.re:
            peer.link.settle(message.re)
        elif not peer.link.fresh(message):
            kept = peer.link.answer(message.seq)
            if kept is not None:
                self._transmit(peer, kept)
        else:
            self._dispatch(Request(peer, message))

    def _dispatch(self, request: Request) -> None:
        peer, kind = request.peer, request.message.kind
        if kind == "ping":
            self._transmit(peer, encode(Message("pong"), self._max_message_bytes))
        elif kind == "bye":
            self.drop(peer, "said goodbye")
        elif kind != "hello":
            handler, roles = self._handlers.get(kind, (None, frozenset[str]()))
            try:
                if handler is None or (roles and peer.role not in roles):
                    raise WireError(f"{kind!r} is not accepted from a {peer.role}")
                answer = handler(request) or Reply()
            except Error as error:
                log.warning("%s from %s: %s: %s", kind, peer.name, type(error).__name__, error)
                answer = Reply("error", {"error": type(error).__name__, "text": str(error)})
            if answer is not LATER:
                self.reply(request, answer)

    def _join(self, identity: bytes, message: Message) -> Peer | None:
        """The peer of a greeting: a known one when the greeting is a repeat, else a new one that fences older ones."""
        hello = message.body
        known = self.peers.get(identity)
        if known is not None and known.hello["nonce"] == hello["nonce"]:
            return known
        role, name, incarnation = hello["role"], hello["name"], hello["incarnation"]
        for other in [p for p in self.peers.values() if (p.role, p.name) == (role, name)]:
            if other.incarnation > incarnation:
                text = f"{role} {name} incarnation {incarnation} is fenced: incarnation {other.incarnation} has joined"
                self._refuse(identity, message, text, gone=True)
                return None
            if other.identity != identity:
                self._refuse(other.identity, Message("hello"), f"fenced by incarnation {incarnation}", gone=True)
            self.drop(other, f"fenced by incarnation {incarnation}")
        peer = Peer(identity, role, name, incarnation, hello, Link(max(self._heartbeat_s, 0.2)), time.monotonic())
        self.peers[identity] = peer
        peer.link.fresh(message)
        request = Request(peer, message)
        try:
            self.reply(request, Reply("welcome", self._on_join(peer)))
        except Error as error:
            del self.peers[identity]
            self._refuse(identity, message, str(error), error=type(error).__name__, gone=True)
            return None
        return peer

    def _refuse(self, identity: bytes, message: Message, text: str, **more: Any) -> None:
        wire = encode(Message("error", {"text": text, **more}, re=message.seq), self._max_message_bytes)
        try:
            self._router.send_multipart([identity, *wire], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("refusal not delivered to %r: %s", identity[:64], error)

    def _transmit(self, peer: Peer, wire: list[Buffer]) -> None:
        try:
            self._router.send_multipart([peer.identity, *wire], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            log.warning("%s: queue is full, resent later", peer.name)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise TransportError(f"{peer.name}: {error.strerror}") from error
            if peer.unreachable_since is None:
                peer.unreachable_since = time.monotonic()

    def _check_peers(self) -> None:
        now = time.monotonic()
        for peer in list(self.peers.values()):
            if (
                now - peer.heard > 1.5 * self._heartbeat_s
            ):  # silent: an unreachable one shows itself when it is addressed
                self._transmit(peer, encode(Message("pong"), self._max_message_bytes))
            for wire in peer.link.due(now):
                self._transmit(peer, wire)
            if now - peer.heard > self._peer_timeout_s:
                self.drop(peer, f"silent for {now - peer.heard:.1f} s")
            elif peer.unreachable_since is not None and now - peer.unreachable_since > 2 * self._heartbeat_s:
                self.drop(peer, f"unreachable for {now - peer.unreachable_since:.1f} s")
