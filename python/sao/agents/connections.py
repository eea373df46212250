"""Connections to the endpoint of agents: not more than a bound, and a request's head has a deadline.

A request counts from its first byte on; its body has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import resource
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from sao.agents.chat_completions import error_body
from sao.agents.request import ApiError

HEAD_S: Final = 30.0  # for the head of a request to arrive as a whole; the first one counts from the connection on
IDLE_S: Final = 300.0  # a connection may be kept without a request
MAX_CONNECTIONS: Final = 4096  # and not more than half of the files that this process may open
_LINGER_S: Final = 1.0  # who is refused can read why
_LOG_S: Final = 10.0  # between two warnings in the log that connections were refused
_MAX_LINGERING: Final = 64  # so many; the others are cut off, for their descriptors count as well

log = logging.getLogger(__name__)


def json_answer(body: dict[str, Any], status: int = 200) -> web.Response:
    """A whole answer."""
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")


class Connections:
    """Makes the connections of a listening socket, which `server` answers. most: that may be open at a time."""

    def __init__(self, server: web.Server) -> None:
        self.server = server
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = min(MAX_CONNECTIONS, max(1, files // 2))
        self.most_lingering = min(_MAX_LINGERING, files // 8)
        self.open = self.refused = 0
        self.lingering = 0  # were refused, and can still read why
        self._logged_s = -math.inf

    def __call__(self) -> asyncio.Protocol:
        return Connection(self)

    def admit(self) -> bool:
        """Whether there is room for one more connection; counted either way."""
        if self.open < self.most:
            self.open += 1
            return True
        self.refused += 1
        if (now := time.monotonic()) >= self._logged_s + _LOG_S:
            self._logged_s = now
            log.warning("agents: %d connections are open; one more is refused, %d so far", self.most, self.refused)
        return False


class Connection(web.RequestHandler):
    """One connection, which speaks HTTP once it was admitted."""

    def __init__(self, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(connections.server, loop=loop, access_log=None, keepalive_timeout=IDLE_S)  # type: ignore[arg-type]
        self._shared = connections
        self._socket: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._admitted = self._begun = self._busy = self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket, self._admitted = transport, self._shared.admit()
        if self._admitted:
            super().connection_made(transport)
            self._time(HEAD_S, self._late)
        else:
            text = f"{self._shared.most} connections are open, no more are taken"
            self._refuse(ApiError(503, text, code="too_many_connections"))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if data and not self._busy:  # aiohttp itself calls this without data, to go on parsing
            self._begun = True
            if self._timer is None:
                self._time(HEAD_S, self._late)
        super().data_received(data)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop()
        self._shared.open -= self._admitted
        self._shared.lingering -= self._refused
        super().connection_lost(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or has failed here, in OpenAI's form."""
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise exc if isinstance(exc, ConnectionError) else ConnectionError("the answer has begun")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("agents: %s %s failed", request.method, request.path, exc_info=exc)
        text = (message or "").partition("\n")[0].strip() or HTTPStatus(status).phrase
        answer = json_answer(error_body(ApiError(status, f"{text:.200}")), status)
        answer.force_close()
        return answer

    def answering(self, busy: bool) -> None:
        """A request has arrived, or has been answered."""
        self._begun, self._busy = False, busy
        if not self._refused:
            self._stop()

    def _late(self) -> None:
        if not self._begun:
            self._socket.close()
            return
        log.warning("agents: the head of a request did not arrive within %g s", HEAD_S)
        self._refuse(ApiError(408, f"the head of the request did not arrive within {HEAD_S:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Says why, and ends the connection as soon as the other side has, or soon after."""
        self._refused = True
        self._shared.lingering += 1
        if self._shared.lingering > self._shared.most_lingering:
            self._socket.abort()
            return
        body = json.dumps(error_body(error)).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        self._socket.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._socket.write_eof()
        self._time(_LINGER_S, self._socket.abort)

    def _time(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
