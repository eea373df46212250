"""vLLM's process from outside: the environment it starts with, the versions of vLLM that serve, and its load."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.errors import EngineError

BACKEND = "sao"  # name of our weight-transfer backend in vLLM's factory
PARENT_VARIABLE = "SAO_VLLM_PARENT"  # process id of the generator, for vLLM's process
FOLDER_VARIABLE = "SAO_VLLM_FOLDER"  # private folder of the engine


def import_vllm(folder: Path, threads: int) -> str:
    """Imports vLLM; its version. Raises `EngineError` when it is missing, or too old to label tokens with versions."""
    with environment(folder, threads):
        try:
            from vllm.outputs import CompletionOutput
        except ImportError as error:
            raise EngineError(f"engine vllm: cannot be imported: {error}; it needs pip install 'sao[vllm]'") from error
        from vllm import __version__

        if "weight_versions" not in CompletionOutput.__dataclass_fields__:
            raise EngineError(f"engine vllm: vLLM {__version__} does not label tokens with versions; it needs >= 0.32")
        return __version__


def check_heads(model_config: Any) -> None:
    """vLLM finds this only with the first token, and then its process ends."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if not model_config.use_mla and size not in sizes:
        raise EngineError(f"engine vllm: heads of size {size}; vLLM's attention on a CPU computes {sizes}")


def devices_of(index: int, vllm_args: dict[str, Any], count: int) -> str:
    """The GPUs of the engine of generator number `index`: as many as it is spread over, out of `count` visible ones.

    Raises `EngineError` when there are not enough.
    """
    each = int(vllm_args.get("tensor_parallel_size", 1)) * int(vllm_args.get("pipeline_parallel_size", 1))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    found = visible[index * each : (index + 1) * each]
    if len(found) < each:
        raise EngineError(
            f"generator.count: generator {index} needs GPUs {index * each} to {(index + 1) * each - 1}, "
            f"{len(visible)} are visible"
        )
    return ",".join(found)


def text(error: BaseException) -> str:
    """The message without the wrappings of vLLM's remote calls."""
    return str(error).removeprefix("Call to collective_rpc method failed: ") or type(error).__name__


@contextlib.contextmanager
def environment(folder: Path, threads: int, devices: str | None = None) -> Iterator[None]:
    """The process environment that vLLM and its processes start with; put back afterwards. devices: its GPUs."""
    unless_set = {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        # oneDNN, on a CPU, keeps a kernel for every number of tokens in a batch, and after an update the context of all
        # requests is one batch of another size: the default, 1024 kernels, takes hundreds of MiB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    values = {
        PARENT_VARIABLE: str(os.getpid()),
        FOLDER_VARIABLE: str(folder),
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": "600",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # On a CPU: the threads of two engines would all be bound to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    if devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = devices
    before = dict(os.environ)
    os.environ.update(unless_set | before | values)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would override kv_cache_memory_bytes
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@dataclass(slots=True)
class Load:
    """The load by vLLM's scheduler, step by step; to vLLM it is a stat logger."""

    kv_use: float = 0.0  # share of the KV cache in use, 0 to 1
    waiting: int = 0  # requests
    preempted: int = 0  # times a request lost its keys

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Called by vLLM at every step; either may be None."""
        if scheduler_stats is not None:
            self.kv_use, self.waiting = scheduler_stats.kv_cache_usage, scheduler_stats.num_waiting_reqs
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
