"""An engine without a model, for tests and dry runs: it answers what a script says and writes down all that happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sao.engines.base import Completion, EngineStats, Request, StopReason, spans_of
from sao.engines.seeds import derive_seed
from sao.errors import ClosedError, EngineError
from sao.transport.reference import WeightsRef


@dataclass(frozen=True, slots=True)
class Reply:
    """What the script answers to one request; the lengths may disagree on purpose.

    versions: one per token; None: the engine's present version. delay_s: before the answer. error: raised instead.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    stop_reason: StopReason = "stop"
    delay_s: float = 0.0
    error: Exception | None = None
    fingerprints: dict[int, str] | None = None


Script = Callable[[Request, int], Reply]


@dataclass
class ScriptedEngine:
    """Implements `Engine`. `script(request, n)` answers request number n; without one, random words are said.

    requests: every request, in order. calls: the names of all calls, in order, with their argument. Both if `record`.
    weights_error: raised by the next `update_weights`, which then changes nothing.
    """

    script: Script | None = None
    vocab_size: int = 48
    seed: int = 0
    version: int = 0
    fingerprint: str = "0" * 32
    requests: list[Request] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    weights_error: Exception | None = None
    update_delay_s: float = 0.0
    closed: bool = False
    record: bool = True
    broken: str | None = None
    _number: int = -1
    _sampled: int = 0
    _running: int = 0

    @property
    def facts(self) -> dict[str, str]:
        """See `Engine`."""
        return {"engine": "scripted", "version_source": "engine", "kv_after_update": "none"}

    async def start(self, ref: WeightsRef | None) -> None:
        """See `Engine`."""
        self._call("start", ref)
        if ref is not None:
            self.version, self.fingerprint = ref.version, ref.fingerprint

    async def generate(self, request: Request) -> Completion:
        """Answers by the script."""
        if self.closed:
            raise ClosedError("engine: closed, cannot generate")
        self._call("generate", request.id)
        if self.record:
            self.requests.append(request)
        self._number += 1
        number = self._number
        version, mark = self.version, self.fingerprint
        reply = self.script(request, number) if self.script else self._babble(request, number)
        self._running += 1
        try:
            await asyncio.sleep(reply.delay_s)
        finally:
            self._running -= 1
        if reply.error is not None:
            raise reply.error
        ids = np.asarray(reply.token_ids, np.int32)
        logprobs = np.full(ids.size, -1.0) if reply.logprobs is None else np.asarray(reply.logprobs, np.float64)
        versions = np.full(ids.size, version) if reply.versions is None else np.asarray(reply.versions)
        self._sampled += ids.size
        marks = {int(v): mark if v == version else f"{int(v):032x}" for v in versions}
        return Completion(
            ids,
            logprobs.astype(np.float32),
            spans_of(versions),
            reply.stop_reason,
            marks if reply.fingerprints is None else reply.fingerprints,
        )

    async def update_weights(self, ref: WeightsRef) -> None:
        """Takes the version; no file is read."""
        self._call("update_weights", ref.version)
        await asyncio.sleep(self.update_delay_s)
        error, self.weights_error = self.weights_error, None
        if error is not None:
            raise error
        if ref.version < self.version:
            raise EngineError(f"weights of version {ref.version}: the engine already serves {self.version}")
        self.version, self.fingerprint = ref.version, ref.fingerprint

    async def release(self, session: str) -> None:
        """See `Engine`."""
        self._call("release", session)

    async def close(self) -> None:
        """See `Engine`."""
        self._call("close", None)
        self.closed = True

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return EngineStats(0.0, self._sampled, self._running, 0)

    def _call(self, name: str, argument: Any) -> None:
        if self.record:
            self.calls.append((name, argument))

    def _babble(self, request: Request, number: int) -> Reply:
        seed = request.seed if request.seed is not None else derive_seed(self.seed, number)
        rng = np.random.default_rng(seed)
        words = [i for i in range(self.vocab_size) if i not in request.stop_token_ids]
        n = int(rng.integers(1, request.max_new_tokens + 1))
        ids = rng.choice(words, n).tolist()
        stops = bool(request.stop_token_ids) and n < request.max_new_tokens
        ids = [*ids, request.stop_token_ids[0]] if stops else ids
        return Reply(ids, [-float(np.log(self.vocab_size))] * len(ids), None, "stop" if stops else "length")
