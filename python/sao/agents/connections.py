"""Connections to the endpoint of agents: not more than a bound, and a request's head has a deadline.

HTTP is spoken by the protocol that `serve` makes; its transport events pass through here, and a connection that is too
many never reaches it. A request counts from its first byte on; its body has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from sao.agents.calls import error_body
from sao.agents.session import ApiError

HEAD_S: Final = 30.0  # for the head of a request to arrive as a whole; the first one counts from the connection on
IDLE_S: Final = 300.0  # a connection may be kept without a request
MAX_CONNECTIONS: Final = 4096  # and not more than half of the files that this process may open
_LINGER_S: Final = 1.0  # who is refused can read why
_LOG_S: Final = 10.0  # between two warnings in the log that connections were refused
_MAX_LINGERING: Final = 64  # so many; the others are cut off, for their descriptors count as well

log = logging.getLogger(__name__)


class Connections:
    """Makes the protocols of a listening socket. serve: makes one that speaks HTTP, for each connection.
    `most`: connections that may be open at a time.
    """

    def __init__(self, serve: Callable[[], Any]) -> None:
        self._serve = serve
        self._open: dict[Any, _Connection] = {}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = min(MAX_CONNECTIONS, max(1, files // 2))
        self.most_lingering = min(_MAX_LINGERING, files // 8)
        self.lingering = 0  # were refused, and can still read why
        self.refused = 0
        self._logged_s = -math.inf

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    @contextmanager
    def answering(self, protocol: Any) -> Iterator[None]:
        """While a request of this HTTP protocol is answered: its head has arrived."""
        connection = self._open.get(protocol)
        if connection is not None:
            connection.answering(True)
        try:
            yield
        finally:
            if connection is not None:
                connection.answering(False)

    def admit(self, connection: _Connection) -> Any:
        """The HTTP protocol of a new connection, or None when there are too many."""
        if len(self._open) >= self.most:
            self.refused += 1
            if (now := time.monotonic()) >= self._logged_s + _LOG_S:
                self._logged_s = now
                log.warning("agents: %d connections are open; one more is refused, %d so far", self.most, self.refused)
            return None
        protocol = self._serve()
        self._open[protocol] = connection
        return protocol

    def gone(self, protocol: Any) -> None:
        """A connection has ended."""
        self._open.pop(protocol, None)


class _Connection(asyncio.Protocol):
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._http: Any = None
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._busy = self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._http = self._connections.admit(self)
        if self._http is None:
            text = f"{self._connections.most} connections are open, no more are taken"
            self._refuse(ApiError(503, text, code="too_many_connections"))
        else:
            self._http.connection_made(transport)
            self._time(HEAD_S, self._late)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._begun = True
        if self._timer is None and not self._busy:
            self._time(HEAD_S, self._late)
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        kept: bool | None = None if self._refused else self._http.eof_received()
        return kept

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        self._connections.lingering -= self._refused
        if self._http is not None:
            self._connections.gone(self._http)
            self._http.connection_lost(error)

    def answering(self, busy: bool) -> None:
        """A request has arrived, or has been answered."""
        self._begun, self._busy = False, busy
        if not self._refused:
            self._stop()

    def _late(self) -> None:
        if not self._begun:
            self._transport.close()
            return
        log.warning("agents: the head of a request did not arrive within %g s", HEAD_S)
        self._refuse(ApiError(408, f"the head of the request did not arrive within {HEAD_S:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Says why, and ends the connection as soon as the other side has, or soon after."""
        self._refused = True
        self._connections.lingering += 1
        if self._connections.lingering > self._connections.most_lingering:
            self._transport.abort()
            return
        body = json.dumps(error_body(error)).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._transport.write_eof()
        self._time(_LINGER_S, self._transport.abort)

    def _time(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
