"""Whole (unsharded) parameters out of the learner: for the generators, and as a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from sao.config import Config
from sao.errors import CheckpointError
from sao.learner import lora
from sao.learner.model import CRITIC_FILE, DTYPES, HEAD_FILE, Critic, Policy
from sao.learner.world import World
from sao.storage.durable import patiently

# Tokenizer and sampling defaults, by the names that model folders use; weights and config are written anew.
_COPIED_FILES = (
    *("tokenizer*", "special_tokens_map*", "added_tokens*", "vocab*", "merges*", "chat_template*"),
    *("*.model", "*.tiktoken"),
    "generation_config.json",  # as it is: transformers refuses to write some that it reads, and nothing here changes it
)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and saved buffers by name, as this rank holds them.

    A parameter that is used twice (tied embeddings) comes once, under its first name.
    """
    saved = module.state_dict(keep_vars=True)  # first: it makes FSDP free what it gathered and give back its shards
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return named | {name: buffer for name, buffer in module.named_buffers() if name in saved}


def full_tensors(
    module: nn.Module, dtype: str, world: World, *, copy: bool = False, own: str | None = None
) -> dict[str, torch.Tensor] | None:
    """Whole `named_tensors`, on the CPU of rank 0, in the type `dtype`; None on the other ranks. A collective.

    The policy's adapter is merged into them, in float32 or better, and no factors are among them; or, with `own`, those
    that are a part's own alone. Without `copy` they may be the very memory that training changes.
    """
    held, out = named_tensors(module), {}
    layers = {f"{name}.weight": layer for name, layer in lora.adapted(module, "policy")} if own is None else {}
    for name, tensor in (held if own is None else lora.own(held, own)).items():
        if own is None and lora.part_of(name):
            continue
        whole = _whole(tensor)
        if (layer := layers.get(name)) is not None:
            stem = name.removesuffix("weight")
            factors = [_whole(held[f"{stem}policy_{factor}"]) for factor in "AB"]
            whole = layer.merged(whole, *factors) if world.rank == 0 else whole
        if world.rank == 0:
            out[name] = whole.to("cpu", DTYPES[dtype] if whole.is_floating_point() else whole.dtype, copy=copy)
    return out if world.rank == 0 else None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model_tensors(
    policy: Policy, critic: Critic | None, config: Config, world: World
) -> dict[str, dict[str, torch.Tensor]] | None:
    """Copies of what `write_model` writes, on rank 0: the `policy` whole, the `critic` whole or its adapter and head,
    and, if the policy has one, its `adapter`. A collective.
    """
    dtype, adapters = config.published_dtype, config.lora.rank > 0
    found = {"policy": full_tensors(policy.lm, dtype, world, copy=True)}
    if adapters:
        found["adapter"] = full_tensors(policy.lm, dtype, world, copy=True, own="policy")
    if critic is not None:
        found["critic"] = full_tensors(critic, dtype, world, copy=True, own="critic")
    return {name: tensors for name, tensors in found.items() if tensors is not None} or None


def write_model(lm: Any, tensors: dict[str, dict[str, torch.Tensor]], config: Config, folder: Path) -> None:
    """Writes a model, its critic and its tokenizer into `folder` so that transformers and vLLM load it; on one rank.

    `tensors`: as `model_tensors` gives them.
    """
    generation, lm.generation_config = lm.generation_config, GenerationConfig()
    try:
        lm.save_pretrained(folder, state_dict=tensors["policy"])
    finally:
        lm.generation_config = generation
    (folder / "generation_config.json").unlink()  # the folder's own is copied, if it has one
    _write_index(folder)
    described = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**described, "dtype": config.published_dtype}, indent=2) + "\n")
    if "critic" in tensors:
        _save_critic(tensors["critic"], folder, config)
    if "adapter" in tensors:
        lora.write(folder / lora.FOLDERS["policy"], tensors["adapter"], "policy", config.lora, config.model.path)
    for pattern in _COPIED_FILES:
        for file in Path(config.model.path).glob(pattern):
            shutil.copy(file, folder / file.name)


def write_critic(
    critic: Critic, target: Path, config: Config, metadata: dict[str, Any], world: World, patience_s: float = 0.0
) -> None:
    """Writes the critic as the folder `target`, for `learner.critic_path`; `metadata` goes into `pretraining.json`.

    The folder is written under a temporary name and renamed when complete; while the disk fails it is tried again, for
    `patience_s`. Raises `CheckpointError`. A collective; rank 0 writes.
    """
    tensors = full_tensors(critic, config.published_dtype, world, own="critic")
    if tensors is None:
        return
    temporary = target.parent / f".{target.name}.tmp"

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        critic.backbone.config.save_pretrained(temporary)
        _save_critic(tensors, temporary, config)
        (temporary / "pretraining.json").write_text(json.dumps(metadata, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)

    try:
        patiently(write, patience_s)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


def _save_critic(tensors: dict[str, torch.Tensor], folder: Path, config: Config) -> None:
    if any(map(lora.part_of, tensors)):
        folder = folder / lora.FOLDERS["critic"]
        lora.write(folder, tensors, "critic", config.lora, config.model.path)
        head = {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}
        save_file(head, folder / HEAD_FILE)
        return
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / CRITIC_FILE)


def _write_index(folder: Path) -> None:
    """Says which files are the model's: vLLM would take every safetensors file in the folder, the critic's too."""
    index = folder / "model.safetensors.index.json"
    if index.exists():  # of a model in several files
        return
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    size = (folder / "model.safetensors").stat().st_size
    weight_map = dict.fromkeys(sorted(names), "model.safetensors")
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
