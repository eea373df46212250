"""An actor: a mailbox, a handler per kind of message, timers, and a deadline on every wait.

Single-threaded. The loop sleeps in the poller until a message, a call from outside or the next timer; it never polls
and never blocks on a peer. On the wire a message arrives at least once, at a handler exactly once (see `link`).
"""

import heapq
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import zmq

from sao.errors import Error, WireError
from sao.transport.keys import Keys
from sao.transport.mailbox import Mailbox, Peer, Request
from sao.transport.messages import Ack, Message, Refusal, Welcome
from sao.transport.sockets import Limits

log = logging.getLogger(__name__)
LATER: Final = Ack(reason="later")  # a handler that answers by `Mailbox.reply` in its own time returns this
M = TypeVar("M", bound=Message)
BATCH: Final = 256  # messages of one turn of the loop


class Actor:
    """Serves one endpoint until `stop`. `on_join` and `on_leave` as in `Mailbox`, which is the attribute `mailbox`.

    With `keys` only peers with known keys may connect, each in the role that its key stands for. `commit()` is called
    once a turn of the loop, after all that had arrived was handled and before anything that handlers and timers decided
    is sent: what makes decisions durable belongs there.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_join: Callable[[Peer], Welcome],
        on_leave: Callable[[Peer, str], None],
        commit: Callable[[], None] = lambda: None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        keys: Keys | None = None,
    ) -> None:
        self.mailbox = Mailbox(endpoint, on_join, on_leave, limits, keys)
        self.endpoint = self.mailbox.endpoint
        self._commit = commit
        self._handlers: dict[type[Message], tuple[Callable[[Request[Any]], Message | None], frozenset[str]]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopped = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.every(limits.heartbeat_s, self.mailbox.beat)

    def on(self, kind: type[M], handler: Callable[[Request[M]], Message | None], *roles: str) -> None:
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

    def call(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the loop soon. For signal handlers and other threads."""
        self._calls.append(callback)
        with suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Ends `run` after the message in hand."""
        self._stopped = True
        self.call(lambda: None)

    def run(self) -> None:
        """Serves until `stop`. Errors of `sao` in handlers are answered to the peer; any other exception ends the
        loop.
        """
        poller = zmq.Poller()
        poller.register(self.mailbox.socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._stopped:
            poller.poll(max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1))
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            while self._calls and not self._stopped:
                self._calls.popleft()()
            for request in self.mailbox.receive(BATCH):
                self._handle(request)
                if self._stopped:
                    break
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now and not self._stopped:
                heapq.heappop(self._timers)[2]()
            self._commit()
            self.mailbox.flush()

    def close(self, linger_s: float = 1.0) -> None:
        """Closes the socket after giving queued messages `linger_s` seconds to leave."""
        self.mailbox.close(linger_s)
        os.close(self._bell)

    def _handle(self, request: Request[Any]) -> None:
        kind, peer = request.message.kind, request.peer
        handler, roles = self._handlers.get(type(request.message), (None, frozenset[str]()))
        try:
            if handler is None or (roles and peer.role not in roles):
                raise WireError(f"{kind!r} is not accepted from a {peer.role}")
            answer = handler(request) or Ack()
        except Error as error:
            log.warning("%s from %s: %s: %s", kind, peer.name, type(error).__name__, error)
            answer = Refusal(str(error), type(error).__name__)
        if answer is not LATER:
            self.mailbox.reply(request.key, answer)
