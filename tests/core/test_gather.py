"""Segments into rows of memory that the caller brings, and bins that are closed as segments come."""

from __future__ import annotations

import itertools
import math
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sao import StreamPacker, gather_rows, pack, plan
from sao.errors import ValidationError
from sao.measure.workloads import agentic_lengths

DTYPES = (np.int32, np.float32, np.bool_, np.int64)


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from(DTYPES),
)
def test_it_is_the_loop_that_it_replaces(cuts: list[list[int]], threads: int, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(len(cuts))
    fill = np.ones(1, dtype)
    width = 60
    want = np.full((len(cuts), width), fill, dtype)
    arrays, rows, positions = [], [], []
    for row, lengths in enumerate(cuts):
        position = 1
        for length in lengths:
            arrays.append(rng.integers(0, 2, length).astype(dtype))
            rows.append(row)
            positions.append(position)
            want[row, position : position + length] = arrays[-1]
            position += length + 1
    out = np.empty_like(want)
    gather_rows(arrays, np.array(rows, np.int64), np.array(positions, np.int64), out, fill=fill, threads=threads)
    np.testing.assert_array_equal(out, want)


def test_a_micro_batch_in_shared_memory_and_in_a_tensor() -> None:
    lengths = agentic_lengths(60, 1, 10, 4000)
    ids = [np.full(n, i + 1, np.int32) for i, n in enumerate(lengths)]
    where = plan(lengths, 2, 8192, 2)
    memory = shared_memory.SharedMemory(create=True, size=2 * 8192 * 4)
    try:
        shared = np.ndarray((2, 8192), np.int32, memory.buf)
        tensor = torch.empty(2, 8192, dtype=torch.int32)
        seen = 0
        for rank in range(2):
            for micro_batch in range(where.n_micro_batches):
                mine = np.flatnonzero((where.rank == rank) & (where.micro_batch == micro_batch))
                pieces = [ids[i] for i in mine]
                at = where.row[mine].astype(np.int64), where.position[mine].astype(np.int64)
                gather_rows(pieces, *at, shared, threads=2)
                gather_rows(pieces, *at, tensor.numpy())
                np.testing.assert_array_equal(shared, tensor.numpy())
                assert (shared > 0).sum() == lengths[mine].sum()
                assert set(np.unique(shared)) - {0} == set((mine + 1).tolist())
                seen += len(mine)
        assert seen == len(lengths)
    finally:
        del shared
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [0, 2]}, r"arrays\[1\]: 3 elements at 4 of row 2 do not fit into 2 rows of 8"),
        ({"positions": [0, 6]}, r"arrays\[1\]: 3 elements at 6 of row 0 do not fit"),
        ({"positions": [0, 2]}, r"arrays\[1\]: overlaps another at 2 of row 0"),
        ({"rows": [0, -1]}, r"rows\[1\]: -1 is negative"),
        ({"rows": [0]}, r"rows: 1 entries for 2 arrays"),
        (
            {"arrays": [np.ones(3, np.float32), np.ones(3, np.int32)]},
            r"arrays\[1\]: elements of format \"i\", out has \"f\"",
        ),
        (
            {"arrays": [np.ones((1, 3), np.float32), np.ones(3, np.float32)]},
            r"arrays\[0\]: expected a contiguous array of 1",
        ),
        ({"fill": np.ones(1, np.int32)}, "fill: of format"),
        ({"threads": 0}, "threads: 0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(change: dict[str, object], message: str) -> None:
    given_: dict[str, object] = {
        "arrays": [np.ones(3, np.float32)] * 2,
        "rows": [0, 0],
        "positions": [0, 4],
        "fill": None,
        "threads": 1,
    } | change
    out = np.full((2, 8), 7, np.float32)
    for name in ("rows", "positions"):
        given_[name] = np.array(given_[name], np.int64)
    with pytest.raises(ValidationError, match=message):
        gather_rows(out=out, **given_)  # type: ignore[arg-type]
    assert (out == 7).all()


def test_out_is_not_read_from_and_must_be_writable() -> None:
    out = np.zeros((2, 4), np.int32)
    zero = np.zeros(1, np.int64)
    with pytest.raises(ValidationError, match=r"arrays\[0\]: is a part of out"):
        gather_rows([out[1]], zero, zero, out)
    out.flags.writeable = False
    with pytest.raises(ValidationError, match="out: cannot be written to"):
        gather_rows([np.zeros(1, np.int32)], zero, zero, out)


@given(st.lists(st.integers(1, 100), max_size=80), st.integers(1, 10), st.integers(0, 80))
def test_bins_close_as_items_come(lengths: list[int], open_bins: int, cut: int) -> None:
    array = np.array(lengths, np.int64)
    packer = StreamPacker(100, open_bins)
    bins: list[list[int]] = []
    for order, offsets in (packer.add(array[:cut]), packer.add(array[cut:]), packer.finish()):
        bins += [order[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in items) <= 100 for items in bins)


def test_a_stream_is_nearly_as_full_as_packing_at_once() -> None:
    lengths = agentic_lengths(4000, 0, 10, 32_768)
    packer = StreamPacker(32_768)
    closed = [len(packer.add(lengths[i : i + 50])[1]) - 1 for i in range(0, 4000, 50)]
    assert closed[5] > 0, "bins are closed long before the end"
    bins = sum(closed) + len(packer.finish()[1]) - 1
    assert bins <= 1.05 * (len(pack(lengths, 32_768)[1]) - 1)
    with pytest.raises(ValidationError, match=r"lengths\[0\]: 32769 is not in 1..=32768"):
        packer.add(np.array([32_769], np.int64))


@pytest.mark.parametrize(("seed", "longest"), [(0, 1.27), (1, 1.34), (4, 1.24)])
def test_ranks_are_even_and_the_step_is_short(seed: int, longest: float) -> None:
    lengths = agentic_lengths(512, seed)

    def quality(**options: float) -> tuple[float, float]:
        where = plan(lengths, 8, 200_000, 1, **options)
        total = where.costs.sum(axis=1)
        assert total.max() >= where.least_cost
        return float(total.max() / where.least_cost), float(8 * where.costs.max(axis=0).sum() / where.costs.sum())

    even, quick = quality(), quality(max_imbalance=math.inf)
    assert even[0] <= 1.02 and even[1] <= longest
    assert quick[0] > 1.02 and quick[1] < even[1]


def test_imbalance_is_at_least_one() -> None:
    for value in (0.99, math.nan):
        with pytest.raises(ValidationError, match=r"max_imbalance: .* must be at least 1"):
            plan(np.array([5], np.int64), 8, 200_000, 1, max_imbalance=value)
