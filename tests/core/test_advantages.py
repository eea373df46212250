"""Advantages and critic targets against worked numbers and against the oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.algorithms.advantage import advantages

MODES = ("paper", "chained", "none")
Trajectory = list[tuple[list[int], list[float]]]


def run(trajectories: list[Trajectory], rewards: list[float], **options: Any) -> tuple[Any, Any, Any]:
    """The kernel on a list of trajectories: (advantages, targets) as nested lists per segment, and lambdas."""
    segments = [segment for trajectory in trajectories for segment in trajectory]
    lengths = [len(mask) for mask, _ in segments]
    cuts = np.cumsum([0, *lengths])
    adv, tgt, lambdas = advantages(
        np.array([v for _, values in segments for v in values], np.float32),
        np.array([m for mask, _ in segments for m in mask], bool),
        cuts,
        np.cumsum([0, *[len(t) for t in trajectories]]),
        np.array(rewards, np.float32),
        **options,
    )
    parts = [[a[i:j].tolist() for i, j in itertools.pairwise(cuts)] for a in (adv, tgt)]
    return parts[0], parts[1], lambdas


def one(trajectory: Trajectory, reward: float, **options: Any) -> tuple[Any, Any]:
    adv, tgt, _ = run([trajectory], [reward], **options)
    return adv, tgt


def close(got: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    flat_got, flat_wanted = (np.concatenate([np.ravel(part) for part in x]) if x else x for x in (got, wanted))
    np.testing.assert_allclose(flat_got, flat_wanted, rtol=0, atol=tolerance)


TURNS = ([1, 1, 0, 0, 1, 1], [0.5, 0.6, 9.0, -9.0, 0.4, 0.7])
FAST = {"gamma": 1.0, "lambda_policy": 0.5}


# Worked examples: skipping observations


@pytest.mark.parametrize(
    ("gamma", "lam", "wanted"),
    [
        (1.0, 0.5, [0.1125, 0.025, 0, 0, 0.45, 0.3]),
        (0.9, 0.8, [0.0984064, 0.08112, 0, 0, 0.446, 0.3]),
        (1.0, 1.0, [0.5, 0.4, 0, 0, 0.6, 0.3]),
        (1.0, None, [0.315278, 0.258333, 0, 0, 0.55, 0.3]),  # adaptive: 4 action tokens, lambda 0.833333
        (1.0, 8 / 9, [0.369959, 0.303704, 0, 0, 0.566667, 0.3]),  # what counting observations would give
    ],
)
def test_observations_between_actions_cost_nothing(gamma: float, lam: float | None, wanted: list[float]) -> None:
    adv, _ = one([TURNS], 1.0, gamma=gamma, lambda_policy=lam)
    close(adv, [wanted])


def test_ten_observation_tokens_are_as_good_as_two() -> None:
    mask, values = [1, 1, *[0] * 10, 1, 1], [0.5, 0.6, *[123.0] * 10, 0.4, 0.7]
    adv, _ = one([(mask, values)], 1.0, **FAST)
    close(adv, [[0.1125, 0.025, *[0] * 10, 0.45, 0.3]])


def test_naive_gae_is_there_for_the_ablation() -> None:
    adv, _ = one([TURNS], 1.0, skip_observations=False, **FAST)
    close(adv, [[1.003125, 1.80625, 0, 0, 0.45, 0.3]])


def test_reward_is_not_lost_on_a_trailing_observation() -> None:
    adv, _ = one([([1, 1, 0], [0.3, 0.5, 7.0])], 1.0, **FAST)
    close(adv, [[0.45, 0.5, 0]])


def test_an_empty_turn_is_no_step() -> None:
    adv, _ = one([([1, 0, 0, 0, 1], [0.2, 5, 5, 5, 0.6])], 1.0, **FAST)
    close(adv, [[0.6, 0, 0, 0, 0.4]])


def test_truncation_with_and_without_bootstrap() -> None:
    cut = [([1, 1, 0], [0.3, 0.5, math.nan])]
    close(one(cut, 0.0, **FAST)[0], [[-0.05, -0.5, 0]])
    close(one(cut, 0.0, bootstrap=[0.8], **FAST)[0], [[0.35, 0.3, 0]])


def test_tool_output_last_and_garbage_values() -> None:
    mask = [1, 1, 0, 0, 1, 0]
    for garbage in (9.0, math.nan, math.inf, 1e30):
        values = [0.5, 0.5, garbage, garbage, 0.5, garbage]
        close(one([(mask, values)], 1.0, **FAST)[0], [[0.125, 0.25, 0, 0, 0.5, 0]])
        close(one([(mask, values)], 1.0, gamma=0.9, lambda_policy=0.5)[0], [[0.02875, 0.175, 0, 0, 0.5, 0]])


def test_padding_value_is_no_bootstrap() -> None:
    adv, _ = one([([1, 1, 0], [0.2, 0.4, 100.0])], 0.0, lambda_policy=0.95, turn_rewards=([1], [1.0]))
    close(adv, [[0.77, 0.6, 0]])


def test_bootstrap_is_the_value_after_the_last_action() -> None:
    adv, _ = one([([1, 1], [0.2, 0.3])], 0.0, lambda_policy=1.0, bootstrap=[0.9])
    close(adv, [[0.7, 0.6]])


def test_terminated_and_truncated_differ() -> None:
    close(one([([1], [0.4])], 0.0)[0], [[-0.4]])
    close(one([([1], [0.4])], 0.0, bootstrap=[0.5])[0], [[0.1]])


# Worked examples: lambda


@pytest.mark.parametrize(
    ("alpha", "actions", "wanted"),
    [
        (1.5, 1, 1 / 3),
        (1.5, 2, 2 / 3),
        (1.5, 3, 7 / 9),
        (1.5, 10, 0.933333),
        (1.5, 100, 0.993333),
        (1.5, 1000, 0.999333),
        (0.05, 10, 0.0),  # -1, clamped
        (0.05, 20, 0.0),
        (0.05, 40, 0.5),
        (0.05, 100, 0.8),
    ],
)
def test_adaptive_lambda_counts_action_tokens(alpha: float, actions: int, wanted: float) -> None:
    mask = [0, 0, *[1, 0] * actions]
    _, _, lambdas = run([[(mask, [0.0] * len(mask))]], [1.0], lambda_alpha=alpha)
    assert lambdas.tolist() == pytest.approx([wanted], abs=1e-6)
    assert oracle.adaptive_lambda(actions, alpha) == pytest.approx(wanted, abs=1e-6)


def test_adaptive_lambda_is_not_capped() -> None:
    for actions, above in ((666, False), (667, True)):
        _, _, lambdas = run([[([1] * actions, [0.0] * actions)]], [0.0])
        assert bool(lambdas[0] > 0.999) is above


def test_credit_of_the_first_of_1000_tokens() -> None:
    adv, _ = one([([1] * 1000, [0.0] * 1000)], 1.0)
    assert adv[0][0] == pytest.approx(0.513645, abs=1e-6)  # lambda^999, near e^(-2/3)


def test_one_lambda_for_all_segments_of_a_rollout() -> None:
    def first_of_each(n: list[int]) -> list[float]:
        adv, _ = one([([1] * k, [0.0] * k) for k in n], 1.0)
        return [segment[-1] for segment in adv]  # the last token's local advantage is the reward itself

    assert first_of_each([1000, 200, 800]) == pytest.approx([0.716491, 0.765894, 1.0], abs=1e-6)
    assert first_of_each([5000] * 4)[0] == pytest.approx(0.606526, abs=1e-6)
    assert first_of_each([30000, 2000, 30000])[1] == pytest.approx(0.724276, abs=1e-6)
    # What a lambda of each segment's own length would give: credit that all but vanishes behind a short segment.
    for length, later, own in ((1000, 1000, 0.513303), (200, 800, 0.069175), (5000, 15000, 0.135317)):
        assert oracle.adaptive_lambda(length) ** later == pytest.approx(own, abs=1e-6)
    assert oracle.adaptive_lambda(2000) ** 30000 == pytest.approx(4.53e-5, abs=1e-7)


# Worked examples: across compactions


def of(*segments: list[float]) -> Trajectory:
    return [([1] * len(values), values) for values in segments]


def test_two_segments() -> None:
    rollout = of([0.2, 0.4], [0.6])
    close(one(rollout, 1.0, lambda_policy=0.8, cross_segment="none")[0], [[0.68, 0.6], [0.4]])
    close(one(rollout, 1.0, lambda_policy=0.8)[0], [[0.544, 0.48], [0.4]])
    close(one(rollout, 1.0, lambda_policy=0.8, cross_segment="chained")[0], [[0.616, 0.52], [0.4]])
    for mode in ("paper", "chained"):
        close(one(of([0, 0], [0]), 1.0, lambda_policy=0.8, cross_segment=mode)[0], [[0.64, 0.8], [1.0]])


def test_three_segments() -> None:
    rollout = of([0.5, 0.5], [0.25], [0.5, 0.75])
    local = [[0.25, 0.5], [0.75], [0.375, 0.25]]
    close(one(rollout, 1.0, cross_segment="none", **FAST)[0], local)
    close(one(rollout, 1.0, **FAST)[0], [[0.03125, 0.0625], [0.1875], [0.375, 0.25]])
    close(one(rollout, 0.0, **FAST)[0], [[-0.03125, -0.0625], [-0.0625], [-0.125, -0.75]])


def test_targets_are_local_and_decoupled_from_the_policy_lambda() -> None:
    close(one([TURNS], 1.0, **FAST)[1], [[1, 1, 0, 0, 1, 1]])
    close(one([TURNS], 1.0, gamma=0.9, lambda_policy=0.5)[1], [[0.729, 0.81, 0, 0, 0.9, 1]])
    close(one([TURNS], 1.0, lambda_critic=0.5, **FAST)[1], [[0.6125, 0.625, 0, 0, 0.85, 1]])
    rollout = of([0.5, 0.5], [0.25], [0.5, 0.75])
    close(one(rollout, 1.0, **FAST)[1], [[1, 1], [1], [1, 1]])
    close(one(rollout, 1.0, lambda_critic=0.5, **FAST)[1], [[0.75, 1], [1], [0.875, 1]])
    # Adding V to the advantage as the policy sees it would pull early targets towards V: this must not come out.
    adv, _ = one(rollout, 1.0, lambda_critic=0.5, **FAST)
    values = [segment for _, segment in rollout]
    shrunk = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(adv, values, strict=True)]
    close(shrunk, [[0.53125, 0.5625], [0.4375], [0.875, 1]])


def test_whole_rollout_with_a_summary() -> None:
    rollout: Trajectory = [([1, 1, 0, 1], [0.4, 0.5, 7.0, 0.6]), ([1, 1], [0.5, 0.8])]
    adv, tgt, lambdas = run([rollout], [1.0])
    assert lambdas[0] == pytest.approx(0.866667, abs=1e-6)
    close(adv, [[0.365875, 0.335496, 0, 0.300444], [0.473333, 0.2]])
    close(one(rollout, 1.0, cross_segment="none")[0], [[0.487111, 0.446667, 0, 0.4], [0.473333, 0.2]])
    close(tgt, [[1, 1, 0, 1], [1, 1]])


def test_an_outcome_reaches_every_action_token_of_every_segment() -> None:
    rollout: Trajectory = [([0, 1, 1, 1], [0.0] * 4), ([1, 1, 0, 0], [0.0] * 4), ([0, 0, 1, 0], [0.0] * 4)]
    for mode in MODES:
        adv, _ = one(rollout, 2.0, lambda_policy=1.0, cross_segment=mode)
        assert adv == [[0, 2, 2, 2], [2, 2, 0, 0], [0, 0, 2, 0]]


# Turn rewards


def test_turn_rewards_stay_in_their_segment_on_paper_and_cross_cuts_in_a_chain() -> None:
    rollout = of([0.0, 0.0], [0.0, 0.0])
    turn = {"turn_rewards": ([2], [8.0]), "lambda_policy": 0.5}
    close(one(rollout, 0.0, **turn)[0], [[0, 0], [8, 0]])
    close(one(rollout, 0.0, cross_segment="chained", **turn)[0], [[2, 4], [8, 0]])
    early = {"turn_rewards": ([0], [8.0]), "lambda_policy": 0.5}
    close(one(rollout, 0.0, **early)[0], [[2, 0], [0, 0]])  # (1 * 0.5)^2 for the two later actions
    close(one(rollout, 0.0, cross_segment="none", **early)[0], [[8, 0], [0, 0]])


def test_turn_rewards_on_one_token_add_up_in_any_order() -> None:
    rollout = of([0.0, 0.0, 0.0])
    adv, _ = one(rollout, 1.0, lambda_policy=1.0, turn_rewards=([2, 0, 2, 1], [0.5, 4.0, 0.25, 2.0]))
    assert adv == [[7.75, 3.75, 1.75]]


# Properties


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Trajectory], list[float]]:
    number = st.floats(-4, 4, width=32)
    segment = st.lists(st.tuples(st.integers(0, 1), number), min_size=0, max_size=12)
    trajectories = draw(st.lists(st.lists(segment, max_size=4), min_size=1, max_size=4))
    whole = [[([m for m, _ in s], [v for _, v in s]) for s in t] for t in trajectories]
    return whole, draw(st.lists(number, min_size=len(whole), max_size=len(whole)))


options = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([1.0, 0.99, 0.5]),
        "lambda_policy": st.sampled_from([None, 0.0, 0.5, 0.95, 1.0]),
        "lambda_critic": st.sampled_from([1.0, 0.9, 0.0]),
        "cross_segment": st.sampled_from(MODES),
        "skip_observations": st.booleans(),
    }
)


@given(batches(), options, st.data())
def test_agrees_with_the_oracle(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any], data: st.DataObject
) -> None:
    trajectories, rewards = batch
    boot = data.draw(st.lists(st.floats(-2, 2, width=32), min_size=len(rewards), max_size=len(rewards)))
    actions = [
        (t, s, k)
        for t, trajectory in enumerate(trajectories)
        for s, (mask, _) in enumerate(trajectory)
        for k, m in enumerate(mask)
        if m
    ]
    earned = data.draw(st.lists(st.sampled_from(actions), max_size=3, unique=True)) if actions else []
    starts = np.cumsum([0, *[len(mask) for trajectory in trajectories for mask, _ in trajectory]])
    first = np.cumsum([0, *[len(t) for t in trajectories]])
    positions = [int(starts[first[t] + s]) + k for t, s, k in earned]
    adv, tgt, lambdas = run(
        trajectories, rewards, bootstrap=boot, turn_rewards=(positions, [0.75] * len(earned)), **chosen
    )
    want_adv, want_tgt = [], []
    for i, trajectory in enumerate(trajectories):
        turns = {(s, k): 0.75 for t, s, k in earned if t == i}
        a, c, lam = oracle.gae(trajectory, rewards[i], bootstrap=boot[i], turn_rewards=turns, **chosen)
        want_adv += a
        want_tgt += c
        assert lambdas[i] == pytest.approx(lam, abs=1e-12, nan_ok=True)
    close(adv, want_adv, 1e-5)
    close(tgt, want_tgt, 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", [True, False])
def test_every_mask_and_every_cut_of_up_to_8_tokens(mode: str, skip: bool) -> None:
    """All masks up to 8 tokens with all single cuts, and all multiple cuts of up to 6 tokens, in one call a length."""
    values = np.random.default_rng(7).uniform(-2, 2, 8).astype(np.float32).tolist()
    chosen: dict[str, Any] = {"gamma": 0.9, "lambda_policy": None, "lambda_critic": 0.8, "cross_segment": mode}
    for n in range(1, 9):
        cuts_of_n = (
            list(itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)))
            if n <= 6
            else [(), *[(c,) for c in range(1, n)]]
        )
        trajectories = []
        for mask in itertools.product((0, 1), repeat=n):
            for cuts in cuts_of_n:
                pieces = itertools.pairwise((0, *cuts, n))
                trajectories.append([(list(mask[i:j]), values[i:j]) for i, j in pieces])
        adv, tgt, _ = run(trajectories, [1.5] * len(trajectories), skip_observations=skip, **chosen)
        wanted = [oracle.gae(t, 1.5, skip_observations=skip, **chosen) for t in trajectories]
        close(adv, [segment for a, _, _ in wanted for segment in a])
        close(tgt, [segment for _, t, _ in wanted for segment in t])


@given(batches(), options, st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e30]))
def test_masked_values_change_no_bit(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any], garbage: float
) -> None:
    chosen = chosen | {"skip_observations": True}
    trajectories, rewards = batch
    dirty = [[(m, [v if k else garbage for k, v in zip(m, vs, strict=True)]) for m, vs in t] for t in trajectories]
    clean, soiled = run(trajectories, rewards, **chosen), run(dirty, rewards, **chosen)
    assert clean[:2] == soiled[:2]


@given(batches(), options, st.integers(1, 9))
def test_inserted_observations_change_nothing(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any], width: int
) -> None:
    chosen = chosen | {"skip_observations": True}
    trajectories, rewards = batch

    def pad(mask: list[int], values: list[float]) -> tuple[list[int], list[float]]:
        return [x for m in mask for x in (m, *[0] * width)], [x for v in values for x in (v, *[99.0] * width)]

    adv, tgt, _ = run(trajectories, rewards, **chosen)
    adv_wide, tgt_wide, _ = run([[pad(m, v) for m, v in t] for t in trajectories], rewards, **chosen)
    # Neighbouring actions go through the recurrence several at a time, which may round the last bit differently.
    close([a[:: width + 1] for a in adv_wide], adv, 1e-5)
    close([a[:: width + 1] for a in tgt_wide], tgt, 1e-5)


@given(batches(), options)
def test_neighbours_and_their_order_do_not_matter(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any]
) -> None:
    trajectories, rewards = batch
    together, _, _ = run(trajectories, rewards, **chosen)
    alone = [run([t], [r], **chosen)[0] for t, r in zip(trajectories, rewards, strict=True)]
    assert together == [segment for part in alone for segment in part]
    backwards, _, _ = run(trajectories[::-1], rewards[::-1], **chosen)
    assert backwards == [segment for part in alone[::-1] for segment in part]


@given(batches(), options, st.data())
def test_a_chain_does_not_see_where_it_is_cut(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any], data: st.DataObject
) -> None:
    chosen = chosen | {"cross_segment": "chained", "skip_observations": True}
    trajectories, rewards = batch
    joined = [[([m for mask, _ in t for m in mask], [v for _, vs in t for v in vs])] for t in trajectories]
    recut = []
    for ((mask, values),) in joined:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(mask)), max_size=3)))
        recut.append([(mask[i:j], values[i:j]) for i, j in itertools.pairwise((0, *cuts, len(mask)))])
    flat = [np.concatenate([np.ravel(s) for s in run(b, rewards, **chosen)[0]] or [[]]) for b in (joined, recut)]
    np.testing.assert_array_equal(*flat)


@given(batches())
def test_without_discount_and_with_lambda_1_it_telescopes(batch: tuple[list[Trajectory], list[float]]) -> None:
    trajectories, rewards = batch
    for mode in MODES:
        adv, tgt, _ = run(trajectories, rewards, lambda_policy=1.0, cross_segment=mode)
        segments = [(segment, r) for t, r in zip(trajectories, rewards, strict=True) for segment in t]
        want = [[r - v if m else 0.0 for m, v in zip(*s, strict=True)] for s, r in segments]
        close(adv, want, 1e-4)
        close(tgt, [[r if m else 0.0 for m in s[0]] for s, r in segments], 1e-4)


def test_with_zero_values_paper_and_chain_give_the_outcome_the_same_distance() -> None:
    """Without a baseline the exponent from a token to the outcome counts all later action tokens, in both modes."""
    n, decay = [3, 2, 4], 0.7
    want = [2.0 * decay ** (sum(n) - 1 - i) for i in range(sum(n))]
    for mode in ("paper", "chained"):
        adv, _ = one(of(*[[0.0] * k for k in n]), 2.0, lambda_policy=decay, cross_segment=mode)
        assert np.concatenate(adv).tolist() == pytest.approx(want, abs=1e-6)


def test_a_trajectory_without_actions_takes_no_part() -> None:
    busy: Trajectory = [([0, 1, 1], [0.1, 0.2, 0.3])]
    idle: Trajectory = [([0, 0], [math.nan, 5.0]), ([0], [7.0])]
    adv, tgt, lambdas = run([idle, busy, [], idle], [9.0, 1.0, 3.0, 9.0])
    assert adv[:2] == tgt[:2] == [[0, 0], [0]] == adv[3:] == tgt[3:]
    assert adv[2] == run([busy], [1.0])[0][0]
    assert np.isnan(lambdas).tolist() == [True, False, True, True]


def test_long_sequences_do_not_drift() -> None:
    n = 200_000
    values = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    adv, tgt, _ = advantages(
        values, np.ones(n, bool), [0, n], [0, 1], [1.0], gamma=0.999, lambda_policy=0.95, lambda_critic=1.0
    )
    wide = values.astype(np.float64)
    delta = 0.999 * np.append(wide[1:], 0.0) - wide
    delta[-1] += 1.0
    carry = 0.0
    want = np.empty(n)
    for t in range(n - 1, -1, -1):
        carry = delta[t] + 0.999 * 0.95 * carry
        want[t] = carry
    np.testing.assert_allclose(adv, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(tgt, 0.999 ** np.arange(n - 1, -1, -1, dtype=np.float64), rtol=1e-6, atol=1e-6)
