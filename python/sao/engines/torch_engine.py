"""The torch engine: a `transformers` causal language model inside this process, in a thread of its own.

The thread owns the model and runs calls in their order; while the decoder is busy one of them is its next step, so that
other calls run between two steps. Weights are read and verified outside the thread. Needs nothing but torch and
transformers, on CPU; made for small models and for tests of everything around it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from sao.engines.base import Completion, Engine, EngineStats, Flight, Request
from sao.engines.decoder import Decoder, Ended, weights_of
from sao.engines.positions import probe_tokens, scalings
from sao.errors import ClosedError, EngineError, Error
from sao.storage import model_folder
from sao.transport import weights
from sao.transport.weights import WeightsRef

T = TypeVar("T")


def load_model(path: str | Path) -> transformers.PreTrainedModel:
    """A causal language model in float32 from a local folder, from safetensors only.

    Raises `ConfigError` for a folder that is none.
    """
    return model_folder.load(path, dtype=torch.float32)


def check_decoder(model: transformers.PreTrainedModel, context_tokens: int, path: str | Path) -> None:
    """Refuses a model that the decoder cannot sample from as it scores (`EngineError`), found by sampling some tokens.

    The decoder keeps keys and values of all positions: no state, no window below the context, no scaling that changes
    while a sequence grows.
    """
    for kind, n, _ in scalings(model):
        if context_tokens > n:
            raise EngineError(
                f"model.path: {path}: {kind} scales positions anew beyond {n} tokens, which keys that are kept cannot"
                f" follow: use sampling.context_tokens = {n} at most"
            )
    length = max(1, probe_tokens(model, context_tokens) - 2)
    for draw in range(2):  # rounding may swap two experts of equal score; what is wrong is wrong every time
        rng = np.random.default_rng(draw)
        vocabulary = model.config.get_text_config().vocab_size
        prompts = [rng.integers(1, vocabulary, min(size, length)).astype(np.int32) for size in (5, length)]
        try:
            gap = _gap(model, [Request(str(n), str(n), ids, 2, 1.0, (), seed=n) for n, ids in enumerate(prompts)])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # of its own kind of cache
            gap, reason = np.inf, f"{type(error).__name__}: {error}"
        else:
            reason = f"log-probs differ by {gap:.1e}"
        if gap < 1e-3:
            return
    raise EngineError(
        f"model.path: {path}: the torch engine keeps keys and values of full attention only, and {type(model).__name__}"
        f" needs more ({reason}): use generator.engine = 'vllm'"
    )


def _gap(model: transformers.PreTrainedModel, requests: list[Request]) -> float:
    """Largest distance of log-probs that the decoder gives from those of the model alone."""
    decoder = Decoder(model, len(requests), max(request.prompt_ids.size for request in requests) + 2, 0)
    decoder.waiting.extend(requests)
    gap, ended = 0.0, []
    while decoder.busy:
        ended += decoder.step()
    for request, completion in ended:
        if not isinstance(completion, Completion):
            return float("inf")
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
        with torch.inference_mode():
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        start = request.prompt_ids.size
        expected = logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
        gap = max(gap, float((torch.from_numpy(completion.logprobs) - expected).abs().max()))
    return gap


class TorchEngine(Engine):
    """See `Engine`. One per process is meant; `threads` sets torch's threads for the process.

    slots: sessions whose keys are kept; requests beyond that many at once wait.
    context_tokens: context window; also the length of a slot.
    seed: for requests that bring none; with equal seeds and an equal order of requests the draws are equal.
    """

    def __init__(self, model_path: str | Path, *, slots: int, context_tokens: int, seed: int, threads: int = 1) -> None:
        super().__init__(context_tokens)
        self.metadata = {"engine": "torch", "version_source": "engine", "kv_after_update": "recompute"}
        self._path, self._slots, self._seed = model_path, slots, seed
        self._decoder: Decoder | None = None
        self._stepping = False  # a step is among the thread's calls
        self._thread = ThreadPoolExecutor(1, "torch-engine", torch.set_num_threads, (threads,))

    async def release(self, session: str) -> None:
        """See `Engine`. Returns at once; the slot is free before the next step."""
        if self._decoder is not None:
            self._call(self._decoder.release, session)

    def stats(self) -> EngineStats:
        """See `Engine`; tokens are counted as they are sampled."""
        stats, decoder = super().stats(), self._decoder
        if decoder is None:
            return stats
        running, waiting = len(decoder.running), len(decoder.waiting)
        return replace(stats, sampled_tokens=decoder.sampled_tokens, running=running, waiting=waiting)

    async def _start(self) -> str:
        self._loop = asyncio.get_running_loop()
        decoder, fingerprint = await asyncio.wrap_future(self._call(self._load))
        self._decoder, self._vocabulary = decoder, decoder.vocabulary
        return fingerprint

    async def _sample(self, flight: Flight) -> Completion:
        decoder, flight.handle = self._decoder, self._loop.create_future()
        assert decoder is not None
        self._call(self._add, decoder, flight.request)
        try:
            outcome: Completion | Error = await flight.handle
        except asyncio.CancelledError:
            self._call(decoder.abort, flight.request)
            raise
        if isinstance(outcome, Error):
            raise outcome
        return replace(outcome, fingerprints=self._fingerprints_of(outcome.version_spans))

    async def _take(self, ref: WeightsRef) -> None:
        tensors = await asyncio.to_thread(weights.load, ref)
        self._check_usable()
        assert self._decoder is not None
        await asyncio.wrap_future(self._call(self._decoder.set_weights, tensors, ref.version))

    async def _close(self) -> None:
        """Returns when the thread has ended (at most one step later)."""
        await asyncio.to_thread(self._thread.shutdown)
        self._decoder = None
        self._end(ClosedError("engine: closed while the request was in flight"))

    def _settle(self, ended: Sequence[Ended]) -> None:
        for request, outcome in ended:
            flight = self._flights.get(request.session)
            if flight is not None and flight.request is request and not flight.handle.done():
                flight.handle.set_result(outcome)

    def _end(self, error: Error) -> None:
        self._settle([(flight.request, error) for flight in self._flights.values()])

    def _call(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Has the thread make a call, behind those before it; without effect when it has ended."""
        with contextlib.suppress(RuntimeError):
            return self._thread.submit(self._run, call, *arguments)
        return Future()

    # From here on everything runs in the engine's thread.

    def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        """The call's result. A fault that is none of ours ends the engine."""
        try:
            return call(*arguments)
        except Error:
            raise
        except Exception as fault:
            self.failure = error = EngineError(f"engine: {type(fault).__name__}: {fault}")
            self._loop.call_soon_threadsafe(self._end, error)
            raise error from fault

    def _load(self) -> tuple[Decoder, str]:
        model = load_model(self._path).requires_grad_(False)
        check_decoder(model, self._context, self._path)
        return Decoder(model, self._slots, self._context, self._seed), weights.fingerprint(weights_of(model)[0])

    def _add(self, decoder: Decoder, request: Request) -> None:
        decoder.waiting.append(request)
        if not self._stepping:
            self._stepping = True
            self._call(self._step, decoder)

    def _step(self, decoder: Decoder) -> None:
        if ended := decoder.step():
            self._loop.call_soon_threadsafe(self._settle, ended)
        self._stepping = decoder.busy
        if self._stepping:
            self._call(self._step, decoder)
