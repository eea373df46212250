"""LoRA adapters as a kind of update for vLLM: the base stays, the adapter of the policy is replaced in place.

An adapter is a folder in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`. A `WeightsRef` names the
folder; its fingerprint is that of the tensors in the file. vLLM takes an adapter for layers that there are not, or for
half of those that it names, and computes the base there: so all of it is checked here, before generation pauses.
"""

from pathlib import Path
from typing import Any

from sao.errors import WeightsError
from sao.storage import adapter_folder
from sao.storage.model_folder import Shapes
from sao.transport import weights
from sao.transport.messages import WeightsRef


def check_adapter(ref: WeightsRef, rank: int, base: Shapes) -> None:
    """Raises `WeightsError` unless the folder of `ref` holds a whole adapter of at most this rank with its fingerprint.

    base: shapes of the model beneath, by name. The adapter has both factors of every layer that its targets name.
    """
    folder, who = Path(ref.path), f"adapter of version {ref.version}"
    described = adapter_folder.describe(folder, who)
    found, alpha = described.get("r"), described.get("lora_alpha")
    if type(found) is not int or not 1 <= found <= rank:
        raise WeightsError(f"{who}: rank {found!r}, expected 1 to vllm_args.lora_rank = {rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise WeightsError(f"{who}: lora_alpha {alpha!r}, expected a number above 0")
    layers = adapter_folder.targeted(described, base, who)
    tensors = adapter_folder.read(folder, layers, rank=found, alpha=alpha, who=who)
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
