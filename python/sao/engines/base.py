"""The contract of a generation engine, and the books that all engines keep alike.

Token ids go in; token ids with log-probs and policy versions come out. An engine never sees text. It samples with
temperature only, so that the log-prob it reports is the log-prob of the distribution it drew from. No torch here.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sao.errors import ClosedError, EngineError
from sao.transport.messages import WeightsRef

StopReason = Literal["stop", "length", "watch", "context", "abort"]
Watch = Callable[[int], bool]
"""Sees the tokens of a request one by one, as they are sampled; true ends it."""
UNLIMITED = 1 << 31  # a context window or vocabulary without a bound


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One assistant turn to sample.

    id: unique among the requests in flight.
    session: the conversation it belongs to; an engine may reuse what it cached for this session when `prompt_ids`
        extends it. At most one request of a session is in flight.
    prompt_ids: int32[n], n >= 1: the whole context, from its first token.
    max_new_tokens: most tokens to sample, >= 1; an engine further limits it to the room left in its context window.
    temperature: logits are divided by it; 0 takes the most likely token (evaluation only).
    stop_token_ids: sampling ends with the first of these; it is part of the completion.
    seed: own stream of random numbers where an engine has one per request (see the engine); None: the engine's stream.
    watch: called with every token, perhaps in a thread of the engine, so it must return at once; None: nobody looks.
    """

    id: str
    session: str
    prompt_ids: np.ndarray
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    watch: Watch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The sampled tokens of one request.

    token_ids: int32[m], the stop token included when it was sampled.
    logprobs: float32[m], natural logarithm, under logits / temperature (temperature 0: of the unscaled logits).
    version_spans: int64[k, 3], rows (start, stop, version) that tile [0, m) in order, versions non-decreasing.
    stop_reason: stop (a stop token was sampled), watch (the request's watch has ended it), length (the token limit or
        the end of the context window was reached),
        context (no room for even one token; m = 0), abort (released or closed while in flight; what was sampled until
        then is in it).
    fingerprints: policy version -> fingerprint of the weights that sampled.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: np.ndarray
    stop_reason: StopReason
    fingerprints: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since `start`, and the present load."""

    busy_s: float = 0.0  # seconds with a request in flight
    sampled_tokens: int = 0
    running: int = 0  # requests, now
    waiting: int = 0
    kv_use: float = 0.0  # share of the KV cache, 0 to 1, now
    preempted: int = 0  # times that a running request was thrown back to the queue for lack of memory


@dataclass(slots=True)
class Flight:
    """A request between `generate` and its completion."""

    request: Request
    since: int  # the engine's version when it came
    handle: Any = None  # the engine's own name for it
    aborted: bool = False  # its session was released


class Engine(ABC):
    """A generation engine. All methods are called from one asyncio loop, which they never block.

    Alike in all engines: requests are checked, one of a session at a time; versions only grow, and each has one
    fingerprint; a start that fails closes; nothing is done after `close`. The rest a subclass implements.

    version: of the weights that sample the next token. closed: `close` was called. failure: why it will never sample
    again. metadata: of the engine in a trajectory: `engine`, `version_source` and `kv_after_update`.
    """

    def __init__(self, context_tokens: int = UNLIMITED) -> None:
        self.version = 0
        self.closed = False
        self.failure: Exception | None = None
        self.metadata: dict[str, str] = {}
        self._context, self._vocabulary = context_tokens, UNLIMITED
        self._fingerprints: dict[int, str] = {}
        self._flights: dict[str, Flight] = {}  # by session
        self._started = self._ready = False
        self._updating = asyncio.Lock()
        self._sampled_tokens = 0
        self._busy_s = self._busy_since = 0.0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the present weights, 32 hex characters; empty before the start."""
        return self._fingerprints.get(self.version, "")

    async def start(self) -> None:
        """Loads the model, version 0. Raises `EngineError`, also when started twice."""
        if self._started:
            raise EngineError("engine: started twice")
        self._started = True
        try:
            self._fingerprints[0] = await self._start()
            self._ready = True
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: Request) -> Completion:
        """Samples one turn. Raises `EngineError` for a request that makes no sense, `ClosedError` after `close`.

        Cancelling the awaiting task drops the request.
        """
        self._check(request)
        self._check_usable()
        room = self._context - request.prompt_ids.size
        if room <= 0:
            return no_tokens("context")
        if request.max_new_tokens > room:
            request = replace(request, max_new_tokens=room)
        if not self._flights:
            self._busy_since = time.perf_counter()
        flight = self._flights[request.session] = Flight(request, self.version)
        try:
            completion = await self._sample(flight)
        finally:
            del self._flights[request.session]
            if not self._flights:
                self._busy_s += time.perf_counter() - self._busy_since
        self._sampled_tokens += completion.token_ids.size
        return completion

    async def update_weights(self, ref: WeightsRef) -> None:
        """Takes over published weights; returns when every further token is sampled from them, also in requests that
        are in flight.

        All or nothing, also when the caller is cancelled: raises `WeightsError` and keeps the old weights when the
        update is incomplete, does not fit or its fingerprint differs, and `EngineError` when `ref.version` is below
        the present version.
        """
        await asyncio.shield(self._update(ref))

    async def _update(self, ref: WeightsRef) -> None:
        async with self._updating:
            self._check_usable()
            if (ref.version, ref.fingerprint) == (self.version, self.fingerprint):
                return
            used = self._sampled_tokens or self._flights
            if ref.version < self.version or (ref.version == self.version and used):
                raise EngineError(
                    f"weights of version {ref.version} ({ref.fingerprint}): the engine already serves "
                    f"version {self.version} ({self.fingerprint})"
                )
            before = self._fingerprints
            self._fingerprints = before | {ref.version: ref.fingerprint}  # a token may come before the update returns
            try:
                await self._take(ref)
            except BaseException:
                self._fingerprints = before
                raise
            self.version = ref.version
            oldest = min((flight.since for flight in self._flights.values()), default=self.version)
            self._fingerprints = {v: mark for v, mark in self._fingerprints.items() if v >= oldest}

    @abstractmethod
    async def release(self, session: str) -> None:
        """Frees what is cached for the session; a request in flight ends with "abort". Unknown sessions are ignored."""

    async def close(self) -> None:
        """Frees everything; requests in flight end with `ClosedError`. May be called twice."""
        if not self.closed:
            self.closed = True
            await self._close()

    def stats(self) -> EngineStats:
        """Counters; cheap, from any thread. Tokens are counted when their request ends, if not before."""
        busy_s = self._busy_s + (time.perf_counter() - self._busy_since if self._flights else 0.0)
        return EngineStats(busy_s, self._sampled_tokens, len(self._flights))

    # What an engine implements.

    @abstractmethod
    async def _start(self) -> str:
        """Loads the model, version 0; returns its fingerprint."""

    @abstractmethod
    async def _sample(self, flight: Flight) -> Completion:
        """Samples a request that was checked and has room for `max_new_tokens`."""

    @abstractmethod
    async def _take(self, ref: WeightsRef) -> None:
        """Serves these weights, newer ones, from its return on; raises as `update_weights`."""

    @abstractmethod
    async def _close(self) -> None:
        """Frees everything; called once, also when the start has failed."""

    # What an engine uses.

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError("engine: closed")
        if self.failure is not None:
            raise self.failure
        if not self._ready:
            raise EngineError("engine: has not been started")

    def _check(self, request: Request) -> None:
        """Raises `EngineError` that names the field when the request makes no sense."""
        who, ids = f"request {request.id}", request.prompt_ids
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
            raise EngineError(f"{who}: prompt_ids: expected a non-empty int32[n] array")
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < self._vocabulary:
                raise EngineError(f"{who}: prompt_ids: token {token}, vocabulary of {self._vocabulary}")
        if request.max_new_tokens < 1:
            raise EngineError(f"{who}: max_new_tokens: {request.max_new_tokens}, expected >= 1")
        if not (np.isfinite(request.temperature) and request.temperature >= 0):
            raise EngineError(f"{who}: temperature: {request.temperature}, expected a finite number >= 0")
        if any(flight.request.id == request.id for flight in self._flights.values()):
            raise EngineError(f"{who}: a request of this id is in flight")
        if request.session in self._flights:
            raise EngineError(f"{who}: session {request.session} already has a request in flight")

    def _fingerprints_of(self, spans: np.ndarray) -> dict[int, str]:
        return {version: self._fingerprints[version] for version in spans[:, 2].tolist()}


def no_tokens(reason: StopReason) -> Completion:
    """No token: there was no room ("context"), or the request was dropped before it began ("abort")."""
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 3), np.int64), reason)


def spans_of(versions: np.ndarray) -> np.ndarray:
    """Run-length form of one policy version per token: int64[m] -> int64[k, 3] rows (start, stop, version)."""
    versions = np.asarray(versions, dtype=np.int64)
    edges = np.append(np.flatnonzero(np.diff(versions, prepend=-1)), versions.size)  # versions are >= 0
    return np.stack([edges[:-1], edges[1:], versions[edges[:-1]]], axis=1)
