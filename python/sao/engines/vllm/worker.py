"""The weight-transfer backend inside vLLM's own process: it reads published safetensors files.

vLLM imports this module by name (`worker_extension_cls`), which registers the backend "sao" with its factory. vLLM's
three steps map onto a transaction:

    start_weight_update    nothing is touched
    update_weights         the file is read and verified and the tensors are staged; a refusal leaves the old weights
    finish_weight_update   the staged tensors are loaded, and what the layers now compute is compared with them

Only the last step can leave a model that is neither old nor new; the engine treats its failure as fatal.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from sao.engines.vllm.process import BACKEND, FOLDER_VARIABLE, PARENT_VARIABLE
from sao.errors import WeightsError
from sao.storage import parent_death
from sao.transport import weights
from sao.transport.weights import WeightsRef

PROBED_COLUMNS = 8


class FileWeightTransfer(WeightTransferEngine[Any, Any]):
    """Loads one safetensors file a version; complete and verified, or refused before anything changes.

    Every worker of a tensor-parallel engine reads the same file; vLLM's loaders take their shards of it.
    """

    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        parent_death.watch(int(os.environ[PARENT_VARIABLE]), _end)
        folder = Path(self.model_config.model)
        self._tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        dtype: Any = self.model_config.dtype  # resolved by now
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        tensors = {name: tensor.to(dtype) for file in files for name, tensor in file.items()}
        second = self._second_names(tensors)
        initial = {name: tensor for name, tensor in tensors.items() if name not in second}
        self._wanted = {name: tensor.to("meta") for name, tensor in initial.items()}
        self._staged: tuple[WeightsRef, dict[str, torch.Tensor]] | None = None
        self.report: dict[str, Any] = {"version": 0, "fingerprint": weights.fingerprint(initial), "probed": 0}

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing: there is nobody to meet."""

    def start_weight_update(self) -> None:
        """Forgets what was staged; the model stays as it is."""
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Reads, verifies and stages. The base class would synchronize an accelerator, which a CPU does not have."""
        self.receive_weights(WeightsRef(**update_info))

    def receive_weights(self, update_info: WeightsRef) -> None:
        """Raises `WeightsError` when fingerprint, names, types or shapes differ; nothing has changed then."""
        tensors = weights.load(update_info)
        fitting = weights.fit(update_info.version, tensors, self._wanted, self._second_names(tensors))
        self._staged = update_info, fitting

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Loads what is staged through vLLM's layer-wise reload, then checks what the layers compute.

        Raises `WeightsError` if a layer still serves other weights; the model must not be used then.
        """
        assert self._staged is not None
        ref, tensors = self._staged
        self._staged = None
        model: Any = self.model
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, self.model_config)
        if self._tied:
            # A tied head is skipped by the reload, but on CPU it computes with a packed copy of the shared weight.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        probed = probe(model, tensors, ref.version) if self.parallel_config.world_size == 1 else 0
        self.report = {"version": ref.version, "fingerprint": ref.fingerprint, "probed": probed}

    def _second_names(self, names: Collection[str]) -> dict[str, str]:
        """The second name of a tied embedding -> the first."""
        first = next((name for name in names if name.endswith("embed_tokens.weight")), "")
        return {name: first for name in names if self._tied and name.endswith("lm_head.weight")}

    def shutdown(self) -> None:
        """Drops what is staged."""
        self._staged = None
        # The process is about to end, and to collect the garbage of its whole heap several times would take seconds.
        gc.freeze()
        atexit.register(gc.freeze)


class WorkerExtension:
    """Mixed into vLLM's worker; reachable by `collective_rpc`."""

    weight_transfer_engine: FileWeightTransfer

    def sao_report(self) -> dict[str, Any]:
        """version and fingerprint of the weights in this worker, and how many layers were probed after the load."""
        return self.weight_transfer_engine.report


def probe(model: torch.nn.Module, tensors: dict[str, torch.Tensor], seed: int) -> int:
    """Compares what the layers compute with the tensors they were given, exactly, and returns how many were compared.

    tensors: checkpoint name -> full tensor (no tensor parallelism). A linear layer is fed unit vectors: its outputs are
    columns of its weight without rounding, so that a packed copy of old weights is found, and a change in the last bit.
    Other parameters are compared directly; quantized layers and those of unknown checkpoint names are passed over.
    Raises `WeightsError` that names the layer.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    embedding = next((name for name in tensors if name.endswith("embed_tokens.weight")), "")
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase | VocabParallelEmbedding):
            continue
        if not isinstance(module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            continue
        prefix, _, last = name.rpartition(".")
        wanted = [f"{prefix}.{part}.weight".lstrip(".") for part in packed.get(last, [last])]
        if isinstance(module, ParallelLMHead) and wanted[0] not in tensors:
            wanted = [embedding]
        parts = [tensors[key] for key in wanted if key in tensors]
        if len(parts) != len(wanted):
            continue
        columns = torch.randint(parts[0].shape[1], (PROBED_COLUMNS,), generator=generator)
        expected = torch.cat([part[:, columns] for part in parts]).T
        _same(name, _columns(module, columns, parts[0].shape[1])[:, : expected.shape[1]], expected)
        count += 1
    for name, parameter in model.named_parameters():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape == parameter.shape:
            _same(name, parameter, tensor)
            count += 1
    if not count:
        raise WeightsError(f"weights: none of the layers of {type(model).__name__} could be compared after the update")
    return count


def _columns(module: Any, columns: torch.Tensor, width: int) -> torch.Tensor:
    """These columns of the weight as the layer applies it: [PROBED_COLUMNS, out]."""
    looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    if looked_up or module.weight.device.type != "cpu":
        return module.weight[:, columns.to(module.weight.device)].T
    unit = torch.nn.functional.one_hot(columns, width).to(module.weight.dtype)
    return module.quant_method.apply(module, unit, None)


def _same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected.to(device=found.device, dtype=found.dtype)):
        raise WeightsError(f"{name}: computes with other weights than the update brought")


def _end() -> None:
    """Ends this process whose generator was killed; in order, vLLM ends its processes itself."""
    shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)
    os._exit(1)


# The reload warns about every layer without weights of its own (rotary embedding, tied head); `probe` checks them all.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)

WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
