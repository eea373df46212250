"""Plans in classes of lengths: whole, equal on every rank, cheaper than one class wherever that was possible."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner.rollouts import make_config, make_segment, make_trajectory

from sao.errors import LearnerError
from sao.learner import plan as planning
from sao.learner.attention import FLEX
from sao.learner.layout import Layout
from sao.learner.plan import plan_segments
from sao.learner.step import Learner
from sao.learner.world import World

TINY, LARGE = 400.0, 24576.0


def heavy_tailed(seed, n=200, longest=1024):
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(90) + 1.1 * rng.standard_normal(n)), 10, longest).astype(np.int64)
    lengths[rng.integers(n)] = longest
    return lengths


def positions_and_pairs(lengths, plan, ranks):
    """Positions computed, and pairs of positions in attention, padding included."""
    positions = pairs = 0
    for step in range(plan.n_micro_batches):
        for rank in range(ranks):
            here = (plan.micro_batch == step) & (plan.rank == rank)
            if here.any():
                width = int((plan.position[here] + lengths[here]).max())
                rows = len(np.unique(plan.row[here]))
                positions, pairs = positions + rows * width, pairs + rows * width * width
    return positions, pairs


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 5),
    linear=st.sampled_from([1.0, TINY, LARGE]),
)
def test_every_segment_has_a_place_of_its_own_within_the_bound(lengths, ranks, rows, linear):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_segments(lengths, ranks, 300, rows, linear)
    taken = set()
    for segment, length in enumerate(lengths.tolist()):
        place = (int(plan.rank[segment]), int(plan.micro_batch[segment]), int(plan.row[segment]))
        start = int(plan.position[segment])
        cells = {(*place, column) for column in range(start, start + length)}
        assert not cells & taken
        taken |= cells
    assert plan.rank.min() >= 0 and plan.rank.max() < ranks
    assert set(plan.micro_batch.tolist()) == set(range(plan.n_micro_batches))
    for step in range(plan.n_micro_batches):
        for rank in range(ranks):
            here = (plan.micro_batch == step) & (plan.rank == rank)
            if here.any():
                width = int((plan.position[here] + lengths[here]).max())
                assert width * len(np.unique(plan.row[here])) <= 300 * rows and width <= lengths.max()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_classes_save_attention_where_it_counts_and_positions_where_it_does_not(seed, ranks):
    lengths = heavy_tailed(seed)
    one = positions_and_pairs(
        lengths, plan_segments(lengths, ranks, 1024, 4, TINY, layout=Layout(attention=FLEX)), ranks
    )
    tiny = positions_and_pairs(lengths, plan_segments(lengths, ranks, 1024, 4, TINY), ranks)
    large = positions_and_pairs(lengths, plan_segments(lengths, ranks, 1024, 4, LARGE), ranks)
    assert tiny[1] < 0.75 * one[1] and tiny[0] < 1.35 * one[0]
    assert large[0] <= 1.05 * one[0] and large[1] <= 1.01 * one[1]
    least = int((lengths**2).sum())
    assert tiny[1] < 2.2 * least


def test_equal_lengths_are_one_class():
    lengths = np.full(64, 20, dtype=np.int64)
    several, one = (
        plan_segments(lengths, 2, 128, 4, TINY),
        plan_segments(lengths, 2, 128, 4, TINY, layout=Layout(attention=FLEX)),
    )
    assert several.hash == one.hash and (several.row == one.row).all()


def test_a_plan_is_a_function_of_its_input_and_the_hash_sees_every_change():
    lengths = heavy_tailed(0)
    plan = plan_segments(lengths, 2, 1024, 4, TINY)
    again = plan_segments(lengths.copy(), 2, 1024, 4, TINY)
    assert plan.hash == again.hash and all((getattr(plan, n) == getattr(again, n)).all() for n in ("rank", "row"))
    others = [plan_segments(np.roll(lengths, 1), 2, 1024, 4, TINY), plan_segments(lengths, 4, 1024, 4, TINY)]
    others += [plan_segments(lengths, 2, 1024, 2, TINY), plan_segments(lengths, 2, 1024, 4, LARGE)]
    assert len({plan.hash, *(other.hash for other in others)}) == 5


def test_the_cheapest_number_of_classes_is_taken(monkeypatch):
    lengths, costs = heavy_tailed(3), {}
    for count in range(1, planning.CLASSES + 1):
        monkeypatch.setattr(planning, "CLASSES", count)
        plan = plan_segments(lengths, 1, 1024, 4, TINY)
        positions, pairs = positions_and_pairs(lengths, plan, 1)
        costs[count] = TINY * (positions + planning.OVERHEAD_TOKENS * plan.n_micro_batches) + pairs
    assert sorted(costs.values(), reverse=True) == list(costs.values()) and costs[1] > 1.2 * costs[planning.CLASSES]


def test_what_ranks_compare_depends_on_the_plan_and_on_the_batch(tiny_model):
    """Either alone is not enough: ranks may have the same batch and lay it out differently, or the other way round."""

    class Watched(World):
        def agree(self, what: str, number: int) -> None:
            raise LearnerError(f"{what}: {number}")

    def number(batch, **values):
        learner = Learner(make_config(tiny_model, **values), Watched(0, 1, torch.device("cpu")))
        with pytest.raises(LearnerError, match="batch and plan") as error:
            learner.step(batch)
        return str(error.value)

    rng = np.random.default_rng(0)
    segments = [make_segment(rng, [(5, 5)]) for _ in range(8)]
    batch, other = ([make_trajectory(rng, [s], reward=reward) for s in segments] for reward in (0.0, 1.0))
    assert number(batch) == number(batch)
    assert len({number(batch), number(other), number(batch, learner__rows_per_micro_batch=1)}) == 3
