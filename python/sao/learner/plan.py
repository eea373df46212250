"""Where every segment of a step goes: one plan of the core for each class of lengths, the cheapest choice of classes.

An explicit attention mask costs rows x width^2 whatever it forbids, so a short segment in a wide row is paid for like a
long one. Segments are therefore packed in classes whose lengths differ by less than a factor of two, each with rows as
wide as its longest segment. More classes mean less attention but more padding, more micro-batches and more waiting of
ranks for one another; the number of classes is the one with the least estimated cost, which depends on the model
(`linear_cost`). Attention that skips what is forbidden needs one class only.

Where a row holds one segment, segments in falling order of length are cut into micro-batches so that the estimated cost
of all, padding counted, is the least there is.

The estimate of a micro-batch is that of its slowest rank: rows * width * (linear_cost + width), in pairs of tokens.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.errors import ValidationError
from sao.learner.attention import EAGER, SDPA
from sao.learner.layout import Layout

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
    layout: Layout | None = None,
) -> Plan:
    """The plan of a step, a function of its arguments alone.

    A micro-batch has at most `row_tokens * rows_per_micro_batch` positions on a rank. Raises `ValidationError` for a
    segment longer than `row_tokens`.
    """
    longest = int(lengths.max())
    if longest > row_tokens:
        raise ValidationError(
            f"segment {int(lengths.argmax())}: {longest} tokens exceed learner.row_tokens = {row_tokens}"
        )
    layout, bound = layout or Layout(), row_tokens * rows_per_micro_batch
    chosen: list[tuple[NDArray[np.int64], Any]] = []
    labels = layout.apart(lengths)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if layout.rows == "single":
            chosen.append((members, _one_a_row(lengths[members], ranks, bound, linear_cost)))
        else:
            parts = _packed(lengths[members], ranks, bound, linear_cost, masked=layout.attention in (SDPA, EAGER))
            chosen += [(members[inner], part) for inner, part in parts]
    return _merge(len(lengths), chosen)


def _one_a_row(lengths: NDArray[np.int64], ranks: int, bound: int, linear_cost: float) -> Plan:
    """Segments by falling length, cut into micro-batches so that the cost of all is the least there is."""
    order, n = np.argsort(-lengths, kind="stable"), len(lengths)
    least, end = np.zeros(n + 1), np.zeros(n, dtype=np.int64)  # of the segments from here on; of the first micro-batch
    for first in range(n - 1, -1, -1):
        width = int(lengths[order[first]])
        count = np.arange(1, min(n - first, bound // width * ranks) + 1)
        cost = (
            (-(-count // ranks) * width * (linear_cost + width)) + OVERHEAD_TOKENS * linear_cost + least[first + count]
        )
        end[first] = first + count[int(cost.argmin())]
        least[first] = cost.min()
    micro_batch, place, first, index = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32), 0, 0
    while first < n:
        inside = order[first : end[first]]
        micro_batch[inside], place[inside] = index, np.arange(len(inside))
        first, index = int(end[first]), index + 1
    digest = zlib.crc32(np.concatenate([lengths, micro_batch, place, [ranks]]).tobytes())
    return Plan(place % ranks, micro_batch, place // ranks, np.zeros(n, dtype=np.int32), index, digest)


def _packed(
    lengths: NDArray[np.int64], ranks: int, bound: int, linear_cost: float, *, masked: bool
) -> list[tuple[NDArray[np.int64], _core.Plan]]:
    """Segments and plan of each class of lengths. `masked`: attention pays for what it must not see."""
    longest = int(lengths.max())
    # How often a segment's length can be doubled without exceeding the longest.
    level = np.zeros(len(lengths), dtype=np.int64)
    level += sum(lengths <= longest >> halvings for halvings in range(1, CLASSES if masked else 1))

    def planned(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], _core.Plan, float]:
        members = np.flatnonzero(chosen)
        those = lengths[members]
        width = int(those.max())
        part = _core.plan(those, ranks, width, bound // width, linear_cost=linear_cost)
        return members, part, _cost(those, part, ranks, linear_cost)

    best: list[tuple[NDArray[np.int64], _core.Plan, float]] = []
    least, before = np.inf, list[tuple[NDArray[np.int64], _core.Plan, float]]()
    for last in np.unique(level):  # lengths in (L/2, L], (L/4, L/2], ..., and the rest
        parts = [*before, planned(level >= last)]
        cost = sum(cost for _, _, cost in parts)
        if cost < least:
            best, least = parts, cost
        before.append(planned(level == last))
    return [(members, part) for members, part, _ in best]


def _cost(lengths: NDArray[np.int64], part: _core.Plan, ranks: int, linear_cost: float) -> float:
    where = part.micro_batch.astype(np.int64) * ranks + part.rank
    row = part.row.astype(np.int64)
    width = np.zeros(part.n_micro_batches * ranks)
    np.maximum.at(width, where, part.position + lengths)
    stride = int(row.max()) + 1
    rows = np.bincount(np.unique(where * stride + row) // stride, minlength=len(width))
    slowest = (rows * width * (linear_cost + width)).reshape(-1, ranks).max(axis=1)
    return float(slowest.sum()) + part.n_micro_batches * OVERHEAD_TOKENS * linear_cost


def _merge(n: int, parts: list[tuple[NDArray[np.int64], Any]]) -> Plan:
    """One plan of several: the micro-batches of the parts one after another."""
    arrays = {name: np.zeros(n, dtype=np.int32) for name in ("rank", "micro_batch", "row", "position")}
    micro_batches, digest = 0, 0
    for members, part in parts:
        for name, array in arrays.items():
            array[members] = getattr(part, name)
        arrays["micro_batch"][members] += np.int32(micro_batches)
        micro_batches += part.n_micro_batches
        digest = (digest * 1_000_003 + int(part.hash)) % 2**64
    return Plan(**arrays, n_micro_batches=micro_batches, hash=digest)
