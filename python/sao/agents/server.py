"""The HTTP side of agents: an endpoint in three dialects for the sessions of one generator, and a small session API.

    GET  /v1/models                     the policy, by the name of its folder
    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
                                        key: the session's API key; also below /session/KEY, for agents without a key
    POST /v1/sessions {"wait_s": 30}    key: the server's token; the next episode to play, or 204
    POST /v1/sessions/reward {"reward": 1.0}   key: the session's reward key
    POST /v1/sessions/close {"failure": "..."} key: the session's reward key; ends a session that was opened here

Keys are bearer tokens. The server listens on loopback unless it is configured otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sao.agents import anthropic_messages, chat_completions, responses
from sao.agents.connections import Connection, Connections, json_answer
from sao.agents.request import ApiError, Dialect, ModelCall, Stream, Turn
from sao.agents.session import AgentSession
from sao.agents.watching import Pieces
from sao.envs.agent import Access
from sao.envs.protocol import check_reward
from sao.errors import ConfigError, EnvironmentFailure

MAX_BODY_BYTES = 16 << 20
READ_S = 30.0  # for a body to arrive as a whole
PIECE_S = 0.05  # between two pieces of a stream
MAX_WAIT_S = 60.0
_CLOSE_S = 0.5  # for what is being answered when the endpoint ends
MAX_LOGGED = 100  # fields of requests that the log names
DIALECTS: dict[str, Dialect] = {
    "chat/completions": cast(Dialect, chat_completions),
    "responses": cast(Dialect, responses),
    "messages": cast(Dialect, anthropic_messages),
}
_WHY = {
    "overruled": "not followed: the run's own sampling holds",
    "unforced": "not enforced: a mask would change what the log-probs mean",
    "ignored": "not known, and ignored",
}

log = logging.getLogger(__name__)


class AgentServer:
    """Serves sessions from `start` to `close`. model: the name that the policy goes by. token: opens sessions."""

    def __init__(self, model: str, token: str) -> None:
        self.model, self.token = model, token
        self.base_url = ""
        self._sessions: dict[str, AgentSession] = {}
        self._rewards: dict[str, AgentSession] = {}
        self._logged: set[tuple[str, str]] = set()
        self._offered: asyncio.Queue[AgentSession] = asyncio.Queue()
        self.opened = 0  # sessions that agents have opened
        self._http: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._routes: dict[str, tuple[str, Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]]] = {
            "models": ("GET", self._models),
            "sessions": ("POST", self._open),
            "sessions/reward": ("POST", self._reward),
            "sessions/close": ("POST", self._close),
            "messages/count_tokens": ("POST", self._count),
        }
        self._routes |= {path: ("POST", partial(self._ask, dialect)) for path, dialect in DIALECTS.items()}

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0: any that is free. Raises `ConfigError` when it cannot."""
        self._http = web.Server(self._serve, request_factory=_request)
        try:
            every = None if host == "*" else host
            self._listener = await asyncio.get_running_loop().create_server(Connections(self._http), every, port)
        except OSError as error:
            raise ConfigError(f"generator.agents_bind: {host}:{port}: {error}") from error
        name, number = self._listener.sockets[0].getsockname()[:2]
        if name in ("0.0.0.0", "::"):  # an address to listen at is none to connect to
            name = _reachable("127.0.0.1" if name == "0.0.0.0" else "::1")
        self.base_url = f"http://{f'[{name}]' if ':' in name else name}:{number}/v1"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._http is not None:
            self._http.pre_shutdown()
            await self._http.shutdown(_CLOSE_S)

    def add(self, session: AgentSession) -> Access:
        """Begins to answer a session's keys."""
        self._sessions[session.api_key] = self._rewards[session.reward_key] = session
        reward_url = f"{self.base_url}/sessions/reward"
        return Access(self.base_url, session.api_key, self.model, reward_url, session.reward_key)

    def remove(self, session: AgentSession) -> None:
        """Refuses its keys from now on."""
        session.closed = True
        self._sessions.pop(session.api_key, None)
        self._rewards.pop(session.reward_key, None)

    @property
    def sessions(self) -> list[AgentSession]:
        """Those whose keys are answered now."""
        return list(self._sessions.values())

    def offer(self, session: AgentSession) -> None:
        """Lets the next agent that opens a session have this one."""
        self._offered.put_nowait(session)

    def waiting(self) -> AgentSession | None:
        """Takes the session that waits longest for an agent; None if none does."""
        while not self._offered.empty():
            if not (session := self._offered.get_nowait()).closed:
                return session
        return None

    async def _next(self) -> AgentSession:
        while (session := await self._offered.get()).closed:
            pass
        return session

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request; every refusal in the form of the dialect that was spoken, else in OpenAI's."""
        connection, form = cast(Connection, request.protocol), chat_completions.error_body
        connection.answering(True)
        try:
            key, path = _key_in_path(request.raw_path.partition("?")[0])
            form = DIALECTS[found].error if (found := path.removesuffix("/count_tokens")) in DIALECTS else form
            method, answer = self._routes.get(path, ("", None))
            if answer is None:
                raise ApiError(404, f"{request.method} {request.path}: Not Found")
            if request.method != method:
                raise ApiError(405, f"{request.method} {request.path}: Method Not Allowed")
            return await answer(request, _key(request) if key is None else key)
        except ApiError as error:
            refused = error
        except RecursionError:
            refused = ApiError(400, "the body is nested too deep")
        except web.HTTPException as error:
            refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        finally:
            connection.answering(False)
        refusal = json_answer(form(refused), refused.status)
        if request.content.exception() is not None:  # what is left of the connection is not looked at any more
            request.content.feed_eof()
            refusal.force_close()
        return refusal

    async def _models(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        context = _find(key, self._sessions).recorder.config.sampling.context_tokens
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "sao"}
        model |= {"max_model_len": context, "context_length": context}
        return json_answer({"object": "list", "data": [model]})

    async def _ask(self, dialect: Dialect, request: web.BaseRequest, key: str) -> web.StreamResponse:
        session = _find(key, self._sessions)
        data = await _body(request)
        call = dialect.parse(_object(data), session.recorder.temperature)
        self._log(call)
        piece = Pieces(session.recorder.renderer, call) if call.stream else None
        gone = _hung_up(request)
        asked = session.asked(call, _digest(request, data), _repeated(request), gone, piece)
        if piece is None:
            response: web.StreamResponse = json_answer(
                dialect.answer(await asyncio.shield(asked.work), call, self.model)
            )
            await response.prepare(request)
            await _in_time(request, response.write_eof())
        else:
            response = await self._stream(request, asked.work, piece, dialect.stream(call, self.model))
        asked.delivered = not gone()
        return response

    async def _count(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        """Anthropic's count of a prompt's tokens."""
        session = _find(key, self._sessions)
        call = anthropic_messages.parse(_object(await _body(request)), session.recorder.temperature)
        return json_answer({"input_tokens": await session.prompt_tokens(call)})

    async def _stream(
        self, request: web.BaseRequest, work: asyncio.Task[Turn], piece: Pieces, stream: Stream
    ) -> web.StreamResponse:
        """Answers by events; an error that is known before the first token has a status of its own."""
        work.add_done_callback(lambda _: piece.event.set())
        await piece.wait()
        if work.done():
            work.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await _in_time(request, response.write(stream.begin()))
        while not work.done():
            if text := piece.more():
                await _in_time(request, response.write(stream.more(text)))
                await asyncio.sleep(PIECE_S)
            elif not await piece.wait():
                await _in_time(request, response.write(b": waiting\n\n"))
        try:
            rest = stream.end(work.result(), piece.sent)
        except ApiError as error:
            rest = stream.error(error)
        await _in_time(request, response.write_eof(rest))
        return response

    def _log(self, call: ModelCall) -> None:
        """Says once of each field that it is not followed."""
        for name, note in call.notes.items():
            if (name, note) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((name, note))
                log.warning("agents: %.60r of a request is %s", name, _WHY[note])

    async def _open(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        if not hmac.compare_digest(key.encode(errors="replace"), self.token.encode()):
            raise ApiError(401, "the server's token is needed to open a session", code="invalid_api_key")
        wait_s = _object(await _body(request)).get("wait_s", 30.0)
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise ApiError(400, f"wait_s: {wait_s!r}, expected 0 to {MAX_WAIT_S:g}", param="wait_s")
        try:
            async with asyncio.timeout(wait_s):
                session = await self._next()
        except TimeoutError:
            return web.Response(status=204)
        if _hung_up(request)():  # the next one's
            self.offer(session)
            return web.Response(status=204)
        session.opened = True
        self.opened += 1
        task = session.recorder.assignment
        found = {"id": task.session, "seed": task.seed, "split": task.split, "model": self.model}
        found |= {"api_key": session.api_key, "reward_key": session.reward_key, "base_url": self.base_url}
        return json_answer(found)

    async def _reward(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        session = _find(key, self._rewards)
        try:
            given = _object(await _body(request)).get("reward")
            reward = check_reward(None if isinstance(given, bool) else given, session.reward_range)
        except EnvironmentFailure as failure:
            raise ApiError(400, failure.detail, param="reward") from None
        if session.reward is not None:
            raise ApiError(409, f"this session already has the reward {session.reward:g}", code="already_rewarded")
        session.reward = reward
        return json_answer({"reward": reward})

    async def _close(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        session = _find(key, self._rewards)
        failure = _object(await _body(request)).get("failure")
        if failure is not None:
            session.failure = EnvironmentFailure("agent_failed", str(failure)[:2000])
        elif session.reward is None:
            raise ApiError(409, "a session that has no reward cannot be closed without a failure", code="no_reward")
        session.ended.set()
        return json_answer({"id": session.recorder.session})


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


def _find(key: str, sessions: dict[str, AgentSession]) -> AgentSession:
    session = sessions.get(key)  # keys are random: the time of a look-up reveals nothing of them
    if session is None:
        raise ApiError(401, "the key is that of no open session", code="invalid_api_key")
    return session


def _digest(request: web.BaseRequest, body: bytes) -> bytes:
    head = f"{request.raw_path}\n{request.headers.get('Idempotency-Key', '')}\n".encode(errors="replace")
    return hashlib.sha256(head + body).digest()


def _repeated(request: web.BaseRequest) -> bool:
    """Whether a request, if it was made before, is the same one once more."""
    count = request.headers.get("x-stainless-retry-count", "")
    return (count.isdecimal() and count.strip("0") != "") or "Idempotency-Key" in request.headers


def _hung_up(request: web.BaseRequest) -> Callable[[], bool]:
    """Tells whether who asks has hung up; it outlives the request, so it holds nothing of it."""
    return (lambda: True) if request.transport is None else request.transport.is_closing


async def _in_time(request: web.BaseRequest, writing: Awaitable[None]) -> None:
    """Writes an answer, or a piece of it; who does not read for `READ_S` is cut off, for it holds a connection."""
    try:
        async with asyncio.timeout(READ_S):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"nothing was read for {READ_S:g} s") from None


def _reachable(loopback: str) -> str:
    """This host's name where it is known as an address, else the loopback address: a container may not know its own."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return loopback
    return socket.gethostname()


def _key_in_path(path: str) -> tuple[str | None, str]:
    """The key of an agent that has none elsewhere, and what is asked for; empty: nothing that there is."""
    before, _, below = path.partition("/v1/")
    key = before.removeprefix("/session/")
    return (key or None, below) if not before or key not in ("", before) else (None, "")


def _key(request: web.BaseRequest) -> str:
    if (key := request.headers.get("x-api-key", "")) and "Authorization" not in request.headers:
        return key.strip()
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise ApiError(401, "a bearer token is needed in the Authorization header", code="invalid_api_key")
    return key.strip()


async def _body(request: web.BaseRequest) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:g} s") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(400, f"the body cannot be read: {error!s:.200}") from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        # Up to 0.4 s for 16 MiB, for who has a key; it would hold the lock of the interpreter in a thread as well.
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    return body
