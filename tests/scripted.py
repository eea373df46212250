"""An engine that answers by a script of the test and writes down all that happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sao.engines import scripted
from sao.engines.base import Completion, Flight, Request, StopReason, spans_of
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


class ScriptedEngine(scripted.ScriptedEngine):
    """`script(request, n)` answers request number n; without one, random words are sampled.

    requests: every request, in order. calls: the names of all calls, in order, with their argument. Both if `record`.
    weights_error: raised by the next `update_weights`, which then changes nothing.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        version: int = 0,
        fingerprint: str = "0" * 32,
        update_delay_s: float = 0.0,
        record: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.version, self._fingerprints = version, {version: fingerprint}
        self.script = script
        self.weights_error: Exception | None = None
        self.requests: list[Request] = []
        self.calls: list[tuple[str, Any]] = []
        self._update_delay_s, self._record = update_delay_s, record

    async def release(self, session: str) -> None:
        self._call("release", session)

    async def _start(self) -> str:
        self._call("start", None)
        return await super()._start()

    async def _sample(self, flight: Flight) -> Completion:
        request, version, mark = flight.request, self.version, self.fingerprint
        self._call("generate", request.id)
        if self._record:
            self.requests.append(request)
        if self.script is None:
            return await super()._sample(flight)
        self._number += 1
        reply = self.script(request, self._number)
        await asyncio.sleep(reply.delay_s)
        if reply.error is not None:
            raise reply.error
        ids, reason = np.asarray(reply.token_ids, np.int32), reply.stop_reason
        if ids.size and (n := scripted.watched(request, ids)) < ids.size:
            ids, reason = ids[:n], "watch"
        logprobs = np.full(ids.size, -1.0) if reply.logprobs is None else np.asarray(reply.logprobs, np.float64)
        versions = np.full(ids.size, version) if reply.versions is None else np.asarray(reply.versions)
        marks = {int(v): mark if v == version else f"{int(v):032x}" for v in versions}
        return Completion(
            ids,
            logprobs.astype(np.float32),
            spans_of(versions),
            reason,
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
