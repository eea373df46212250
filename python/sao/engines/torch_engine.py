"""The torch engine: a `transformers` causal language model inside this process, in a thread of its own.

The thread owns the model and runs the calls in its inbox between two steps; results go back to the asyncio loop once
per step. An idle thread sleeps until a call comes. Weights are read and verified outside the thread. Needs nothing but
torch and transformers, on CPU; made for small models and for tests of everything around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import torch
import transformers

from sao.engines.base import Completion, Engine, EngineStats, Flight
from sao.engines.decoder import Decoder, weights_of
from sao.errors import ClosedError, EngineError, Error
from sao.transport import weights
from sao.transport.weights import WeightsRef

Outcome = tuple[Hashable, Any]  # whose it is, and a result or an exception to raise


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A causal language model from a local folder, from safetensors only.

    Raises `EngineError` for a folder that is none, and for layers other than dense full attention (sliding windows and
    recurrent layers keep state that the slot cache does not hold).
    """
    if not (Path(path) / "config.json").is_file():
        raise EngineError(f"model.path: {path}: no config.json in this folder")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path: {path}: cannot be loaded: {error}") from error
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineError(f"model.path: {path}: layer types {sorted(kinds)}; the torch engine has full_attention only")
    return model


class TorchEngine(Engine):
    """See `Engine`. One per process is meant; `threads` sets torch's threads for the process.

    slots: sessions whose keys are kept; requests beyond that many at once wait.
    context_tokens: context window; also the length of a slot.
    seed: for requests that bring none; with equal seeds and an equal order of requests the draws are equal.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        slots: int,
        context_tokens: int,
        seed: int,
        dtype: Literal["float32", "bfloat16", "float64"] = "float32",
        threads: int | None = None,
    ) -> None:
        super().__init__(context_tokens)
        self._path, self._slots, self._seed = model_path, slots, seed
        self._dtype = getattr(torch, dtype)
        self._threads = threads
        self._decoder: Decoder | None = None
        self._compute_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._answers: dict[Hashable, asyncio.Future[Any]] = {}  # of requests and of other calls

    @property
    def metadata(self) -> dict[str, str]:
        """See `Engine`: the decoder stamps every token, and computes keys and values anew after an update."""
        return {"engine": "torch", "version_source": "engine", "kv_after_update": "recompute"}

    async def release(self, session: str) -> None:
        """See `Engine`. Returns at once; the slot is free before the next step."""
        if self._decoder is not None:
            self._inbox.put(partial(self._decoder.release, session))

    def stats(self) -> EngineStats:
        """See `Engine`. busy_s: time in the model; tokens are counted as they are sampled."""
        decoder = self._decoder
        if decoder is None:
            return EngineStats()
        return EngineStats(self._compute_s, decoder.sampled_tokens, decoder.running, len(decoder.waiting))

    async def _start(self) -> str:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        self._decoder, fingerprint = await self._in_thread(self._load)
        self._vocabulary = self._decoder.vocabulary
        return fingerprint

    async def _sample(self, flight: Flight) -> Completion:
        decoder, request = self._decoder, flight.request
        assert decoder is not None
        future = self._answers[request] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(decoder.add, request))
        try:
            completion: Completion = await future
        except asyncio.CancelledError:
            self._answers.pop(request, None)
            self._inbox.put(partial(decoder.abort, request))
            raise
        return replace(completion, fingerprints=self._fingerprints_of(completion.version_spans))

    async def _take(self, ref: WeightsRef) -> None:
        tensors = await asyncio.to_thread(weights.load, ref)
        self._check_usable()
        assert self._decoder is not None
        await self._in_thread(partial(self._decoder.set_weights, tensors, ref.version))

    async def _close(self) -> None:
        """Returns when the thread has ended (at most one step later)."""
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._decoder = None
        self._end(ClosedError("engine: closed while the request was in flight"))

    def _in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """The future result of a call in the engine's thread."""
        future = self._answers[call] = asyncio.get_running_loop().create_future()

        def answer() -> None:
            try:
                result = call()
            except Error as error:
                result = error
            self._reply(self._settle, [(call, result)])

        self._inbox.put(answer)
        return future

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for key, outcome in outcomes:
            future = self._answers.pop(key, None)
            if future is None or future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _end(self, error: Exception) -> None:
        """All that wait for an answer get this error."""
        self._settle([(key, error) for key in self._answers])

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._end(error)

    # From here on everything runs in the engine's thread.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while True:
                decoder = self._decoder
                if decoder is None or not decoder.busy or not self._inbox.empty():
                    if (call := self._inbox.get()) is None:
                        return
                    call()
                    continue
                began = time.perf_counter()
                ended = decoder.step()
                self._compute_s += time.perf_counter() - began
                if ended:
                    self._reply(self._settle, ended)
        except Exception as fault:
            error = EngineError(f"engine: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._reply(self._fail, error)

    def _load(self) -> tuple[Decoder, str]:
        model = load_model(self._path, self._dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return Decoder(model, self._slots, self._context, self._seed), weights.fingerprint(weights_of(model))

    def _reply(self, take: Callable[[Any], None], what: Any) -> None:
        """Has the loop take something."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(take, what)
