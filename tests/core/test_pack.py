"""Packing and plans: nothing lost, nothing over the cap, as good as the bounds allow, the same every time."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sao import _core
from sao.errors import ValidationError

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


def array(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, np.int64)


def bins(lengths: list[int], capacity: int) -> list[list[int]]:
    order, offsets = _core.pack(array(lengths), capacity)
    return [order[i:j].tolist() for i, j in itertools.pairwise(offsets)]


@given(lengths_and_capacity)
def test_each_item_is_in_one_bin_and_no_bin_overflows(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = bins(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(packed)) == list(range(len(lengths)))
    assert all(packed), "an empty bin"
    assert all(sum(lengths[i] for i in items) <= capacity for items in packed)
    assert all(items == sorted(items) for items in packed)


@given(lengths_and_capacity)
def test_bins_are_near_the_lower_bound(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    if not lengths:
        return
    bound = -(-sum(lengths) // capacity)
    alone = sum(2 * n > capacity for n in lengths)
    used = len(bins(lengths, capacity))
    assert max(bound, alone) <= used
    # Any two bins together hold more than one can, or the later one would not have been opened.
    assert used <= max(1, 2 * bound)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
def test_at_most_one_bin_above_the_optimum_of_small_cases(lengths: list[int]) -> None:
    capacity = 10

    def fits(items: list[int], room: list[int]) -> bool:
        if not items:
            return True
        tried = set()
        for bin_, left in enumerate(room):
            if left >= items[0] and left not in tried:
                tried.add(left)
                if fits(items[1:], [*room[:bin_], left - items[0], *room[bin_ + 1 :]]):
                    return True
        return False

    best = next(k for k in range(1, 9) if fits(sorted(lengths, reverse=True), [capacity] * k))
    assert best <= len(bins(lengths, capacity)) <= best + 1


def reference_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing by linear search: the fullest open bin that has room, the older of equals."""
    open_: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [capacity - sum(lengths[i] for i in items) for items in open_]
        fitting = [(left, b) for b, left in enumerate(room) if left >= lengths[item]]
        if fitting:
            open_[min(fitting)[1]].append(item)
        else:
            open_.append([item])
    return [sorted(items) for items in open_]


@given(lengths_and_capacity)
def test_it_is_best_fit_decreasing(case: tuple[list[int], int]) -> None:
    assert bins(*case) == reference_best_fit(*case)


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 9, 4], 8, r"lengths\[1\]: 9 tokens do not fit into capacity = 8"),
        ([3, 0], 8, r"lengths\[1\]: 0 is not a positive"),
        ([-5], 8, r"lengths\[0\]: -5 is not"),
        ([1], 0, "capacity: 0 must be at least 1"),
        ([2**62, 1], 2**61, r"lengths\[0\]"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths: list[int], capacity: int, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _core.pack(array(lengths), capacity)


def test_nothing_packs_into_no_bins() -> None:
    order, offsets = _core.pack(array([]), 8)
    assert order.tolist() == [] and offsets.tolist() == [0]


def test_huge_lengths_do_not_overflow() -> None:
    assert bins([2**62, 2**62, 2**62 - 1], 2**63 - 1) == [[0, 2], [1]]


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([1, 2], np.int32),
        np.array([1.0]),
        np.array([1, 2, 3, 4], np.int64)[::2],
        np.array([[1]], np.int64),
        np.array([1], ">i8"),
        np.array(1, np.int64),
        [1, 2],
        None,
    ],
)
def test_other_layouts_are_refused_not_misread(wrong: object) -> None:
    with pytest.raises(TypeError, match="lengths: expected a contiguous 1-D array of int64, got"):
        _core.pack(wrong, 8)  # type: ignore[arg-type]


# Plans


