"""Where every segment of a step goes: one plan of the core for each class of lengths, the cheapest choice of classes.

An explicit attention mask costs rows x width^2 whatever it forbids, so a short segment in a wide row is paid for like a
long one. Segments are therefore laid out in classes whose lengths differ by less than a factor of two, each with rows
as wide as its longest segment. More classes mean less attention but more padding, more micro-batches and more waiting
of ranks for one another; the number of classes is the one with the least estimated cost, which depends on the model
(`linear_cost`). Attention that skips what is forbidden needs one class only.

The estimate of a micro-batch is that of its slowest rank: rows * width * (linear_cost + width), in pairs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.errors import ValidationError

CLASSES = 6  # at most: below 1/32 of the longest segment nothing is gained
OVERHEAD_TOKENS = 64  # a micro-batch costs about as much as so many tokens before any is computed
LINEAR_COST = 24576.0  # of a 7B model, see `sao._core.plan`


@dataclass(frozen=True)
class Plan:
    """As `sao._core.Plan`: int32[n] each, one entry a segment. Every rank has the same number of micro-batches."""

    rank: NDArray[np.int32]
    micro_batch: NDArray[np.int32]
    row: NDArray[np.int32]
    position: NDArray[np.int32]
    n_micro_batches: int
    hash: int


def plan_segments(
    lengths: NDArray[np.int64],
    ranks: int,
    row_tokens: int,
    rows_per_micro_batch: int,
    linear_cost: float = LINEAR_COST,
    *,
    masked: bool = True,
) -> Plan:
    """The plan of a step, a function of its arguments alone. `masked`: attention pays for what it must not see.

    A micro-batch has at most `row_tokens * rows_per_micro_batch` positions on a rank. Raises `ValidationError` for a
    segment longer than `row_tokens`.
    """
    longest = int(lengths.max())
    if longest > row_tokens:
        raise ValidationError(
            f"segment {int(lengths.argmax())}: {longest} tokens exceed learner.row_tokens = {row_tokens}"
        )
    bound = row_tokens * rows_per_micro_batch
    # How often a segment's length can be doubled without exceeding the longest.
    level = np.zeros(len(lengths), dtype=np.int64)
    level += sum(lengths <= longest >> halvings for halvings in range(1, CLASSES if masked else 1))
    best, least = None, np.inf
    for last in np.unique(level):  # lengths in (L/2, L], (L/4, L/2], ..., and the rest
        classes = [np.flatnonzero(np.minimum(level, last) == each) for each in np.unique(np.minimum(level, last))]
        parts = []
        for members in classes:
            width = int(lengths[members].max())
            parts.append(_core.plan(lengths[members], ranks, width, bound // width, linear_cost=linear_cost))
        cost = sum(_cost(lengths[m], part, ranks, linear_cost) for m, part in zip(classes, parts, strict=True))
        if cost < least:
            best, least = (classes, parts), cost
    assert best is not None
    return _merge(len(lengths), *best)


def _cost(lengths: NDArray[np.int64], part: _core.Plan, ranks: int, linear_cost: float) -> float:
    where = part.micro_batch.astype(np.int64) * ranks + part.rank
    row = part.row.astype(np.int64)
    width = np.zeros(part.n_micro_batches * ranks)
    np.maximum.at(width, where, part.position + lengths)
    stride = int(row.max()) + 1
    rows = np.bincount(np.unique(where * stride + row) // stride, minlength=len(width))
    slowest = (rows * width * (linear_cost + width)).reshape(-1, ranks).max(axis=1)
    return float(slowest.sum()) + part.n_micro_batches * OVERHEAD_TOKENS * linear_cost


def _merge(n: int, classes: list[NDArray[np.int64]], parts: list[_core.Plan]) -> Plan:
    """One plan of several: the micro-batches of the classes one after another."""
    arrays = {name: np.zeros(n, dtype=np.int32) for name in ("rank", "micro_batch", "row", "position")}
    micro_batches, digest = 0, 0
    for members, part in zip(classes, parts, strict=True):
        for name, array in arrays.items():
            array[members] = getattr(part, name)
        arrays["micro_batch"][members] += np.int32(micro_batches)
        micro_batches += part.n_micro_batches
        digest = (digest * 1_000_003 + int(part.hash)) % 2**64
    return Plan(**arrays, n_micro_batches=micro_batches, hash=digest)
