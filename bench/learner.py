"""What the benchmarks of the learner share: random models and rollouts, a group of one rank, measured processes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sao.config import Config, parse
from sao.learner.world import World
from sao.trajectory import SegmentBuilder, Termination, Trajectory

PEAK = "peak_bytes"


def child(script: str, *, live: bool = False, **arguments: Any) -> dict[str, Any]:
    """Runs `script --case JSON` in a process of its own and returns what it printed last, with its peak memory.

    `live`: freed blocks of 1 MiB and more go back to the system at once, so that the peak is that of live tensors and
    not of the C library's heap, which keeps blocks below 32 MiB. That costs time in page faults.
    """
    command = [sys.executable, script, "--case", json.dumps(arguments)]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if live else {})
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        raise SystemExit(f"{arguments}: {ended.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def answer(**numbers: Any) -> None:
    """Prints a child's result, its peak resident memory added."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**numbers, PEAK: peak}))


def make_model(folder: Path, *, width: int, layers: int, vocabulary: int, context: int) -> int:
    """Writes a random Llama of this shape into `folder`; returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    lm = LlamaForCausalLM(config)
    lm.save_pretrained(folder)
    return sum(parameter.numel() for parameter in lm.parameters())


def make_rollouts(lengths: np.ndarray, vocabulary: int, seed: int = 0) -> list[Trajectory]:
    """One segment each; turns of up to 128 tokens, half of them sampled."""
    rng = np.random.default_rng(seed)
    out = []
    for ordinal, length in enumerate(lengths.tolist()):
        builder, left = SegmentBuilder("execution"), length
        while left > 0:
            turn = min(left, 128)
            sampled = turn // 2
            builder.append_context(rng.integers(2, vocabulary, turn - sampled).astype(np.int32))
            if sampled:
                logprobs = -np.log(vocabulary) + 0.1 * rng.standard_normal(sampled)
                spans = np.array([[0, sampled, 0]], dtype=np.int64)
                ids = rng.integers(2, vocabulary, sampled).astype(np.int32)
                builder.append_sampled(ids, np.minimum(logprobs, -1e-3).astype(np.float32), spans)
            left -= turn
        out.append(
            Trajectory(
                id=rng.bytes(16),
                task_ordinal=ordinal,
                attempt=0,
                env="bench",
                segments=(builder.build(),),
                reward=float(rng.integers(0, 2)),
                termination=Termination("finished", ""),
                temperature=1.0,
            )
        )
    return out


def make_config(model: Path, **sections: dict[str, Any]) -> Config:
    """A run with the given sections over defaults that suit a benchmark."""
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "env": {"name": "lookup"},
        "learner": {"critic_warmup_steps": 0, "threads": 1, "policy_lr": 1e-5},
    }
    for name, values in sections.items():
        data.setdefault(name, {}).update(values)
    return parse(data)


def world_of_one() -> World:
    """A process group of one rank, as `sao train` makes it."""
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    return World(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
