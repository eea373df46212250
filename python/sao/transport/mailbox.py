"""The listening socket and the peers behind it: joining, fencing, reliable sending, liveness."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import zmq
from msgspec import structs

from sao import _core
from sao.errors import Error, TransportError, WireError
from sao.transport.encoding import Header, decode, encode
from sao.transport.keys import Gate, Keys, may_join
from sao.transport.link import WINDOW, Link
from sao.transport.messages import Ack, Buffer, Bye, Hello, Message, Ping, Pong, Refusal, Welcome
from sao.transport.sockets import Limits, bind_router, check_endpoint, receive, send

log = logging.getLogger(__name__)
MAX_FRAMES: Final = 1 + 2 + _core.MAX_SIDECARS  # a message, and a trajectory with all the sidecars it may have
MAX_TEXT: Final = 4096  # characters of a refusal
GOODBYE: Final = "left in order"
UNKNOWN: Final = "this peer has not joined, or was silent for longer than transport.peer_timeout_s: join again"
M = TypeVar("M", bound=Message, covariant=True)
_PLAIN_ACK: Final = Ack()
_ACKNOWLEDGED: Final[list[Buffer]] = []  # stands for a plain acknowledgement among the answers that are kept


@dataclass(eq=False, slots=True)
class Peer:
    """One joined peer, its greeting and the books of the conversation with it."""

    identity: bytes
    hello: Hello
    key: str | None
    """Name of the key that it joined with; None where no keys are used."""
    last_received: float
    link: Link = field(default_factory=Link)
    conversation: int = field(default_factory=lambda: secrets.randbits(62))
    outbox: deque[list[Buffer]] = field(default_factory=deque)
    """Messages that leave at the end of the turn, or when the socket has room again, in order."""
    acks: list[int] = field(default_factory=list)
    """Plain acknowledgements of this turn; they leave as one message."""
    unreachable_since: float | None = None
    overrun: bool = False
    gone: bool = False

    @property
    def role(self) -> str:
        """Its role."""
        return self.hello.role

    @property
    def name(self) -> str:
        """Its name, unique in its role."""
        return self.hello.name

    @property
    def incarnation(self) -> int:
        """A later process of the same name has a higher one."""
        return self.hello.incarnation


@dataclass(frozen=True, slots=True)
class Request(Generic[M]):
    """A message of a joined peer, as a handler sees it."""

    peer: Peer
    message: M
    seq: int

    @property
    def key(self) -> tuple[bytes, int]:
        """Names this request among all others."""
        return self.peer.identity, self.seq


class NotYet(Exception):
    """Raised by `on_join`: the peer gets no answer, and will greet again on its next connection."""


class Mailbox:
    """`on_join(peer)` returns what a new peer is welcomed with, or raises to refuse it; `on_leave(peer, reason)` is
    called once when a joined peer leaves, is fenced by a newer incarnation, is unreachable, or is silent for
    `peer_timeout_s`. Nothing leaves before `flush`.
    """

    def __init__(
        self,
        endpoint: str,
        on_join: Callable[[Peer], Welcome],
        on_leave: Callable[[Peer, str], None],
        limits: Limits,
        keys: Keys | None = None,
    ) -> None:
        self._on_join, self._on_leave, self._limits = on_join, on_leave, limits
        self._to_send: dict[Peer, None] = {}  # peers with something in their outbox, in order
        self._beaten = time.monotonic()
        self.peers: dict[bytes, Peer] = {}
        self.bad_messages = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: Gate | None = None
        try:
            self._gate = None if keys is None else Gate(self._context, keys.folder)
            self.socket, self.endpoint = bind_router(self._context, endpoint, limits, keys)
        except BaseException:
            self._close(0)
            raise

    def receive(self, at_most: int) -> Iterator[Request[Any]]:
        """New requests of joined peers that have arrived. Never waits; joining, repeats and rubbish are dealt with
        here.
        """
        for _ in range(at_most):
            try:
                parts = receive(self.socket, 1 + MAX_FRAMES)
            except zmq.Again:
                return
            # With keys every connection has the name that the gate let in.
            key = None if self._gate is None else str(parts[-1].get("User-Id"))
            request = self._accept(parts[0].bytes, [part.buffer for part in parts[1:]], key)
            if request is not None:
                yield request

    def push(self, peer: Peer, message: Message) -> None:
        """Sends unasked. It arrives once, however often the connection breaks, or `on_leave` is called."""
        if peer.gone:
            return
        if peer.overrun or not peer.link.open:
            peer.overrun = True  # something is missing from now on: it is dropped at the next beat, not in mid-decision
            return
        _, sent = peer.link.send(message, self._limits.max_message_bytes)
        self._post(peer, sent.wire)

    def reply(self, key: tuple[bytes, int], answer: Message) -> None:
        """Answers the request of this key, now or later; without effect when its peer is gone."""
        peer, seq = self.peers.get(key[0]), key[1]
        if peer is None or seq == 0:
            return
        if answer == _PLAIN_ACK:
            peer.link.answered(seq, _ACKNOWLEDGED)
            self._acknowledge(peer, seq)
            return
        try:
            wire = encode(answer, self._limits.max_message_bytes, re=seq)
        except WireError as error:
            wire = encode(Refusal(str(error), "WireError"), self._limits.max_message_bytes, re=seq)
        peer.link.answered(seq, wire)
        self._post(peer, wire)

    def drop(self, peer: Peer, reason: str) -> None:
        """Forgets a peer. What it sends from now on is answered with an error that makes it leave or join again."""
        if self.peers.get(peer.identity) is peer:
            del self.peers[peer.identity]
        if not peer.gone:
            peer.gone = True
            self._on_leave(peer, reason)

    def flush(self) -> None:
        """Sends all that was decided, at the end of a turn."""
        peers, self._to_send = self._to_send, {}
        for peer in peers:
            if peer.acks:
                first, *more = peer.acks
                peer.acks = []
                peer.outbox.append(encode(Ack(more=tuple(more)), self._limits.max_message_bytes, re=first))
            while peer.outbox and not peer.gone and self._transmit(peer):
                peer.outbox.popleft()

    def discard(self) -> None:
        """Forgets all that was decided in this turn and is not sent yet."""
        for peer in self._to_send:
            peer.outbox.clear()
            peer.acks.clear()

    def beat(self) -> None:
        """Once a heartbeat: sends what had no room, drops who is gone."""
        now, limits = time.monotonic(), self._limits
        missed_s, self._beaten = now - self._beaten - limits.heartbeat_s, now
        if missed_s > limits.heartbeat_s:  # it is this process that has stood still: nothing could arrive meanwhile
            for peer in self.peers.values():
                peer.last_received = min(now, peer.last_received + missed_s)
                if peer.unreachable_since is not None:
                    peer.unreachable_since = min(now, peer.unreachable_since + missed_s)
        for peer in list(self.peers.values()):
            self._to_send[peer] = None
            if now - peer.last_received > 1.5 * limits.heartbeat_s and not peer.outbox:
                self._post(peer, encode(Pong(), limits.max_message_bytes))  # one that is gone shows itself
            if now - peer.last_received > limits.peer_timeout_s:
                self.drop(peer, f"silent for {now - peer.last_received:.1f} s")
            elif peer.overrun or len(peer.outbox) > 2 * WINDOW:
                self.drop(peer, "does not acknowledge what it is sent")
            elif peer.unreachable_since is not None and now - peer.unreachable_since > 2 * limits.heartbeat_s:
                self.drop(peer, f"unreachable for {now - peer.unreachable_since:.1f} s")

    def close(self, linger_s: float) -> None:
        """Closes the socket after giving queued messages `linger_s` seconds to leave, and removes its file."""
        self._close(int(linger_s * 1000))
        path = check_endpoint(self.endpoint)
        if path is not None:
            path.unlink(missing_ok=True)

    def _close(self, linger_ms: int) -> None:
        if self._gate is not None:
            self._gate.stop()
        self._context.destroy(linger=linger_ms)

    def _accept(self, identity: bytes, frames: list[Buffer], key: str | None) -> Request[Any] | None:
        try:
            received = decode(frames, self._limits.max_message_bytes, max_frames=MAX_FRAMES)
        except WireError as error:
            self.bad_messages += 1
            log.warning("bad message from %r: %s", identity[:64], error)
            return None
        header = received.header
        try:
            message = received.message()
        except WireError as error:
            self.bad_messages += 1
            self._refuse(identity, header, str(error), error="WireError")
            return None
        if isinstance(message, Hello):
            self._greeted(identity, header, message, key)
            return None
        peer = self.peers.get(identity)
        if peer is None or peer.key != key:  # if another key took this identity, it has not joined
            if not isinstance(message, Bye) and not header.re:
                self._refuse(identity, header, UNKNOWN, gone=True, unknown=True)
            return None
        peer.last_received, peer.unreachable_since = time.monotonic(), None
        if peer.outbox:
            self._to_send[peer] = None  # there may be room again
        if header.re:
            peer.link.settle(header.re)
        elif not peer.link.fresh(header.seq, header.low):
            kept = peer.link.answer(header.seq)
            if kept is _ACKNOWLEDGED:
                self._acknowledge(peer, header.seq)
            elif kept is not None:
                self._post(peer, kept)
        elif isinstance(message, Ping):
            if not peer.outbox:
                self._post(peer, encode(Pong(), self._limits.max_message_bytes))
        elif isinstance(message, Bye):
            self.drop(peer, GOODBYE)
        else:
            return Request(peer, message, header.seq)
        return None

    def _greeted(self, identity: bytes, header: Header, hello: Hello, key: str | None) -> None:
        """Welcomes a peer. A new one fences older incarnations of its name; with one that is known and has a new
        connection the conversation goes on.
        """
        role, name, incarnation = hello.role, hello.name, hello.incarnation
        if key is not None and not may_join(key, role, name):
            self._refuse(identity, header, f"the key {key!r} does not stand for the {role} {name!r}", gone=True)
            return
        if identity != f"{role}:{name}:{incarnation}".encode():
            self._refuse(identity, header, f"greeting of {role}:{name}:{incarnation} from another peer", gone=True)
            return
        known = self.peers.get(identity)
        if known is not None and known.hello.session == hello.session:
            known.key, known.last_received, known.unreachable_since = key, time.monotonic(), None
            known.outbox.clear()
            self._welcome(known, Welcome())
            for wire in known.link.unanswered():
                self._post(known, wire)
            return
        for other in [p for p in self.peers.values() if (p.role, p.name) == (role, name)]:
            if other.incarnation > incarnation:
                text = f"{role} {name} incarnation {incarnation} is fenced: incarnation {other.incarnation} has joined"
                self._refuse(identity, header, text, gone=True)
                return
            if other.identity != identity:
                self._refuse(other.identity, None, f"fenced by incarnation {incarnation}", gone=True)
            self.drop(other, f"fenced by incarnation {incarnation}")
        peer = Peer(identity, hello, key, time.monotonic())
        self.peers[identity] = peer
        try:
            self._welcome(peer, self._on_join(peer))
        except NotYet:
            del self.peers[identity]
        except Error as error:
            peer.gone = True
            del self.peers[identity]
            self._refuse(identity, header, str(error), error=type(error).__name__, gone=True)

    def _welcome(self, peer: Peer, welcome: Welcome) -> None:
        welcome = structs.replace(welcome, conversation=peer.conversation)
        self._post(peer, encode(welcome, self._limits.max_message_bytes))

    def _refuse(self, identity: bytes, header: Header | None, text: str, **more: Any) -> None:
        """Answers one that has not joined, at once."""
        refusal = Refusal(text[:MAX_TEXT], **more)  # the text may repeat what the peer said, which would not fit
        re = 0 if header is None else header.seq
        try:
            send(self.socket, [identity, *encode(refusal, self._limits.max_message_bytes, re=re)])
        except zmq.ZMQError as error:
            log.debug("refusal not delivered to %r: %s", identity[:64], error)

    def _acknowledge(self, peer: Peer, seq: int) -> None:
        peer.acks.append(seq)
        self._to_send[peer] = None

    def _post(self, peer: Peer, wire: list[Buffer]) -> None:
        peer.outbox.append(wire)
        self._to_send[peer] = None

    def _transmit(self, peer: Peer) -> bool:
        """Sends the first message of its outbox; whether there was room."""
        try:
            send(self.socket, [peer.identity, *peer.outbox[0]])
        except zmq.Again:  # tried again when something comes from it, and at each beat
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise TransportError(f"{peer.name}: {error.strerror}") from error
            peer.outbox.clear()  # its connection is gone; when it has a new one it greets
            if peer.unreachable_since is None:
                peer.unreachable_since = time.monotonic()
            return False
        return True
