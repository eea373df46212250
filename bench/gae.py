"""Advantages of ragged multi-turn batches: `sao.advantages` beside the loops that trainers usually run.

* torch loop, numpy loop: over the padded time axis, carrying value and advantage over masked tokens; right-padded.
* numba: the scalar recurrence over the ragged batch, compiled; like sao with targets of a lambda of their own (1),
  which the padded loops leave out.

All skip observations, so all must agree; the largest difference on action tokens is in the table.
`python bench/gae.py [--quick]`
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from common import agentic_lengths, median, report, seconds

from sao import advantages

GAMMA, LAMBDA = 0.999, 0.95


def batch(lengths: np.ndarray, turns: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Trajectories of one segment; observations (about 700 tokens) and actions (about 300) alternate if `turns`."""
    rng = np.random.default_rng(seed)
    masks = []
    for n in lengths:
        mask = np.ones(n, bool)
        position, action = 0, False
        while turns and position < n:
            run = int(min(n - position, rng.geometric(1 / 300 if action else 1 / 700)))
            mask[position : position + run] = action
            position, action = position + run, not action
        mask[-1] = True
        masks.append(mask)
    n = int(lengths.sum())
    return {
        "values": rng.standard_normal(n).astype(np.float32),
        "mask": np.concatenate(masks),
        "cuts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "rewards": rng.standard_normal(len(lengths)).astype(np.float32),
    }


def padded(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, token rewards and mask of shape [trajectories, longest]."""
    cuts = data["cuts"]
    shape = (len(cuts) - 1, int(np.diff(cuts).max()))
    values, rewards, mask = (np.zeros(shape, np.float32) for _ in range(3))
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        values[i, : b - a] = data["values"][a:b]
        mask[i, : b - a] = data["mask"][a:b]
        rewards[i, np.flatnonzero(data["mask"][a:b])[-1]] = data["rewards"][i]
    return values, rewards, mask


def padded_loop(values: Any, rewards: Any, mask: Any, zeros: Any, stack: Callable[[list[Any]], Any]) -> tuple[Any, Any]:
    next_value, carry, out = zeros, zeros, []
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        candidate = delta + GAMMA * LAMBDA * carry
        next_value = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_value
        carry = candidate * mask[:, t] + (1 - mask[:, t]) * carry
        out.append(carry)
    result = stack(out[::-1])
    return result, result + values


def ragged(data: dict[str, np.ndarray], array: np.ndarray) -> np.ndarray:
    """The tokens of a padded array, one after another."""
    lengths = np.diff(data["cuts"])
    row = np.repeat(np.arange(len(lengths)), lengths)
    return array[row, np.arange(len(row)) - data["cuts"][row]]


def run_torch(data: dict[str, np.ndarray], tensors: list[torch.Tensor]) -> np.ndarray:
    out, _ = padded_loop(*tensors, torch.zeros(len(tensors[0])), lambda columns: torch.stack(columns, dim=1))
    return ragged(data, out.numpy())


def run_numpy(data: dict[str, np.ndarray], arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    zeros = np.zeros(len(arrays[0]), np.float32)
    return ragged(data, padded_loop(*arrays, zeros, lambda columns: np.stack(columns, axis=1))[0])


@numba.njit(cache=False)
def ragged_loop(  # type: ignore[no-untyped-def]
    values, mask, cuts, rewards, gamma, lam, advantages, targets
):  # pragma: no cover - compiled
    for i in range(len(cuts) - 1):
        next_value, carry, critic, reward = 0.0, 0.0, 0.0, rewards[i]
        for t in range(cuts[i + 1] - 1, cuts[i] - 1, -1):
            if mask[t]:
                delta = reward + gamma * next_value - values[t]
                carry = delta + gamma * lam * carry
                critic = delta + gamma * critic
                next_value, reward = values[t], 0.0
                advantages[t] = carry
                targets[t] = critic + values[t]


def run_numba(data: dict[str, np.ndarray]) -> np.ndarray:
    out, targets = np.zeros_like(data["values"]), np.zeros_like(data["values"])
    ragged_loop(data["values"], data["mask"], data["cuts"], data["rewards"], GAMMA, LAMBDA, out, targets)
    return out


def cut(data: dict[str, np.ndarray], segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of segments in tokens and of trajectories in segments, when each trajectory is cut into so many."""
    cuts = data["cuts"]
    inner = cuts[:-1, None] + np.diff(cuts)[:, None] * np.arange(segments) // segments
    return np.append(inner.ravel(), cuts[-1]), np.arange(len(cuts), dtype=np.int64) * segments


def run_sao(data: dict[str, np.ndarray], offsets: tuple[np.ndarray, np.ndarray], mode: str) -> np.ndarray:
    cuts, first = offsets
    out, _, _ = advantages(
        data["values"],
        data["mask"],
        cuts,
        first,
        data["rewards"],
        gamma=GAMMA,
        lambda_policy=LAMBDA,
        lambda_critic=1.0,
        cross_segment=mode,  # type: ignore[arg-type]
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the largest batch out for the slow loops")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    workloads = {
        "small: 16 x about 1k": batch(np.full(16, 1024), True),
        "dense: 64 x 4096, all actions": batch(np.full(64, 4096), False),
        "agent: 64 ragged, up to 64k": batch(np.clip(agentic_lengths(64, 2000), 256, 65_536), True),
    }
    rows = []
    for name, data in workloads.items():
        tokens, mask = len(data["values"]), data["mask"]
        arrays = padded(data)
        runs: dict[str, Callable[[], Any]] = {
            "torch loop": partial(run_torch, data, [torch.from_numpy(array) for array in arrays]),
            "numpy loop": partial(run_numpy, data, arrays),
            "numba": partial(run_numba, data),
            "sao": partial(run_sao, data, cut(data, 1), "paper"),
            "sao, 4 segments, chained": partial(run_sao, data, cut(data, 4), "chained"),
        }
        want = run_numba(data)
        for kind, call in runs.items():
            slow = kind.endswith("loop")
            if quick and slow and arrays[0].shape[1] > 10_000:
                continue
            time_s = median(seconds(call, at_least=1 if slow else 9))
            error = float(np.abs(call() - want)[mask].max())
            rows.append([name, kind, time_s * 1e3, tokens / time_s / 1e6, error])
    columns = ["batch", "how", "ms (median)", "M tokens/s", "max difference"]
    report("gae", columns, rows, "one thread each")


if __name__ == "__main__":
    main()
