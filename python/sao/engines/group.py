"""Several engines of one generator as one: more than one GPU, or group of GPUs, behind one line to the broker.

A session stays with the engine that has its keys. Every engine takes every update. One that fails it, or does not take
what the others took, is closed and never used again, so what samples is always one version; its requests end with an
error, and their sessions' next requests go to the others. When all refuse an update, all keep the old weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sao.engines.base import Completion, Engine, EngineStats, Request
from sao.errors import ClosedError, EngineError, WeightsError
from sao.transport.reference import WeightsRef

log = logging.getLogger(__name__)


class EngineGroup:
    """Implements `Engine` (see there) with at least one engine, none of them started."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._lost: dict[int, str] = {}
        self._sessions: dict[str, int] = {}

    @property
    def version(self) -> int:
        """See `Engine`; during an update the oldest of the engines'."""
        return min((self._engines[i].version for i in self._usable()), default=self._engines[0].version)

    @property
    def fingerprint(self) -> str:
        """See `Engine`."""
        version = self.version
        return next((e.fingerprint for i in self._usable() if (e := self._engines[i]).version == version), "")

    @property
    def facts(self) -> dict[str, str]:
        """See `Engine`."""
        return self._engines[0].facts

    @property
    def broken(self) -> str | None:
        """See `Engine`: when the last engine is."""
        return None if self._usable() else self._reasons()

    async def start(self, ref: WeightsRef | None) -> None:
        """See `Engine`. One after the other, since an engine learns from the environment of this process which GPUs are
        its own; when one cannot start, all are closed.
        """
        try:
            for engine in self._engines:
                await engine.start(ref)
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: Request) -> Completion:
        """See `Engine`. A new session goes to the engine with the fewest."""
        index = self._place(request.session)
        try:
            return await self._engines[index].generate(request)
        except ClosedError as error:
            if index not in self._lost:
                raise
            raise EngineError(f"engine {index}: {self._lost[index]}") from error
        finally:
            await self._look(index)

    async def update_weights(self, ref: WeightsRef) -> None:
        """See `Engine`. Returns when every engine that is left serves these weights."""
        asked = self._usable()
        if not asked:
            raise EngineError(f"engine: none is left: {self._reasons()}")
        results = await asyncio.gather(*(self._engines[i].update_weights(ref) for i in asked), return_exceptions=True)
        errors = {i: result for i, result in zip(asked, results, strict=True) if isinstance(result, BaseException)}
        if len(errors) == len(asked):
            for index in asked:
                await self._look(index)
            # One that only refused (and keeps the old weights) is told before one that failed.
            raise min(errors.values(), key=lambda error: not isinstance(error, WeightsError))
        for index, error in errors.items():
            await self._lose(index, f"did not take version {ref.version}: {error}")

    async def release(self, session: str) -> None:
        """See `Engine`."""
        index = self._sessions.pop(session, None)
        if index is not None and index not in self._lost:
            await self._engines[index].release(session)

    async def close(self) -> None:
        """See `Engine`."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def stats(self) -> EngineStats:
        """See `Engine`: sums, and the fullest KV cache; an engine counts as busy for its share of the group."""
        each = [engine.stats() for engine in self._engines]
        return EngineStats(
            sum(s.busy_s for s in each) / len(each),
            sum(s.sampled_tokens for s in each),
            sum(s.running for s in each),
            sum(s.waiting for s in each),
            max(s.kv_use for s in each),
            sum(s.preempted for s in each),
        )

    def _usable(self) -> list[int]:
        return [index for index in range(len(self._engines)) if index not in self._lost]

    def _reasons(self) -> str:
        return "; ".join(f"engine {index}: {reason}" for index, reason in sorted(self._lost.items()))

    def _place(self, session: str) -> int:
        index = self._sessions.get(session)
        if index is None or index in self._lost:
            usable = self._usable()
            if not usable:
                raise EngineError(f"engine: none is left: {self._reasons()}")
            placed = list(self._sessions.values())
            index = self._sessions[session] = min(usable, key=placed.count)
        return index

    async def _look(self, index: int) -> None:
        if index not in self._lost and (reason := self._engines[index].broken) is not None:
            await self._lose(index, reason)

    async def _lose(self, index: int, reason: str) -> None:
        if index in self._lost:
            return
        self._lost[index] = reason
        log.error("engine %d of %d is not used any more: %s", index, len(self._engines), reason)
        try:
            await self._engines[index].close()
        except (EngineError, ClosedError) as error:
            log.warning("engine %d: close: %s", index, error)
