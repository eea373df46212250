"""An adapter folder in the form of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

`A` [rank, in] and `B` [out, rank] of each adapted layer add alpha / rank * B A to its weight. Loading libraries take
what does not fit and compute the base; here an adapter is for exactly the layers that it says, or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sao.errors import WeightsError

if TYPE_CHECKING:
    import torch

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_SHOWN: Final = 3  # names in a message
# What changes what an adapter computes, and the one value that is computed here.
_PLAIN: Final = {
    **{"peft_type": "LORA", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none"},
    **{"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "lora_bias": False},
    **{"layers_to_transform": None, "target_parameters": None, "trainable_token_indices": None},
}

Layers = dict[str, tuple[int, int]]  # module name of an adapted layer -> shape of its weight, [out, in]


def file_name(layer: str, factor: str) -> str:
    """The name in the file of a layer's `A` or `B`."""
    return f"{_PREFIX}{layer}.lora_{factor}.weight"


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, alpha: float, layers: Iterable[str], base: str
) -> None:
    """Writes tensors by their file names as an adapter of the named layers. `base`: path of the model beneath."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    described = {
        **{
            "base_model_name_or_path": base,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "init_lora_weights": True,
        },
        **{"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(layers), **_PLAIN},
    }
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def describe(folder: Path, who: str) -> dict[str, Any]:
    """The content of the adapter's configuration. Raises `WeightsError`."""
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{who}: cannot read {folder}: {error}") from error
    if not isinstance(described, dict):
        raise WeightsError(f"{who}: {CONFIG} holds {type(described).__name__}, expected an object")
    return described


def targeted(described: Mapping[str, Any], base: Mapping[str, tuple[int, ...]], who: str) -> Layers:
    """The layers of a model that an adapter's configuration names. base: shapes of the model's tensors by name.

    Raises `WeightsError` for targets that name none.
    """
    targets = _targets(described)
    if targets is None:
        raise WeightsError(f"{who}: {_targets_fault(described)}")
    found: Layers = {}
    for target in targets:
        named = {
            name.removesuffix(".weight"): shape
            for name, shape in base.items()
            if len(shape) == 2 and f".{name}".endswith(f".{target}.weight")
        }
        if not named:
            raise WeightsError(f"{who}: {CONFIG}: target_modules: the model has no layer {target}")
        found |= {name: (outer, inner) for name, (outer, inner) in named.items()}
    return found


def _targets(described: Mapping[str, Any]) -> list[str] | None:
    targets = described.get("target_modules")
    is_list = isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets)
    return targets if is_list else None


def _targets_fault(described: Mapping[str, Any]) -> str:
    return f"{CONFIG}: target_modules = {described.get('target_modules')!r}, expected a list of names"


def read(folder: Path, layers: Layers, *, rank: int, alpha: float, who: str) -> dict[str, torch.Tensor]:
    """The tensors of an adapter for exactly these layers, by their file names. `who` begins every error.

    Raises `WeightsError` that names what is unreadable, absent, left over, misshapen, not finite, or scaled otherwise.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    described = describe(folder, who)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{who}: cannot read {folder}: {error}") from error
    if fault := next(_faults(described, tensors, layers, rank, alpha), None):
        raise WeightsError(f"{who}: {fault}")
    return tensors


def _faults(
    described: dict[str, Any], tensors: dict[str, torch.Tensor], layers: Layers, rank: int, alpha: float
) -> Iterator[str]:
    for key, expected in {"r": rank, "lora_alpha": alpha, **_PLAIN}.items():
        found = described.get(key, None if key in ("peft_type", "r", "lora_alpha") else expected)
        if (found or None) != (expected or None) or (isinstance(found, bool) and expected not in (found, None)):
            yield f"{CONFIG}: {key} = {found!r}, expected {expected!r}"  # empty, false and null are the same
    targets = _targets(described)
    if targets is None:
        yield _targets_fault(described)
        return
    ends = {"." + target for target in targets}
    untold = {layer for layer in layers if not any(f".{layer}".endswith(end) for end in ends)}
    if untold:
        yield f"{CONFIG}: target_modules leave out {_some(untold)}"
    wanted = {file_name(layer, "A"): (rank, inner) for layer, (_, inner) in layers.items()}
    wanted |= {file_name(layer, "B"): (outer, rank) for layer, (outer, _) in layers.items()}
    for names, what in ((wanted.keys() - tensors.keys(), "missing"), (tensors.keys() - wanted.keys(), "unknown")):
        if names:
            yield f"{len(names)} tensors {what}: {_some(names)}"
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted.get(name) or not tensor.is_floating_point():
            yield f"{name}: {tensor.dtype}{list(tensor.shape)}, expected floats {list(wanted.get(name, ()))}"
        elif not tensor.isfinite().all():
            yield f"{name}: not finite"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")
