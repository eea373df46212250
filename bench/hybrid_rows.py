"""Rows of one segment beside packed rows: tokens a second of forward and backward passes over a heavy-tailed batch.

* dense, packed: a Llama as large as the hybrid beside it, laid out by `learner.plan` in classes of lengths.
* dense, one segment a row: the same model and batch; all that differs is the layout.
* hybrids, one segment a row: LFM2 (short convolutions) and Qwen3.5 (gated delta rule), whose layers carry state.
  Without the kernels that transformers takes on GPUs, the delta rule is a loop in Python over chunks of 64 positions.

CPU seconds of one thread, the cases in turns, the best of several. `python bench/hybrid_rows.py`
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from common import report
from learner import make_rollouts

from sao.learner.batch import flatten, micro_batches
from sao.learner.layout import Layout, find_layout
from sao.learner.model import Policy, linear_cost
from sao.learner.plan import plan_segments

LONGEST, BOUND, COUNT, VOCABULARY, WIDTH, LAYERS, TURNS = 1024, 4096, 128, 256, 128, 4, 3
KINDS = {
    "LFM2": (
        "lfm2",
        {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "Qwen3.5": (
        "qwen3_5_text",
        {
            **{"layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_num_value_heads": 4},
            **{"linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32},
        },
    ),
}


def heavy_tailed(seed: int = 0) -> np.ndarray:
    """Many short ones and a few that fill the window: log-normal around 90 tokens, from 10 to 1024."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(90) + 1.1 * rng.standard_normal(COUNT)), 10, LONGEST).astype(np.int64)
    lengths[0] = LONGEST
    return lengths


def make(kind: str, intermediate: int, **values: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": intermediate}
    shape |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"max_position_embeddings": LONGEST, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **values)).eval()


def size(lm: Any) -> int:
    return sum(parameter.numel() for parameter in lm.parameters())


def dense_of(parameters: int) -> Any:
    """A Llama of that many parameters, made so by the width of its feed-forward layers."""
    base = size(make("llama", 8))
    return make("llama", 8 + round((parameters - base) / (3 * WIDTH * LAYERS)))


def run(policy: Policy, batch: Any) -> tuple[float, int]:
    """CPU seconds of a pass over the batch, and positions computed."""
    begin = time.process_time()
    cost = linear_cost(policy)
    plan = plan_segments(batch.lengths, 1, LONGEST, BOUND // LONGEST, cost, layout=policy.layout)
    positions = 0
    for part in micro_batches(batch, plan, 0, torch.device("cpu"), policy.layout):
        policy(part)[0].sum().backward()
        positions += part.token_ids.numel()
    policy.zero_grad()
    return time.process_time() - begin, positions


def main() -> None:
    torch.set_num_threads(1)
    batch = flatten(make_rollouts(heavy_tailed(), VOCABULARY), 0)
    tokens, rows = len(batch.token_ids), []
    for name, (kind, values) in KINDS.items():
        hybrid = make(kind, 3 * WIDTH, **values)
        layout = find_layout(hybrid, LONGEST, name)
        assert layout.rows == "single"
        dense = dense_of(size(hybrid))
        cases = {
            "dense, packed": Policy(dense, find_layout(dense, LONGEST, "dense")),
            "dense, one segment a row": Policy(dense, Layout("single")),
            f"{name}, one segment a row": Policy(hybrid, layout),
        }
        times: dict[str, list[float]] = {case: [] for case in cases}
        found = {case: run(policy, batch)[1] for case, policy in cases.items()}
        for _ in range(TURNS):
            for case, policy in cases.items():
                times[case].append(run(policy, batch)[0])
        packed = min(times["dense, packed"])
        for case, policy in cases.items():
            seconds, model = min(times[case]), size(policy.lm) / 1e6
            rows.append(
                [
                    case,
                    model,
                    seconds,
                    tokens / seconds,
                    found[case],
                    100 * (1 - tokens / found[case]),
                    seconds / packed,
                ]
            )
    columns = ["rows", "M parameters", "CPU s", "tokens/s", "positions", "padding %", "times dense packed"]
    report("hybrid_rows", columns, rows, f"{COUNT} segments, {tokens} tokens, lengths 10 to {LONGEST}")


if __name__ == "__main__":
    main()
