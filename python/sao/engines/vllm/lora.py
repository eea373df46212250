"""LoRA adapters as a kind of update for vLLM: the base stays, the adapter of the policy is replaced in place.

An adapter is a folder in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`. A `WeightsRef` names the
folder; its fingerprint is that of the tensors in the file.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from sao.errors import WeightsError
from sao.transport import weights
from sao.transport.messages import WeightsRef


def check_adapter(ref: WeightsRef, rank: int) -> None:
    """Raises `WeightsError` unless the folder of `ref` holds an adapter of at most this rank with its fingerprint."""
    folder, who = Path(ref.path), f"adapter of version {ref.version}"
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"{who}: cannot read {folder}: {error}") from error
    found = config.get("r") if isinstance(config, dict) else None
    if not isinstance(found, int) or not 1 <= found <= rank:
        raise WeightsError(f"{who}: rank {found!r}, expected 1 to vllm_args.lora_rank = {rank}")
    if (mark := weights.fingerprint(tensors)) != ref.fingerprint:
        raise WeightsError(f"{folder}: fingerprint {mark}, expected {ref.fingerprint} for version {ref.version}")


def adapter_request(ref: WeightsRef, *, replace: bool) -> Any:
    """vLLM's request for the adapter of `ref`, the only one; `replace`: load it in place of the one that is there."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, ref.path, load_inplace=replace)


def engine_arguments(rank: int) -> dict[str, Any]:
    """The arguments with which vLLM takes adapters of at most this rank; it knows certain sizes only."""
    sizes = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next((size for size in sizes if size >= rank), rank)}
