"""Workloads: trajectories, lengths and batches as they come up in agentic runs. Seeded NumPy generators."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sao.trajectory import Segment, Termination, Trajectory


def agentic_lengths(n: int, seed: int = 0, low: int = 10, high: int = 200_000) -> NDArray[np.int64]:
    """Heavy-tailed segment lengths: half around 800 tokens, a third around 6000, the rest around 40,000."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    mean = np.where(u < 0.50, np.log(800.0), np.where(u < 0.85, np.log(6000.0), np.log(40000.0)))
    spread = np.where(u < 0.85, 1.0, 0.8)
    return np.clip(np.exp(mean + spread * rng.standard_normal(n)), low, high).astype(np.int64)


def turns(n: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Action mask of a multi-turn segment: observations of about 700 tokens, answers of about 300; the last is one."""
    mask, position, action = np.zeros(n, np.bool_), 0, False
    while position < n:
        stop = min(n, position + int(rng.geometric(1 / 300 if action else 1 / 700)))
        mask[position:stop] = action
        position, action = stop, not action
    mask[-1] = True
    return mask


def trajectory(n: int, seed: int = 0, version: int = 100) -> Trajectory:
    """One segment of `n` tokens, multi-turn, sampled by four policy versions."""
    rng = np.random.default_rng(seed)
    mask = turns(n, rng)
    logprobs = np.where(mask, -rng.exponential(0.5, n), np.nan).astype(np.float32)
    cuts = [n * k // 4 for k in range(5)]
    spans = [(a, b, version + k) for k, (a, b) in enumerate(pairwise(cuts)) if mask[a:b].any()]
    ids = rng.integers(0, 151_936, n).astype(np.int32)
    segment = Segment("execution", ids, mask, logprobs, np.array(spans, np.int64))
    return Trajectory(
        rng.bytes(16),
        seed,
        0,
        "bench",
        (segment,),
        1.0,
        Termination("finished"),
        1.0,
        fingerprints={version + k: "0" * 32 for k in range(4)},
        timings_s={"total": 12.5, "sampling": 11.0},
        metadata={"actor": "g0", "turns": 12},
    )
