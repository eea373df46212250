"""LoRA: low-rank additions to the linear layers of a frozen base, and the base with two of them as policy and critic.

A layer computes x W' + alpha / rank * (x A') B' with the factors of the part whose turn it is. `A` begins random, drawn
whole from the run's seed and its name, so that it is the same on any number of ranks; `B` begins at zero.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sao.config.sections import LoraSection
from sao.errors import ConfigError
from sao.storage import adapter_folder

PARTS = ("policy", "critic")
FOLDERS = {"policy": "adapter", "critic": "critic_adapter"}  # of a checkpoint
_NAME = re.compile(r"(?:^|\.)(policy|critic)_([AB])$")
_ROUTER = re.compile(r"(^|_)(gate|router)$")


class Turn:
    """Whose adapter is computed: one object, shared by all layers of a base."""

    part = ""


class LoraLinear(nn.Linear):
    """A frozen linear layer with the factors `PART_A` [rank, in] and `PART_B` [out, rank] of those who adapt it."""

    def __init__(self, base: nn.Linear, turn: Turn, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.turn, self.scale, self.parts = turn, scale, set[str]()

    def add(self, part: str, rank: int, seed: str) -> None:
        """Gives a part its factors, float32 or the base's float64."""
        device, dtype = self.weight.device, torch.promote_types(self.weight.dtype, torch.float32)
        drawn = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest()))
        bound = 1 / math.sqrt(self.in_features)  # as PEFT draws
        a = torch.empty(rank, self.in_features, dtype=dtype).uniform_(-bound, bound, generator=drawn)
        self.register_parameter(f"{part}_A", nn.Parameter(a.to(device)))
        self.register_parameter(f"{part}_B", nn.Parameter(a.new_zeros(self.out_features, rank).to(device)))
        self.parts.add(part)

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if (part := self.turn.part) not in self.parts:
            return out
        a, b = getattr(self, f"{part}_A"), getattr(self, f"{part}_B")
        return out + self.scale * linear(linear(input, a.to(input.dtype)), b.to(input.dtype))

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The weight with an adapter in it, in the adapter's type: in 16 bits a small one would be rounded away."""
        return weight.to(a.dtype) + self.scale * (b @ a)


class OneBase(nn.Module):
    """Policy and critic on one frozen base: the root through which both are called."""

    def __init__(self, models: Mapping[str, nn.Module], turn: Turn) -> None:
        super().__init__()
        self.models, self.turn = nn.ModuleDict(models), turn

    def forward(self, part: str, *inputs: Any, **options: Any) -> Any:
        self.turn.part = part
        return self.models[part].forward(*inputs, **options)


def inject(
    lm: nn.Module, layers: Collection[nn.Module], settings: LoraSection, seed: int, left_out: Mapping[str, set[str]]
) -> Turn:
    """Freezes a model and gives its linear layers inside `layers` the adapters of the parts in `left_out`.

    left_out: of each part the modules inside of which it adapts nothing. Raises `ConfigError` for targets that are not
    there.
    """
    lm.requires_grad_(False)
    turn, found, inside = Turn(), set[str](), {id(module) for layer in layers for module in layer.modules()}
    for name, module in list(lm.named_modules()):
        last = name.rpartition(".")[2]
        if type(module) is not nn.Linear or id(module) not in inside or _ROUTER.search(last):
            continue
        if settings.targets != "all" and last not in settings.targets:
            continue
        found.add(last)
        layer = LoraLinear(module, turn, settings.alpha / settings.rank)
        for part, names in left_out.items():
            if not any(name.startswith(f"{other}.") for other in names):
                layer.add(part, settings.rank, f"{seed} {part} {name}")
        lm.set_submodule(name, layer)
    wanted = {"linear layers inside decoder layers"} if settings.targets == "all" and not found else set()
    if absent := wanted or (set() if settings.targets == "all" else set(settings.targets) - found):
        raise ConfigError(f"lora.targets: {', '.join(sorted(absent))}: not found in {type(lm).__name__}")
    return turn


def part_of(name: str) -> str | None:
    """Whose factor a tensor is, by its name; None for one that is none."""
    return found[1] if (found := _NAME.search(name)) else None


def own(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Of a model's tensors those that are a part's own: all of them where there is no adapter."""
    if not any(map(part_of, tensors)):
        return dict(tensors)
    return {name: tensor for name, tensor in tensors.items() if part_of(name) == part or name.startswith("head.")}


def adapted(module: nn.Module, part: str) -> Iterator[tuple[str, LoraLinear]]:
    """The layers, with their names, that have an adapter of a part."""
    return ((n, m) for n, m in module.named_modules() if isinstance(m, LoraLinear) and part in m.parts)


def layers_of(lm: nn.Module, part: str) -> adapter_folder.Layers:
    """The layers that a part adapts and their shapes."""
    return {name: (layer.out_features, layer.in_features) for name, layer in adapted(lm, part)}


def write(folder: Path, tensors: Mapping[str, Tensor], part: str, settings: LoraSection, base: str) -> None:
    """Writes whole factors, named as in the language model, as a folder that PEFT loads."""
    plain = {}
    for name, tensor in tensors.items():
        if found := _NAME.search(name):
            plain[adapter_folder.file_name(name[: found.start()], found[2])] = tensor
    layers = {name[: found.start()] for name in tensors if (found := _NAME.search(name))}
    adapter_folder.write(folder, plain, rank=settings.rank, alpha=settings.alpha, layers=layers, base=base)


@torch.no_grad()
def read(folder: Path, lm: nn.Module, part: str, settings: LoraSection, field: str) -> None:
    """Fills a part's factors from a folder of PEFT. Raises `WeightsError` for an adapter that does not fit exactly."""
    layers = layers_of(lm, part)
    tensors = adapter_folder.read(folder, layers, rank=settings.rank, alpha=settings.alpha, who=f"{field}: {folder}")
    for name, layer in adapted(lm, part):
        for factor in "AB":
            getattr(layer, f"{part}_{factor}").copy_(tensors[adapter_folder.file_name(name, factor)])
