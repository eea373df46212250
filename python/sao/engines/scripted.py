"""The scripted engine: no model, for dry runs of the whole system."""

from __future__ import annotations

import numpy as np

from sao.engines.base import Completion, Engine, Flight, Request, StopReason, spans_of
from sao.engines.seeds import derive_seed
from sao.transport.messages import WeightsRef


class ScriptedEngine(Engine):
    """See `Engine`; works without being started. It samples random words, all equally likely, and takes any weights."""

    def __init__(self, *, vocab_size: int = 48, seed: int = 0) -> None:
        super().__init__()
        self.metadata = {"engine": "scripted", "version_source": "engine", "kv_after_update": "none"}
        self._fingerprints, self._ready = {0: "0" * 32}, True
        self._vocab_size, self._seed, self._number = vocab_size, seed, -1

    async def release(self, session: str) -> None:
        """Nothing is cached."""

    async def _start(self) -> str:
        return self.fingerprint

    async def _sample(self, flight: Flight) -> Completion:
        request = flight.request
        self._number += 1
        rng = np.random.default_rng(derive_seed(self._seed, self._number) if request.seed is None else request.seed)
        words = [i for i in range(self._vocab_size) if i not in request.stop_token_ids]
        n = int(rng.integers(1, request.max_new_tokens + 1))
        ids = rng.choice(words, n)
        stops = bool(request.stop_token_ids) and n < request.max_new_tokens
        if stops:
            ids = np.append(ids, request.stop_token_ids[0])
        reason: StopReason = "stop" if stops else "length"
        if (n := watched(request, ids)) < ids.size:
            ids, reason = ids[:n], "watch"
        logprobs = np.full(ids.size, -np.log(self._vocab_size), np.float32)
        spans, marks = spans_of(np.full(ids.size, self.version)), {self.version: self.fingerprint}
        return Completion(ids.astype(np.int32), logprobs, spans, reason, marks)

    async def _take(self, ref: WeightsRef) -> None: ...

    async def _close(self) -> None: ...


def watched(request: Request, ids: np.ndarray) -> int:
    """Tokens of a completion up to the one at which the request's watch ends it."""
    if request.watch is not None:
        for at, token in enumerate(ids[:-1].tolist(), 1):
            if request.watch(token):
                return at
        request.watch(int(ids[-1]))
    return int(ids.size)
