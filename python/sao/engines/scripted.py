"""The scripted engine: no model, for tests and dry runs; it answers by a script and writes down all that happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sao.engines.base import Completion, Engine, EngineStats, Flight, Request, StopReason, spans_of
from sao.engines.seeds import derive_seed
from sao.transport.messages import WeightsRef


@dataclass(frozen=True, slots=True)
class Reply:
    """The script's answer to one request; the lengths may disagree on purpose.

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


class ScriptedEngine(Engine):
    """See `Engine`; works without being started. `script(request, n)` answers request number n; without one, random
    words are sampled.

    requests: every request, in order. calls: the names of all calls, in order, with their argument. Both if `record`.
    weights_error: raised by the next `update_weights`, which then changes nothing.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = 48,
        seed: int = 0,
        version: int = 0,
        fingerprint: str = "0" * 32,
        update_delay_s: float = 0.0,
        record: bool = True,
    ) -> None:
        super().__init__()
        self.metadata = {"engine": "scripted", "version_source": "engine", "kv_after_update": "none"}
        self.script = script
        self.weights_error: Exception | None = None
        self.requests: list[Request] = []
        self.calls: list[tuple[str, Any]] = []
        self.version, self._fingerprints, self._ready = version, {version: fingerprint}, True
        self._vocab_size, self._seed, self._update_delay_s, self._record = vocab_size, seed, update_delay_s, record
        self._number = -1

    async def release(self, session: str) -> None:
        """See `Engine`."""
        self._call("release", session)

    def stats(self) -> EngineStats:
        """See `Engine`; it computes nothing."""
        return EngineStats(0.0, self._sampled_tokens, len(self._flights))

    async def _start(self) -> str:
        self._call("start", None)
        return self.fingerprint

    async def _sample(self, flight: Flight) -> Completion:
        request, version, mark = flight.request, self.version, self.fingerprint
        self._call("generate", request.id)
        if self._record:
            self.requests.append(request)
        self._number += 1
        reply = self.script(request, self._number) if self.script else self._babble(request, self._number)
        await asyncio.sleep(reply.delay_s)
        if reply.error is not None:
            raise reply.error
        ids = np.asarray(reply.token_ids, np.int32)
        logprobs = np.full(ids.size, -1.0) if reply.logprobs is None else np.asarray(reply.logprobs, np.float64)
        versions = np.full(ids.size, version) if reply.versions is None else np.asarray(reply.versions)
        marks = {int(v): mark if v == version else f"{int(v):032x}" for v in versions}
        return Completion(
            ids,
            logprobs.astype(np.float32),
            spans_of(versions),
            reply.stop_reason,
            marks if reply.fingerprints is None else reply.fingerprints,
        )

    async def _take(self, ref: WeightsRef) -> None:
        self._call("update_weights", ref.version)
        await asyncio.sleep(self._update_delay_s)
        error, self.weights_error = self.weights_error, None
        if error is not None:
            raise error

    async def _close(self) -> None:
        self._call("close", None)

    def _call(self, name: str, argument: Any) -> None:
        if self._record:
            self.calls.append((name, argument))

    def _babble(self, request: Request, number: int) -> Reply:
        seed = request.seed if request.seed is not None else derive_seed(self._seed, number)
        rng = np.random.default_rng(seed)
        words = [i for i in range(self._vocab_size) if i not in request.stop_token_ids]
        n = int(rng.integers(1, request.max_new_tokens + 1))
        ids = rng.choice(words, n).tolist()
        stops = bool(request.stop_token_ids) and n < request.max_new_tokens
        ids = [*ids, request.stop_token_ids[0]] if stops else ids
        return Reply(ids, [-float(np.log(self._vocab_size))] * len(ids), None, "stop" if stops else "length")
