"""Weight updates while an engine works, written down and then checked token by token against the weights themselves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines.full_forward import full_forward

from sao.engines.base import Completion, Request
from sao.rollout.recorder import check_completion
from sao.transport.weights import WeightsRef, fingerprint, publish

TOLERANCE = 1e-4  # nats; between one forward pass of `transformers` and the engine's steps, both float32
APART = 1e-3  # nats; further than this from the log-prob under other weights


@dataclass
class Update:
    """One update: seconds of the call and by cause, and until the first token of a request made right behind it."""

    version: int
    seconds: float
    causes: dict[str, float]
    first_token_s: float
    fingerprint: str
    rss_bytes: dict[str, int]


@dataclass
class Live:
    """`workers` conversations at once on an engine, each a new request as soon as the last has ended.

    make_model: version -> model with the weights of that version.
    """

    engine: Any
    make_model: Callable[[int], torch.nn.Module]
    published: Path
    workers: int
    new_tokens: int = 120
    prompt_tokens: int = 40
    seed: int = 0
    rss: Callable[[], dict[str, int]] = dict
    done: list[tuple[Request, Completion]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._rng = np.random.default_rng(self.seed)

    def request(self, new_tokens: int | None = None) -> Request:
        name = f"live-{next(self._numbers)}"
        prompt = self._rng.integers(3, 48, self.prompt_tokens).astype(np.int32)
        return Request(name, name, prompt, new_tokens or self.new_tokens, 1.0, ())

    async def worker(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            request = self.request(int(self._rng.integers(self.new_tokens // 2, self.new_tokens + 1)))
            self.done.append((request, await self.engine.generate(request)))

    async def again(self, asked: Sequence[Request]) -> None:
        """Requests with the same prompts, together."""
        requests = [replace(self.request(), prompt_ids=request.prompt_ids) for request in asked]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        self.done += zip(requests, completions, strict=True)

    async def first_token_s(self) -> float:
        began = time.perf_counter()
        request = self.request(1)
        self.done.append((request, await self.engine.generate(request)))
        return time.perf_counter() - began

    async def steady(self, seconds: float) -> tuple[float, list[float]]:
        """Tokens per second without updates, and the seconds to the first token of requests made meanwhile."""
        stop = asyncio.Event()
        workers = [asyncio.create_task(self.worker(stop)) for _ in range(self.workers)]
        await asyncio.sleep(1.0)
        before, began, firsts = len(self.done), time.perf_counter(), []
        while time.perf_counter() < began + seconds:
            firsts.append(await self.first_token_s())
            await asyncio.sleep(0.1)
        rate = sum(c.token_ids.size for _, c in self.done[before:]) / (time.perf_counter() - began)
        stop.set()
        await asyncio.gather(*workers)
        return rate, firsts

    async def play(self, versions: range, pause_s: float) -> tuple[float, int]:
        """All updates under load, `pause_s` apart; returns seconds and sampled tokens from the first to the last."""
        stop = asyncio.Event()
        workers = [asyncio.create_task(self.worker(stop)) for _ in range(self.workers)]
        await asyncio.sleep(pause_s)
        before, began = self.engine.stats().sampled_tokens, time.perf_counter()
        for version in versions:
            ref = self.publish(version)
            at = time.perf_counter()
            await self.engine.update_weights(ref)
            seconds = time.perf_counter() - at
            assert (self.engine.version, self.engine.fingerprint) == (version, ref.fingerprint)
            causes = dict(getattr(self.engine, "update_s", {}))
            self.updates.append(
                Update(version, seconds, causes, await self.first_token_s(), ref.fingerprint, self.rss())
            )
            await asyncio.sleep(pause_s)
        took, tokens = time.perf_counter() - began, self.engine.stats().sampled_tokens - before
        stop.set()
        await asyncio.gather(*workers)
        return took, tokens

    def publish(self, version: int) -> WeightsRef:
        return publish(dict(self.make_model(version).named_parameters()), self.published, version, keep=3)

    def check(self, *, first_spans: bool = False) -> dict[str, Any]:
        """Every sampled token against the weights of its version, and every boundary against those beside it.

        first_spans: only tokens before the first update of their request, for an engine that keeps old keys.
        Raises `AssertionError` for a token that its version's weights do not give within `TOLERANCE`, and for a wrong
        fingerprint. Returns counts and the largest difference.
        """
        by_version: dict[int, list[tuple[Request, Completion, int]]] = defaultdict(list)
        for request, completion in self.done:
            check_completion(request, completion)
            for index, (_, _, version) in enumerate(completion.version_spans.tolist()[: 1 if first_spans else None]):
                by_version[version].append((request, completion, index))
        worst, tokens, boundaries, apart = 0.0, 0, 0, 0
        for version, found in sorted(by_version.items()):
            model = self.make_model(version)
            mark = fingerprint(dict(model.named_parameters()))
            for request, completion, index in found:
                assert completion.fingerprints[version] == mark, f"version {version}: {completion.fingerprints}"
                start, stop, _ = completion.version_spans[index].tolist()
                difference = np.abs(full_forward(model, request, completion) - completion.logprobs)
                here = float(difference[start:stop].max())
                assert here < TOLERANCE, f"{request.id}, version {version}, tokens {start} to {stop}: {here}"
                worst, tokens = max(worst, here), tokens + stop - start
                beside = [at for at in (start - 1, stop) if 0 <= at < completion.token_ids.size]
                boundaries += len(beside)
                apart += int((difference[beside] > APART).sum())
        return {
            "requests": len(self.done),
            "tokens": tokens,
            "versions": len(by_version),
            "requests_over_several_versions": sum(len(c.version_spans) > 1 for _, c in self.done),
            "most_versions_in_a_request": max(len(c.version_spans) for _, c in self.done),
            "largest_difference_nats": worst,
            "tokens_beside_a_boundary": boundaries,
            "of_these_told_apart": apart,
        }
