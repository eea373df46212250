"""Packing, plans and advantages at three sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.algorithms.advantage import advantages
from sao.measure import workloads
from sao.measure.measure import Row, row, times_us

RANKS = 8


def evenness(costs: NDArray[np.float64]) -> tuple[float, float]:
    """Of a plan's costs [ranks, micro-batches]: the heaviest rank as a multiple of the mean, and the time in lock step
    (each micro-batch takes as long as its slowest rank) as a multiple of a perfect split.
    """
    total = costs.sum(axis=1)
    return float(total.max() / total.mean()), float(len(costs) * costs.max(axis=0).sum() / costs.sum())


def pack(quick: bool) -> Iterator[Row]:
    """`sao.pack` and `sao.plan`."""
    budget_s = 0.2 if quick else 1.0
    for name, lengths_of, capacity in (
        ("agentic", workloads.agentic_lengths, 200_000),
        ("reasoning", workloads.reasoning_lengths, 32_768),
    ):
        for n in (512, 8_192) if quick else (512, 8_192, 131_072):
            lengths = lengths_of(n)
            durations = times_us(lambda x=lengths, c=capacity: _core.pack(x, c), budget_s)  # type: ignore[misc]
            bins = len(_core.pack(lengths, capacity)[1]) - 1
            note = f"{bins} bins, at least {-(-int(lengths.sum()) // capacity)}"
            yield row("pack", f"{n} {name}", "sao", durations, n, "segment", note)
    for name, lengths_of, capacity in (
        ("agentic", workloads.agentic_lengths, 200_000),
        ("reasoning", workloads.reasoning_lengths, 32_768),
    ):
        for n in (512, 8_192):
            lengths = lengths_of(n)
            durations = times_us(lambda x=lengths, c=capacity: _core.plan(x, RANKS, c, 1), budget_s)  # type: ignore[misc]
            heaviest, lock_step = evenness(_core.plan(lengths, RANKS, capacity, 1).costs)
            note = f"heaviest rank {heaviest:.4f} of the mean, lock-step {lock_step:.4f}"
            yield row(f"plan for {RANKS} ranks", f"{n} {name}", "sao", durations, n, "segment", note)


def advantage(quick: bool) -> Iterator[Row]:
    """`sao.advantages`: small, dense and ragged multi-turn batches; one segment and four."""
    rng = np.random.default_rng(0)
    shapes = {
        "16 x 1024, multi-turn": (np.full(16, 1024), True),
        "64 x 4096, all actions": (np.full(64, 4096), False),
        "64 ragged to 64k, multi-turn": (np.clip(workloads.agentic_lengths(64, 2000), 256, 65_536), True),
        "512 ragged to 64k, multi-turn": (np.clip(workloads.agentic_lengths(512, 2000), 256, 65_536), True),
    }
    for size, (lengths, multi_turn) in shapes.items():
        masks = [workloads.turns(int(n), rng) if multi_turn else np.ones(int(n), np.bool_) for n in lengths]
        mask = np.concatenate(masks)
        values = rng.standard_normal(len(mask)).astype(np.float32)
        rewards = rng.standard_normal(len(lengths)).astype(np.float32)
        cuts = np.concatenate([[0], np.cumsum(lengths)])
        for segments in (1, 4):
            inner = cuts[:-1, None] + np.diff(cuts)[:, None] * np.arange(segments) // segments
            offsets, first = np.append(inner.ravel(), cuts[-1]), np.arange(len(cuts)) * segments

            def call(offsets: np.ndarray = offsets, first: np.ndarray = first) -> object:
                return advantages(
                    values,  # noqa: B023
                    mask,  # noqa: B023
                    offsets,
                    first,
                    rewards,  # noqa: B023
                    gamma=0.999,
                    lambda_policy=0.95,
                    cross_segment="chained",
                )

            how = f"sao, {segments} segment{'s' * (segments > 1)}"
            yield row("advantages", size, how, times_us(call, 0.2 if quick else 1.0), len(mask), "token")