def check_plan(lengths: list[int], ranks: int, row_tokens: int, rows: int) -> _core.Plan:
    plan = _core.plan(array(lengths), ranks, row_tokens, rows)
    n = len(lengths)
    for column in (plan.rank, plan.micro_batch, plan.row, plan.position):
        assert column.shape == (n,) and column.dtype == np.int32
    assert plan.rank.min() >= 0 and plan.rank.max() < ranks
    assert plan.row.min() >= 0 and plan.row.max() < rows
    assert set(plan.micro_batch.tolist()) == set(range(plan.n_micro_batches)), "a micro-batch that is empty everywhere"
    cells: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for i in range(n):
        cell = (int(plan.rank[i]), int(plan.micro_batch[i]), int(plan.row[i]))
        cells.setdefault(cell, []).append((int(plan.position[i]), lengths[i]))
    for segments in cells.values():
        position = 0
        for start, length in sorted(segments):
            assert start == position, "a gap or an overlap in a row"
            position += length
        assert position <= row_tokens
    for (rank, micro_batch, row), _ in cells.items():
        assert row == 0 or (rank, micro_batch, row - 1) in cells, "rows are filled from 0"
    least = -(-len(_core.pack(array(lengths), row_tokens)[1][1:]) // (ranks * rows))
    assert plan.n_micro_batches <= least
    costs = np.zeros((ranks, plan.n_micro_batches))
    for i, length in enumerate(lengths):
        costs[plan.rank[i], plan.micro_batch[i]] += 24576.0 * length + float(length) ** 2
    np.testing.assert_allclose(plan.costs, costs, rtol=1e-12)
    return plan


plans = st.integers(1, 50).flatmap(
    lambda cap: st.tuples(
        st.lists(st.integers(1, cap), min_size=1, max_size=100), st.integers(1, 9), st.just(cap), st.integers(1, 5)
    )
)


@given(plans)
@example(([1], 8, 1, 4))
@example(([64] + [1] * 300, 4, 64, 2))
@example(([64] * 3, 8, 64, 1))
@example(([33] * 17, 4, 64, 2))
@example(([1] * 500, 1, 7, 3))
def test_plans_are_whole(case: tuple[list[int], int, int, int]) -> None:
    check_plan(*case)


@given(plans, st.randoms(use_true_random=False))
def test_a_plan_is_a_function_of_its_input(case: tuple[list[int], int, int, int], random: object) -> None:
    lengths, ranks, row_tokens, rows = case
    first, second = (_core.plan(array(lengths), ranks, row_tokens, rows) for _ in range(2))
    assert first.hash == second.hash
    for column in ("rank", "micro_batch", "row", "position"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column))


def test_the_hash_is_the_same_in_another_process_and_sees_every_change() -> None:
    code = (
        "import numpy as np; from sao import _core;print(_core.plan(np.arange(1, 40, dtype=np.int64), 3, 64, 2).hash)"
    )
    here = _core.plan(np.arange(1, 40, dtype=np.int64), 3, 64, 2).hash
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(there.stdout) == here
    base = [5, 9, 2]
    seen = {_core.plan(array(base), 2, 16, 1).hash}
    variants = [([5, 9, 3], 2, 16, 1), ([9, 5, 2], 2, 16, 1), (base, 3, 16, 1), (base, 2, 17, 1), (base, 2, 16, 2)]
    seen |= {_core.plan(array(lengths), *rest).hash for lengths, *rest in variants}
    assert len(seen) == 6


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 8]))
def test_work_is_balanced(seed: int, ranks: int) -> None:
    """Log-normal lengths, 64 segments a rank: the slowest rank has little more work than the mean."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(2000), 0.8, 64 * ranks), 10, 16384).astype(np.int64)
    plan = check_plan(lengths.tolist(), ranks, 16384, 1)
    total = plan.costs.sum(axis=1)
    assert total.max() <= 1.15 * total.mean()
    waits = ranks * plan.costs.max(axis=0).sum() / plan.costs.sum()
    assert waits <= 1.2


def test_fewer_segments_than_ranks_leave_some_ranks_without_rows() -> None:
    plan = check_plan([7, 7, 7], 8, 8, 2)
    assert plan.n_micro_batches == 1
    assert len(set(plan.rank.tolist())) == 3
    assert (plan.costs.sum(axis=1) > 0).sum() == 3


def test_cost_parameters_matter() -> None:
    lengths = array([100, *[10] * 10])
    by_length = _core.plan(lengths, 2, 100, 8, linear_cost=1.0, quadratic_cost=0.0)
    by_pairs = _core.plan(lengths, 2, 100, 8, linear_cost=0.0, quadratic_cost=1.0)
    assert by_length.costs.sum() == 200
    assert by_pairs.costs.sum() == 11_000


@pytest.mark.parametrize(
    ("lengths", "ranks", "row_tokens", "rows", "message"),
    [
        ([], 2, 8, 1, "lengths: empty"),
        ([3, 9], 2, 8, 1, r"lengths\[1\]: 9 tokens do not fit into row_tokens = 8"),
        ([3, -9], 2, 8, 1, r"lengths\[1\]: -9"),
        ([3], 0, 8, 1, "ranks: 0 must be"),
        ([3], -1, 8, 1, "ranks: -1 must be"),
        ([3], 2**40, 8, 1, "ranks: "),
        ([3], 1, 8, 0, "rows_per_micro_batch: 0 must be"),
        ([3], 1, 2**31, 1, "row_tokens: 2147483648 must be"),
        ([3], 1, 0, 1, "row_tokens: 0 must be"),
    ],
)
def test_what_cannot_be_planned_is_named(
    lengths: list[int], ranks: int, row_tokens: int, rows: int, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _core.plan(array(lengths), ranks, row_tokens, rows)


@pytest.mark.parametrize("wrong", [{"linear_cost": float("nan")}, {"quadratic_cost": -1.0}])
def test_costs_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"_cost: .* must be finite and not negative"):
        _core.plan(array([3]), 1, 8, 1, **wrong)
