"""Whole (unsharded) parameters out of the learner: for the generators, and as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from sao.learner.model import CRITIC_FILE, DTYPES, Critic, Policy
from sao.learner.world import World

# What a tokenizer consists of, by the names that model folders use; weights and config are written anew.
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map*", "added_tokens*", "vocab*", "merges*", "chat_template*"),
    *("*.model", "*.tiktoken"),
)


def full_tensors(module: nn.Module, dtype: str, world: World) -> dict[str, torch.Tensor] | None:
    """All parameters and saved buffers by name, on the CPU of rank 0, in the type `dtype`; None on the other ranks.

    A parameter that is used twice (tied embeddings) comes once, under its first name. A collective: all ranks call it.
    """
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    named.update({name: buffer for name, buffer in module.named_buffers() if name in saved})
    out = {}
    for name, tensor in named.items():
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if world.rank == 0:
            out[name] = whole.to("cpu", DTYPES[dtype] if whole.is_floating_point() else whole.dtype)
    return out if world.rank == 0 else None


def export(
    policy: Policy, critic: Critic, model_path: str | Path, target: Path, dtype: str, world: World, kept: int
) -> None:
    """Writes policy, critic and tokenizer as the folder `target` (`.../checkpoints/step-N`) that transformers loads.

    The folder is written under a temporary name and renamed when complete; then all but the newest `kept` steps beside
    it are removed. The critic goes into `critic.safetensors` (`backbone.*`, `head.*`). A collective; rank 0 writes.
    """
    tensors = full_tensors(policy.lm, dtype, world)
    critic_tensors = full_tensors(critic, dtype, world)
    if tensors is None or critic_tensors is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    policy.lm.save_pretrained(temporary, state_dict=tensors)
    config = json.loads((temporary / "config.json").read_text())
    (temporary / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in critic_tensors.items()}, temporary / CRITIC_FILE)
    for pattern in _TOKENIZER_FILES:
        for file in Path(model_path).glob(pattern):
            shutil.copy(file, temporary / file.name)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    steps = sorted(target.parent.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    for old in steps[:-kept]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
