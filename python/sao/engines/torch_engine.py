"""The torch engine: a `transformers` causal language model inside this process, in a thread of its own.

The thread owns the model; the asyncio loop only leaves commands in its inbox and is told of results, once per step. An
idle thread sleeps until a command comes. Weights are read and verified outside the thread and swapped in between two
steps. Needs nothing but torch and transformers, on CPU; made for small models and for tests of everything around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from sao.engines.base import Completion, EngineStats, Request, empty_completion
from sao.engines.decoder import Decoder, weights_of
from sao.errors import ClosedError, EngineError, Error
from sao.transport import weights
from sao.transport.weights import WeightsRef

Outcome = tuple[asyncio.Future[Any], Any]  # the second: a result, or an exception to raise


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


class TorchEngine:
    """Implements `Engine` (see there). One per process is meant; `threads` sets torch's threads for the process.

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
        self._path, self._slots, self._context, self._seed = model_path, slots, context_tokens, seed
        self._dtype = getattr(torch, dtype)
        self._threads = threads
        self._decoder: Decoder | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Any, ...]] = deque()
        self._closed = False
        self._failure: Exception | None = None
        self._waiting: deque[Request] = deque()
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._busy_s = 0.0

    @property
    def version(self) -> int:
        """See `Engine`."""
        return self._decoder.version if self._decoder else 0

    @property
    def fingerprint(self) -> str:
        """See `Engine`."""
        return self._decoder.fingerprint if self._decoder else ""

    @property
    def facts(self) -> dict[str, str]:
        """See `Engine`: the decoder stamps every token, and computes keys and values anew after an update."""
        return {"engine": "torch", "version_source": "engine", "kv_after_update": "recompute"}

    @property
    def broken(self) -> str | None:
        """See `Engine`."""
        return None if self._failure is None else str(self._failure)

    async def start(self, ref: WeightsRef | None = None) -> None:
        """See `Engine`. Raises `EngineError` when started twice."""
        if self._thread is not None:
            raise EngineError("engine: started twice")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        await self._send("load")
        if ref is not None:
            await self.update_weights(ref)

    async def generate(self, request: Request) -> Completion:
        """See `Engine`."""
        try:
            return await self._send("generate", request)
        except asyncio.CancelledError:
            self._post("cancel", request, None)
            raise

    async def update_weights(self, ref: WeightsRef) -> None:
        """See `Engine`."""
        tensors = await asyncio.to_thread(weights.load, ref)
        await self._send("update", ref, tensors)

    async def release(self, session: str) -> None:
        """See `Engine`. Returns at once; the slot is free before the next step."""
        self._post("release", session, None)

    async def close(self) -> None:
        """See `Engine`. Returns when the thread has ended (at most one step later)."""
        thread = self._thread
        with self._wake:
            self._closed = True
            self._wake.notify()
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def stats(self) -> EngineStats:
        """See `Engine`."""
        decoder = self._decoder
        if decoder is None:
            return EngineStats()
        return EngineStats(self._busy_s, decoder.sampled_tokens, decoder.running, len(self._waiting))

    def _send(self, kind: str, *arguments: Any) -> asyncio.Future[Any]:
        """Leaves a command for the thread; the future is its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._post(kind, *arguments, future):
            failure = self._failure or ClosedError(f"engine: closed, cannot {kind}")
            future.set_exception(failure)
        return future

    def _post(self, *command: Any) -> bool:
        with self._wake:
            if self._closed or self._thread is None:
                return False
            self._inbox.append(command)
            self._wake.notify()
            return True

    # From here on everything runs in the engine's thread.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        error: Exception = ClosedError("engine: closed while the request was in flight")
        commands: list[tuple[Any, ...]] | None = []
        try:
            while (commands := self._next()) is not None:
                outcomes: list[Outcome] = []
                for kind, *arguments, future in commands:
                    self._handle(kind, arguments, future, outcomes)
                self._admit(outcomes)
                if self._decoder is not None and self._decoder.running:
                    began = time.perf_counter()
                    for request, result in self._decoder.step():
                        self._answer(request, result, outcomes)
                    self._busy_s += time.perf_counter() - began
                self._tell(outcomes)
        except Exception as fault:
            error = EngineError(f"engine: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._failure = error
        with self._wake:
            self._closed = True
            left = [command[-1] for command in (*(commands or ()), *self._inbox)]
            self._inbox.clear()
        self._tell([(future, error) for future in (*self._futures.values(), *left)])
        self._futures.clear()
        self._decoder = None

    def _next(self) -> list[tuple[Any, ...]] | None:
        """The commands that came; sleeps when there is nothing to do; None after `close`."""
        with self._wake:
            while not (self._closed or self._inbox or self._waiting or (self._decoder and self._decoder.running)):
                self._wake.wait()
            if self._closed:
                return None
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _handle(self, kind: str, arguments: list[Any], future: Any, outcomes: list[Outcome]) -> None:
        try:
            if kind == "load":
                self._load()
            elif kind == "generate":
                self._enqueue(arguments[0], future, outcomes)
                return
            elif kind == "cancel":
                self._drop(arguments[0])
                return
            elif kind == "update":
                self._update(*arguments)
            else:
                self._release(arguments[0], outcomes)
            outcomes.append((future, None))
        except Error as error:
            outcomes.append((future, error))

    def _load(self) -> None:
        model = load_model(self._path, self._dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        decoder = Decoder(model, self._slots, self._context, self._seed)
        decoder.set_version(0, weights.fingerprint(weights_of(model)))
        self._decoder = decoder

    def _enqueue(self, request: Request, future: asyncio.Future[Completion], outcomes: list[Outcome]) -> None:
        if self._decoder is None:
            raise EngineError(f"request {request.id}: the engine has not been started")
        if request.id in self._futures:
            raise EngineError(f"request {request.id}: a request of this id is in flight")
        refusal = self._decoder.refuse(request)
        if any(other.session == request.session for other in self._waiting):
            raise EngineError(f"request {request.id}: session {request.session} already has a request in flight")
        if refusal is not None:
            outcomes.append((future, refusal))
            return
        self._futures[request.id] = future
        self._waiting.append(request)

    def _admit(self, outcomes: list[Outcome]) -> None:
        while self._waiting and self._decoder is not None and self._decoder.admit(self._waiting[0]):
            self._waiting.popleft()

    def _answer(self, request: Request, result: Any, outcomes: list[Outcome]) -> None:
        future = self._futures.pop(request.id, None)
        if future is not None:
            outcomes.append((future, result))

    def _update(self, ref: WeightsRef, tensors: dict[str, torch.Tensor]) -> None:
        decoder = self._decoder
        if decoder is None:
            raise EngineError(f"weights of version {ref.version}: the engine has not been started")
        if ref.version == decoder.version and ref.fingerprint == decoder.fingerprint:
            return
        if ref.version < decoder.version or (ref.version == decoder.version and decoder.sampled_tokens):
            raise EngineError(
                f"weights of version {ref.version} ({ref.fingerprint}): the engine already serves "
                f"version {decoder.version} ({decoder.fingerprint})"
            )
        decoder.set_weights(tensors, ref.version, ref.fingerprint)

    def _drop(self, request: Request) -> None:
        """Ends a request whose caller has gone; its session stays."""
        if self._futures.pop(request.id, None) is None:
            return
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._decoder is not None:
            self._decoder.abort(request)

    def _release(self, session: str, outcomes: list[Outcome]) -> None:
        for request in [request for request in self._waiting if request.session == session]:
            self._waiting.remove(request)
            self._answer(request, empty_completion("abort"), outcomes)
        ended = self._decoder.release(session) if self._decoder is not None else None
        if ended is not None:
            request, completion = ended
            self._answer(request, completion, outcomes)

    def _tell(self, outcomes: list[Outcome]) -> None:
        if outcomes and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, outcomes)


def _settle(outcomes: list[Outcome]) -> None:
    for future, outcome in outcomes:
        if future is None or future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
