"""The listening socket and the peers behind it: joining, fencing, reliable sending, liveness."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import zmq
from msgspec import structs

from sao import _core
from sao.errors import Error, TransportError, WireError
from sao.transport.encoding import Header, decode, encode
from sao.transport.gate import Gate
from sao.transport.keys import ServerKeys, may_join
from sao.transport.legacy import message_of
from sao.transport.link import WINDOW, Link
from sao.transport.messages import (
    Ack,
    Buffer,
    Bye,
    Hello,
    Message,
    Ping,
    Pong,
    Refusal,
    Welcome,
)
from sao.transport.sockets import bind_router, check_endpoint, receive, send

log = logging.getLogger(__name__)
MAX_FRAMES: Final = 1 + 2 + _core.MAX_SIDECARS  # a message, and a trajectory with all the sidecars it may have
MAX_TEXT: Final = 4096  # characters of a refusal
GOODBYE: Final = "said goodbye"
M = TypeVar("M", bound=Message, covariant=True)
_PLAIN_ACK: Final = Ack()
_ACK: Final[list[Buffer]] = []  # stands for a plain acknowledgement among the answers that are kept


@dataclass(eq=False, slots=True)
class Peer:
    """One joined peer; `role`, `name` and `incarnation` are what its greeting said."""

    identity: bytes
    role: str
    name: str
    incarnation: int
    hello: Hello
    link: Link
    heard: float
    key: str | None = None
    """Name of the key that it joined with; None where no keys are used."""
    conversation: int = field(default_factory=lambda: secrets.randbits(62))
    backlog: deque[list[Buffer]] = field(default_factory=deque)
    """What the socket has no room for, in order."""
    unreachable_since: float | None = None
    overrun: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Request(Generic[M]):
    """A message of a joined peer, as a handler sees it."""

    peer: Peer
    message: M
    seq: int

    @property
    def body(self) -> dict[str, Any]:
        """The message's body."""
        return self.message.body

    @property
    def key(self) -> tuple[bytes, int]:
        """Names this request among all others."""
        return self.peer.identity, self.seq


if TYPE_CHECKING:

    class Reply(Message):
        """An answer by its former name."""

        def __init__(self, kind: str = "ack", body: Any = None, frames: Sequence[Buffer] = ()) -> None: ...
else:

    def Reply(kind: str = "ack", body: Any = None, frames: Sequence[Buffer] = ()) -> Message:
        """An answer by its former name."""
        return message_of(kind, body, frames, answer=True)


