"""Flat batches and packed micro-batches: which position predicts what, and who may see whom."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner.rollouts import make_segment, make_trajectory, random_batch

from sao.errors import ValidationError
from sao.learner.batch import flatten, micro_batches
from sao.learner.plan import plan_segments

CPU = torch.device("cpu")


def build(batch, ranks=1, row_tokens=64, rows=4):
    plan = plan_segments(batch.lengths, ranks, row_tokens, rows)
    return [micro_batches(batch, plan, rank, CPU) for rank in range(ranks)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_the_value_of_an_action_is_that_of_the_state_before_it(rng):
    """Prompt of 5 tokens, 3 action tokens: states 4, 5, 6, not 5, 6, 7 - also in a second segment of the same row."""
    trajectory = make_trajectory(rng, [make_segment(rng, [(5, 3)]), make_segment(rng, [(5, 3)])])
    for row_tokens in (8, 64):
        parts = build(flatten([trajectory], 0), row_tokens=row_tokens)[0]
        seen = [part.inputs["position_ids"][part.state_rows, part.state_columns] for part in parts]
        assert torch.cat(seen).tolist() == [4, 5, 6, 4, 5, 6]


def test_every_action_token_is_predicted_once_from_its_own_prefix(rng):
    batch = flatten(random_batch(3, 9), 0)
    for ranks, rows in [(1, 1), (1, 4), (2, 3), (3, 2)]:
        parts = [part for rank in build(batch, ranks, rows=rows) for part in rank]
        flat = torch.cat([part.flat for part in parts]).numpy()
        assert sorted(flat) == np.flatnonzero(batch.action_mask).tolist()
        for part in parts:
            state, flat = part.token_ids[part.state_rows, part.state_columns], part.flat.numpy()
            assert state.tolist() == batch.token_ids[flat - 1].tolist()
            assert part.action_ids.tolist() == batch.token_ids[flat].tolist()
            assert part.rollout_logprobs.tolist() == batch.logprobs[flat].tolist()
            assert part.temperatures.tolist() == batch.temperatures[batch.trajectory_of_token[flat]].tolist()


def test_positions_restart_and_attention_stays_inside_a_segment(rng):
    """Lengths 3 and 2 in one row: 3 + 2 positions, a causal block each, and no pair (3 -> 4)."""
    trajectory = make_trajectory(rng, [make_segment(rng, [(2, 1)]), make_segment(rng, [(1, 1)])])
    batch = flatten([trajectory], 0)
    plan = plan_segments(batch.lengths, 1, 64, 4)
    # One row for both, whatever the planner prefers.
    plan = type("Plan", (), {
        "rank": np.array([0, 0]), "micro_batch": np.array([0, 0]), "row": np.array([0, 0]),
        "position": np.array([0, 3]), "n_micro_batches": 1, "hash": plan.hash,
    })  # fmt: skip
    (part,) = micro_batches(batch, plan, 0, CPU)
    assert part.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    block = torch.zeros(5, 5, dtype=torch.bool)
    block[:3, :3], block[3:, 3:] = torch.ones(3, 3).tril().bool(), torch.ones(2, 2).tril().bool()
    assert torch.equal(part.inputs["attention_mask"][0, 0], block)
    assert list(zip(part.state_columns.tolist(), part.action_ids.tolist(), strict=True)) == [
        (1, int(batch.token_ids[2])),
        (3, int(batch.token_ids[4])),
    ]


def test_rows_are_as_short_as_the_longest_segment_and_the_token_bound_holds():
    batch = flatten(random_batch(1, 40), 0)
    longest = int(batch.lengths.max())
    for part in build(batch, row_tokens=512, rows=2)[0]:
        assert part.token_ids.shape[1] <= longest
        assert part.token_ids.numel() <= 512 * 2


def test_a_rank_without_work_gets_padding_that_holds_nothing(rng):
    batch = flatten([make_trajectory(rng, [make_segment(rng, [(5, 3)])])], 0)
    ranks = build(batch, ranks=3)
    assert len({len(parts) for parts in ranks}) == 1
    idle = [part for parts in ranks for part in parts if part.flat.numel() == 0]
    assert len(idle) == 2
    assert all(part.token_ids.shape == (1, 1) and part.all_flat.numel() == 0 for part in idle)


def test_too_long_a_segment_is_refused_with_its_length(rng):
    batch = flatten([make_trajectory(rng, [make_segment(rng, [(60, 5)])])], 0)
    with pytest.raises(ValidationError, match=r"segment 0: 65 tokens exceed learner\.row_tokens = 64"):
        plan_segments(batch.lengths, 1, 64, 4)


def test_what_cannot_be_trained_on_is_refused(rng):
    with pytest.raises(ValidationError, match="no trajectories"):
        flatten([], 0)
    failed = make_trajectory(rng, [make_segment(rng, [(5, 3)])], kind="failed")
    with pytest.raises(ValidationError, match=failed.id.hex()):
        flatten([failed], 0)
    with pytest.raises(ValidationError):
        flatten([make_trajectory(rng, [make_segment(rng, [(5, 3)], versions=(4,))])], 3)


def test_a_rollout_that_stands_twice_is_refused(rng):
    first, second = (make_trajectory(rng, [make_segment(rng, [(5, 3)])]) for _ in range(2))
    with pytest.raises(
        ValidationError, match=rf"trajectory {first.id.hex()}: is at 0 of the batch, and the same one at 2"
    ):
        flatten([first, second, first], 0)
    other = replace(second, id=first.id)
    with pytest.raises(
        ValidationError, match=rf"{first.id.hex()}: is at 0 of the batch, and another one with this id at 1"
    ):
        flatten([first, other], 0)
    assert flatten([first, second], 0).n_trajectories == 2


def test_a_token_beyond_the_vocabulary_is_refused_with_its_place(rng):
    segments = [make_segment(rng, [(5, 3)]), make_segment(rng, [(2, 2)], kind="summary"), make_segment(rng, [(4, 4)])]
    ids = segments[2].token_ids.copy()
    ids[6] = 48
    segments[2] = replace(segments[2], token_ids=ids)
    batch = [make_trajectory(rng, [make_segment(rng, [(5, 3)])]), make_trajectory(rng, segments)]
    what = (
        rf"trajectory {batch[1].id.hex()}: segments\[2\].token_ids\[6\]: 48 is not in the model's vocabulary, 0 to 47"
    )
    for summaries in (True, False):
        with pytest.raises(ValidationError, match=what):
            flatten(batch, 0, vocabulary=48, summaries=summaries)
    assert flatten(batch, 0, vocabulary=49).n_trajectories == 2


def test_lags_are_per_token(rng):
    """128 tokens, the first 64 sampled by version 7, the rest by 8: at version 9 the lags are 2 and 1."""
    batch = flatten([make_trajectory(rng, [make_segment(rng, [(2, 128)], versions=(7, 8))])], 9)
    assert batch.lags.tolist() == [-1] * 2 + [2] * 64 + [1] * 64


def test_the_checksum_sees_every_array(rng):
    from dataclasses import replace

    batch = flatten(random_batch(2, 3), 0)
    offsets = ("segment_offsets", "trajectory_offsets")
    names = ("token_ids", "action_mask", "logprobs", "lags", "ordinals", *offsets)
    changed = [replace(batch, **{name: np.roll(getattr(batch, name), 1)}) for name in names]
    changed.append(replace(batch, rewards=1 - batch.rewards))
    changed.append(replace(batch, temperatures=batch.temperatures + 0.5))
    changed.append(replace(batch, truncated=~batch.truncated))
    earned = [(np.array([1]), np.array([reward], dtype=np.float32)) for reward in (0.5, 1.0)]
    changed += [replace(batch, turn_rewards=one) for one in earned]
    assert len({batch.checksum(), *(other.checksum() for other in changed)}) == 1 + len(changed) == 13


def test_what_comes_after_a_segment_is_passed_over_what_is_left_out(rng):
    first, summary, last = (
        make_segment(rng, [(2, 3)]),
        make_segment(rng, [(2, 4)], kind="summary"),
        make_segment(rng, [(2, 5)]),
    )
    other = make_trajectory(rng, [first, last], after=((0, -1), (2, -1)))
    batch = flatten([make_trajectory(rng, [first, summary, last]), other], 0)
    assert batch.later_actions.tolist() == [9, 5, 0, 0, 2]
    assert batch.next_segment.tolist() == [1, 2, -1, -1, -1]
    assert batch.ends.tolist() == [
        batch.segment_offsets[3],
        batch.segment_offsets[4],
    ]  # the other one's was opened first
    without = flatten([make_trajectory(rng, [first, summary, last]), other], 0, summaries=False)
    assert without.later_actions.tolist() == [5, 0, 0, 2] and without.next_segment.tolist() == [1, -1, -1, -1]
