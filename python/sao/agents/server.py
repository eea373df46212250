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
from typing import Any, cast

from aiohttp import web

from sao.agents import anthropic_messages, chat_completions, responses
from sao.agents.connections import Connection, Connections
from sao.agents.request import ApiError, Dialect, ModelCall, Stream, Turn
from sao.agents.session import AgentSession
from sao.envs.agent import Access
from sao.envs.protocol import Message, check_reward
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.chat import Renderer

MAX_BODY_BYTES = 16 << 20
READ_S = 30.0  # for a body to arrive as a whole
KEEP_ALIVE_S = 10.0  # between two signs of life in a stream
PIECE_S = 0.05  # between two pieces of a stream
MAX_WAIT_S = 60.0
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

_PROBE = (Message("user", "a"),)

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
        self._runner: Any = None
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0: any that is free. Raises `ConfigError` when it cannot."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer])
        for below in ("/v1", "/session/{key}/v1"):
            app.router.add_get(f"{below}/models", self._models)
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{below}/{path}", self._asking(dialect))
            app.router.add_post(f"{below}/messages/count_tokens", self._count)
        app.router.add_post("/v1/sessions", self._open)
        app.router.add_post("/v1/sessions/reward", self._reward)
        app.router.add_post("/v1/sessions/close", self._close)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            connections = Connections(self._runner.server)
            every = None if host == "*" else host
            self._listener = await asyncio.get_running_loop().create_server(connections, every, port)
        except OSError as error:
            raise ConfigError(f"generator.agents_bind: {host}:{port}: {error}") from error
        name, number = self._listener.sockets[0].getsockname()[:2]
        if name in ("0.0.0.0", "::"):  # an address to listen at is none to connect to
            name = _reachable("127.0.0.1" if name == "0.0.0.0" else "::1")
        self.base_url = f"http://{f'[{name}]' if ':' in name else name}:{number}/v1"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

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

    async def _next(self) -> AgentSession:
        while (session := await self._offered.get()).closed:
            pass
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        context = self._find(request, self._sessions).recorder.config.sampling.context_tokens
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "sao"}
        model |= {"max_model_len": context, "context_length": context}
        return web.json_response({"object": "list", "data": [model]})

    def _asking(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._ask(request, dialect)
            except RecursionError:
                error = ApiError(400, "the body is nested too deep")
            except ApiError as refused:
                error = refused
            return web.json_response(dialect.error(error), status=error.status)

        return handle

    async def _ask(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._find(request, self._sessions)
        body = await _body(request)
        call = dialect.parse(body, session.recorder.temperature)
        self._log(call)
        piece = _Pieces(session.recorder.renderer, call) if call.stream else None
        asked = session.asked(
            call, _digest(request, await request.read()), _repeated(request), _hung_up(request), piece
        )
        if piece is None:
            response: web.StreamResponse = web.json_response(
                dialect.answer(await asyncio.shield(asked.work), call, self.model)
            )
        else:
            response = await self._stream(request, asked.work, piece, dialect.stream(call, self.model))
        asked.delivered = not _hung_up(request)()
        return response

    async def _count(self, request: web.Request) -> web.StreamResponse:
        """Anthropic's count of a prompt's tokens."""
        try:
            session = self._find(request, self._sessions)
            call = anthropic_messages.parse(await _body(request), session.recorder.temperature)
            return web.json_response({"input_tokens": await session.prompt_tokens(call)})
        except ApiError as error:
            return web.json_response(anthropic_messages.error(error), status=error.status)

    async def _stream(
        self, request: web.Request, work: asyncio.Task[Turn], piece: _Pieces, stream: Stream
    ) -> web.StreamResponse:
        """Answers by events; an error that is known before the first token has a status of its own."""
        work.add_done_callback(lambda _: piece.event.set())
        await piece.wait()
        if work.done():
            work.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await _written(request, response, stream.begin())
        while not work.done():
            if text := piece.more():
                await _written(request, response, stream.more(text))
                await asyncio.sleep(PIECE_S)
            elif not await piece.wait():
                await _written(request, response, b": waiting\n\n")
        try:
            rest = stream.end(work.result(), piece.sent)
        except ApiError as error:
            rest = stream.error(error)
        await _written(request, response, rest)
        await response.write_eof()
        return response

    def _log(self, call: ModelCall) -> None:
        """Says once of each field that it is not followed."""
        for name, note in call.notes.items():
            if (name, note) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((name, note))
                log.warning("agents: %.60r of a request is %s", name, _WHY[note])

    async def _open(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(_key(request).encode(errors="replace"), self.token.encode()):
            raise ApiError(401, "the server's token is needed to open a session", code="invalid_api_key")
        wait_s = (await _body(request)).get("wait_s", 30.0)
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise ApiError(400, f"wait_s: {wait_s!r}, expected 0 to {MAX_WAIT_S:g}", param="wait_s")
        try:
            async with asyncio.timeout(wait_s):
                session = await self._next()
        except TimeoutError:
            return web.Response(status=204)
        if request.transport is None or request.transport.is_closing():  # who asked has hung up: the next one's
            self.offer(session)
            return web.Response(status=204)
        task = session.recorder.assignment
        found = {"id": task.session, "seed": task.seed, "split": task.split, "model": self.model}
        found |= {"api_key": session.api_key, "reward_key": session.reward_key, "base_url": self.base_url}
        return web.json_response(found)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request, self._rewards)
        try:
            given = (await _body(request)).get("reward")
            reward = check_reward(None if isinstance(given, bool) else given, session.reward_range)
        except EnvironmentFailure as failure:
            raise ApiError(400, failure.detail, param="reward") from None
        if session.reward is not None:
            raise ApiError(409, f"this session already has the reward {session.reward:g}", code="already_rewarded")
        session.reward = reward
        return web.json_response({"reward": reward})

    async def _close(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request, self._rewards)
        failure = (await _body(request)).get("failure")
        if failure is not None:
            session.failure = EnvironmentFailure("agent_failed", str(failure)[:2000])
        elif session.reward is None:
            raise ApiError(409, "a session that has no reward cannot be closed without a failure", code="no_reward")
        session.ended.set()
        return web.json_response({"id": session.recorder.session})

    def _find(self, request: web.Request, sessions: dict[str, AgentSession]) -> AgentSession:
        session = sessions.get(_key(request))  # keys are random: the time of a look-up reveals nothing of them
        if session is None:
            raise ApiError(401, "the key is that of no open session", code="invalid_api_key")
        return session


class _Pieces:
    """The content of a turn while it is sampled, as far as it is settled; see `Watch`, called in any thread.

    Nothing is settled behind what may begin a call or reasoning, or white space that may be stripped at the end. event:
    there is more, or the turn is complete. sent: what was taken.
    """

    def __init__(self, renderer: Renderer, call: ModelCall) -> None:
        self._renderer, self._loop = renderer, asyncio.get_running_loop()
        self._marks = "<[{" if call.tools else "<["
        probe = renderer.read(renderer.encode("a"), renderer.initial(_PROBE))
        self._whole = bool(call.stops) or not probe.content  # a turn that begins as reasoning, or may lose its end
        self._ids: list[int] = []
        self._seen = 0
        self.event = asyncio.Event()
        self.sent = ""

    def __call__(self, token: int) -> bool:
        self._ids.append(token)
        self._loop.call_soon_threadsafe(self.event.set)
        return False

    async def wait(self) -> bool:
        """Waits for more; false when nothing came for `KEEP_ALIVE_S`."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self.event.wait()
        except TimeoutError:
            return False
        return True

    def more(self) -> str:
        """What is settled and was not taken yet."""
        self.event.clear()
        ids = self._ids[:]
        if len(ids) == self._seen or self._whole:
            return ""
        self._seen = len(ids)
        text = self._renderer.visible(ids)
        at = min((text.index(mark) for mark in self._marks if mark in text), default=len(text))
        settled = text[:at].rstrip().rstrip("\ufffd")
        if settled[:1].isspace() or not settled.startswith(self.sent):
            return ""
        piece, self.sent = settled[len(self.sent) :], settled
        return piece


def _digest(request: web.Request, body: bytes) -> bytes:
    head = f"{request.path}\n{request.headers.get('Idempotency-Key', '')}\n".encode(errors="replace")
    return hashlib.blake2b(head + body, digest_size=16).digest()


def _repeated(request: web.Request) -> bool:
    """Whether a request, if it was made before, is the same one once more."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return (count.isdecimal() and int(count) > 0) or "Idempotency-Key" in request.headers


def _hung_up(request: web.Request) -> Callable[[], bool]:
    return lambda: request.transport is None or request.transport.is_closing()


async def _written(request: web.Request, response: web.StreamResponse, events: bytes) -> None:
    """Writes events of a stream; who does not read them for `READ_S` is cut off, since a connection is held by it."""
    try:
        async with asyncio.timeout(READ_S):
            await response.write(events)
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


def _key(request: web.Request) -> str:
    if (in_path := request.match_info.get("key")) is not None:
        return in_path
    if (key := request.headers.get("x-api-key", "")) and "Authorization" not in request.headers:
        return key.strip()
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise ApiError(401, "a bearer token is needed in the Authorization header", code="invalid_api_key")
    return key.strip()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(READ_S):
            data = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:g} s") from None
    try:
        # Up to 0.4 s for 16 MiB, for who has a key; it would hold the lock of the interpreter in a thread as well.
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    return body


@web.middleware
async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every refusal in OpenAI's form."""
    connection = cast(Connection, request.protocol)
    connection.answering(True)
    try:
        return await handler(request)
    except ApiError as error:
        refused = error
    except web.HTTPException as error:
        refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
    finally:
        connection.answering(False)
    return web.json_response(chat_completions.error_body(refused), status=refused.status)