class Mailbox:
    """`on_join(peer)` returns the body of `welcome`, or raises to refuse; `on_leave(peer, reason)` is called once
    when a joined peer says goodbye, is fenced by a newer incarnation, is unreachable, or is silent for
    `peer_timeout_s`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_join: Callable[[Peer], Welcome],
        on_leave: Callable[[Peer, str], None],
        max_message_bytes: int,
        heartbeat_s: float,
        peer_timeout_s: float,
        keys: ServerKeys | None = None,
    ) -> None:
        self._on_join, self._on_leave = on_join, on_leave
        self._limit, self._heartbeat_s, self._peer_timeout_s = max_message_bytes, heartbeat_s, peer_timeout_s
        self._held: list[tuple[Peer, list[Buffer]]] | None = None
        self._acks: dict[Peer, list[int]] = {}
        self._beaten = time.monotonic()
        self.peers: dict[bytes, Peer] = {}
        self.bad_messages = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: Gate | None = None
        try:
            self._gate = None if keys is None else Gate(self._context, keys)
            self.socket, self.endpoint = bind_router(self._context, endpoint, max_message_bytes, keys)
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
            key = None if self._gate is None else _key_of(parts[-1])
            request = self._accept(parts[0].bytes, [part.buffer for part in parts[1:]], key)
            if request is not None:
                yield request

    def push(
        self, peer: Peer, message: Message | str, body: dict[str, Any] | None = None, frames: Sequence[Buffer] = ()
    ) -> None:
        """Sends unasked. It arrives once, however often the connection breaks, or `on_leave` is called."""
        if peer.gone:
            return
        if peer.overrun or not peer.link.open:
            peer.overrun = True  # something is missing from now on: it is dropped at the next beat, not in mid-decision
            return
        if isinstance(message, str):
            message = message_of(message, body, frames)
        low, seq = peer.link.low, peer.link.number()
        wire = encode(message, self._limit, seq=seq, low=low)
        peer.link.sent(seq, wire)
        self._transmit(peer, wire)

    def reply(self, request: Request[Any], answer: Message) -> None:
        """Answers a request, now or later; without effect when the peer is gone. A plain `Ack` leaves with
        `acknowledge`.
        """
        peer, seq = request.peer, request.seq
        if peer.gone or seq == 0:
            return
        if answer == _PLAIN_ACK:
            peer.link.answered(seq, _ACK)
            self._acks.setdefault(peer, []).append(seq)
            return
        try:
            wire = encode(answer, self._limit, re=seq)
        except WireError as error:
            wire = encode(Refusal(str(error), "WireError"), self._limit, re=seq)
        peer.link.answered(seq, wire)
        self._transmit(peer, wire)

    def acknowledge(self) -> None:
        """Sends the plain acknowledgements of this turn, those of a peer as one message. At the end of a turn."""
        acks, self._acks = self._acks, {}
        for peer, (first, *more) in acks.items():
            if not peer.gone:
                self._transmit(peer, encode(Ack(more=tuple(more)), self._limit, re=first))

    def drop(self, peer: Peer, reason: str) -> None:
        """Forgets a peer. What it says from now on is answered with an error that makes it leave."""
        if self.peers.get(peer.identity) is peer:
            del self.peers[peer.identity]
        if not peer.gone:
            peer.gone = True
            self._on_leave(peer, reason)

    def hold(self) -> None:
        """From now on nothing is sent before `release`."""
        self._held = self._held or []

    def release(self, *, discard: bool = False) -> None:
        """Sends what was held, in order; or forgets it and holds nothing any more."""
        held, self._held = self._held or [], None
        for peer, wire in () if discard else held:
            if not peer.gone:
                self._transmit(peer, wire)

    def beat(self) -> None:
        """Once a heartbeat: sends what had no room, drops who is gone."""
        now = time.monotonic()
        missed_s, self._beaten = now - self._beaten - self._heartbeat_s, now
        if missed_s > self._heartbeat_s:  # it is this process that has stood still: nobody could be heard meanwhile
            for peer in self.peers.values():
                peer.heard = min(now, peer.heard + missed_s)
                if peer.unreachable_since is not None:
                    peer.unreachable_since = min(now, peer.unreachable_since + missed_s)
        for peer in list(self.peers.values()):
            if now - peer.heard > 1.5 * self._heartbeat_s:  # one that is gone shows itself when it is addressed
                self._transmit(peer, encode(Pong(), self._limit))
            self._drain(peer)
            if now - peer.heard > self._peer_timeout_s:
                self.drop(peer, f"silent for {now - peer.heard:.1f} s")
            elif peer.overrun or len(peer.backlog) > 2 * WINDOW:
                self.drop(peer, "does not acknowledge what it is sent")
            elif peer.unreachable_since is not None and now - peer.unreachable_since > 2 * self._heartbeat_s:
                self.drop(peer, f"unreachable for {now - peer.unreachable_since:.1f} s")

    def close(self, linger_s: float) -> None:
        """Closes the socket after giving queued messages `linger_s` seconds to leave, and removes its file."""
        self._close(int(linger_s * 1000))
        path = check_endpoint(self.endpoint)
        if path is not None:
            path.unlink(missing_ok=True)

    def _close(self, linger_ms: int) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=linger_ms)

    def _accept(self, identity: bytes, frames: list[Buffer], key: str | None) -> Request[Any] | None:
        try:
            received = decode(frames, self._limit, max_frames=MAX_FRAMES)
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
            self._join(identity, header, message, key)
            return None
        peer = self.peers.get(identity)
        if peer is not None and peer.key != key:  # another key took this identity: it has not joined
            peer = None
        if peer is None:
            if not isinstance(message, Bye) and not header.re:
                text = "this peer has not joined, or was silent for longer than transport.peer_timeout_s: join again"
                self._refuse(identity, header, text, gone=True, unknown=True)
            return None
        peer.heard, peer.unreachable_since = time.monotonic(), None
        self._drain(peer)
        if header.re:
            peer.link.settle(header.re)
        elif not peer.link.fresh(header.seq, header.low):
            kept = peer.link.answer(header.seq)
            if kept is _ACK:
                self._acks.setdefault(peer, []).append(header.seq)
            elif kept is not None:
                self._transmit(peer, kept)
        elif isinstance(message, Ping):
            if not peer.backlog:
                self._transmit(peer, encode(Pong(), self._limit))
        elif isinstance(message, Bye):
            self.drop(peer, GOODBYE)
        else:
            return Request(peer, message, header.seq)
        return None

    def _join(self, identity: bytes, header: Header, hello: Hello, key: str | None) -> None:
        """Welcomes a peer. A new one fences older incarnations of its name; with one that is known and has a new
        connection the conversation goes on.
        """
        role, name, incarnation = hello.role, hello.name, hello.incarnation
        if key is not None and not may_join(key, role, name):
            self._refuse(identity, header, f"the key {key!r} does not stand for the {role} {name!r}", gone=True)
            return
        known = self.peers.get(identity)
        if known is not None and known.hello.session == hello.session:
            known.heard, known.unreachable_since = time.monotonic(), None
            known.backlog.clear()
            self._transmit(known, encode(Welcome(conversation=known.conversation), self._limit))
            for wire in known.link.unanswered():
                self._transmit(known, wire)
            return
        if identity != f"{role}:{name}:{incarnation}".encode():
            self._refuse(identity, header, f"greeting of {role}:{name}:{incarnation} from another peer", gone=True)
            return
        for other in [p for p in self.peers.values() if (p.role, p.name) == (role, name) or p.identity == identity]:
            if other.incarnation > incarnation:
                text = f"{role} {name} incarnation {incarnation} is fenced: incarnation {other.incarnation} has joined"
                self._refuse(identity, header, text, gone=True)
                return
            if other.identity != identity:
                self._refuse(other.identity, None, f"fenced by incarnation {incarnation}", gone=True)
            self.drop(other, f"fenced by incarnation {incarnation}")
        peer = Peer(identity, role, name, incarnation, hello, Link(), time.monotonic(), key)
        self.peers[identity] = peer
        try:
            welcome = self._on_join(peer)
        except Error as error:
            peer.gone = True
            del self.peers[identity]
            self._refuse(identity, header, str(error), error=type(error).__name__, gone=True)
            return
        welcome = structs.replace(welcome, conversation=peer.conversation)
        try:
            self._transmit(peer, encode(welcome, self._limit))
        except WireError as error:
            self.drop(peer, str(error))

    def _refuse(self, identity: bytes, header: Header | None, text: str, **more: Any) -> None:
        text = text[:MAX_TEXT]  # it may repeat what the peer said, which would not fit
        wire = encode(Refusal(text, **more), self._limit, re=0 if header is None else header.seq)
        try:
            send(self.socket, [identity, *wire])
        except zmq.ZMQError as error:
            log.debug("refusal not delivered to %r: %s", identity[:64], error)

    def _transmit(self, peer: Peer, wire: list[Buffer]) -> None:
        if self._held is not None:
            self._held.append((peer, wire))
            return
        peer.backlog.append(wire)
        self._drain(peer)

    def _drain(self, peer: Peer) -> None:
        while peer.backlog:
            try:
                send(self.socket, [peer.identity, *peer.backlog[0]])
            except zmq.Again:  # tried again when it is heard, and at each beat
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise TransportError(f"{peer.name}: {error.strerror}") from error
                peer.backlog.clear()  # its connection is gone; when it has a new one it greets
                if peer.unreachable_since is None:
                    peer.unreachable_since = time.monotonic()
                return
            peer.backlog.popleft()


def _key_of(frame: zmq.Frame) -> str:
    """Name of the key that the gate let in; every connection of a socket with keys has one."""
    return str(frame.get("User-Id"))
