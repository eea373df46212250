"""Packing and planning: `sao.pack` and `sao.plan` beside first-fit-decreasing in Python and in numba.

The first table is time and bins (the lower bound is tokens / capacity). The second is the plan of a learner step over
8 ranks: over ranks = how many micro-batches a rank has; imbalance = heaviest rank / mean; lock-step = time when each
micro-batch takes as long as its slowest rank / time of a perfect split. Cost of a segment: 24576 l + l^2.
`python bench/pack.py [--quick]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from common import agentic_lengths, median, reasoning_lengths, report, seconds

from sao import pack, plan

RANKS = 8


def evenness(costs: np.ndarray) -> tuple[float, float]:
    """Of a plan's costs [ranks, micro-batches]: the heaviest rank as a multiple of the mean, and the time in lock step
    (each micro-batch takes as long as its slowest rank) as a multiple of a perfect split.
    """
    total = costs.sum(axis=1)
    return float(total.max() / total.mean()), float(len(costs) * costs.max(axis=0).sum() / costs.sum())


def python_first_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    room: list[int] = []
    bins: list[list[int]] = []
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        for bin_, left in enumerate(room):
            if left >= length:
                room[bin_] -= length
                bins[bin_].append(item)
                break
        else:
            room.append(capacity - length)
            bins.append([item])
    return bins


@numba.njit(cache=False)
def first_fit(lengths, capacity):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    room = np.empty(len(lengths), np.int64)
    bin_of = np.empty(len(lengths), np.int64)
    count = 0
    for item in np.argsort(-lengths, kind="mergesort"):
        for bin_ in range(count):
            if room[bin_] >= lengths[item]:
                break
        else:
            bin_ = count
            room[bin_] = capacity
            count += 1
        room[bin_] -= lengths[item]
        bin_of[item] = bin_
    return bin_of, count


def cost(lengths: np.ndarray) -> np.ndarray:
    wide = lengths.astype(np.float64)
    return 24576.0 * wide + wide * wide


def longest_processing_time(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Costs [ranks, micro-batches] of the usual two-level greedy: segments to ranks by cost, then first fit on each."""
    load, parts = np.zeros(RANKS), [[] for _ in range(RANKS)]
    for item in np.argsort(-cost(lengths), kind="stable"):
        rank = int(load.argmin())
        load[rank] += cost(lengths[item])
        parts[rank].append(item)
    bins = [python_first_fit(lengths[part], capacity) for part in parts]
    costs = np.zeros((RANKS, max(map(len, bins))))
    for rank, own in enumerate(bins):
        for micro_batch, items in enumerate(own):
            costs[rank, micro_batch] = cost(lengths[np.array(parts[rank])[items]]).sum()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out 131072 segments")
    sizes = (512, 8192) if parser.parse_args().quick else (512, 8192, 131_072)
    workloads: dict[str, tuple[Callable[[int, int], np.ndarray], int]] = {
        "agentic, 200k": (agentic_lengths, 200_000),
        "reasoning, 32k": (reasoning_lengths, 32_768),
    }
    rows: list[list[Any]] = []
    for name, (make, capacity) in workloads.items():
        for n in sizes:
            lengths = make(n, 0)
            bound = -(-int(lengths.sum()) // capacity)
            runs: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
                "numba first fit": (lambda x=lengths, c=capacity: first_fit(x, c), lambda out: int(out[1])),
                "sao": (lambda x=lengths, c=capacity: pack(x, c), lambda out: len(out[1]) - 1),
            }
            if n <= 8192:
                runs = {"python first fit": (lambda x=lengths, c=capacity: python_first_fit(x, c), len), **runs}
            for kind, (call, count) in runs.items():
                time_s = median(seconds(call, at_least=1 if kind.startswith("python") else 3))
                rows.append([name, f"{n}", kind, time_s * 1e3, f"{count(call())}", f"{bound}"])
    report("pack", ["lengths, capacity", "segments", "how", "ms (median)", "bins", "bound"], rows)
    print()
    rows = []
    for name, (make, capacity) in workloads.items():
        for n in sizes[:2]:
            lengths = make(n, 0)
            ours = lambda x=lengths, c=capacity: plan(x, RANKS, c, 1)  # noqa: E731
            theirs = lambda x=lengths, c=capacity: longest_processing_time(x, c)  # noqa: E731
            for kind, call, costs in (
                ("greedy, then first fit", theirs, theirs()),
                ("sao", ours, ours().costs),
            ):
                time_s = median(seconds(call, at_least=1))
                counts = sorted({int((row > 0).sum()) for row in costs})
                rows.append(
                    [
                        name,
                        f"{n}",
                        kind,
                        time_s * 1e3,
                        f"{costs.shape[1]}",
                        "equal" if kind.startswith("sao") or len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
                        *evenness(costs),
                    ]
                )
    columns = [
        "lengths, capacity",
        "segments",
        "how",
        "ms (median)",
        "micro-batches",
        "over ranks",
        "imbalance",
        "lock-step",
    ]
    report("plan", columns, rows, f"{RANKS} ranks, one row a micro-batch")


if __name__ == "__main__":
    main()
