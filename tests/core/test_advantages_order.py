"""Advantages of segments that are not in order in time, against worked numbers and the oracle."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from core.test_advantages import Trajectory, batches, close, one, options, run
from hypothesis import given
from hypothesis import strategies as st

from sao.errors import ValidationError


def arrays(after: list[tuple[int, int]], first: int = 0) -> tuple[list[int], list[int]]:
    """One trajectory's, for the kernel; `first`: its first segment."""
    return [later for later, _ in after], [
        following if following == -1 else first + following for _, following in after
    ]


def test_an_answer_behind_a_side_call_is_next_to_the_reward() -> None:
    """A main conversation of 5 tokens, a side call of 100, then 5 tokens of the main one, which answer."""
    main = ([0, *[1] * 5, 0, *[1] * 5], [0.0] * 12)
    side = ([0, *[1] * 100], [0.0] * 101)
    options: dict[str, Any] = {"gamma": 1.0, "lambda_policy": None}
    adv, _ = one([main, side], 1.0, after=arrays([(0, -1), (5, -1)]), **options)
    lam = 1 - 1 / (1.5 * 110)
    assert lam == pytest.approx(0.9939, abs=1e-4)
    assert adv[0][-1] == 1.0  # the answer's factor
    assert adv[1][-1] == pytest.approx(lam**5, rel=1e-6) == pytest.approx(0.9939**5, abs=1e-3)
    by_opening, _ = one([main, side], 1.0, **options)
    assert by_opening[0][-1] == pytest.approx(0.54, abs=0.01)  # as if 100 tokens lay between answer and reward
    chained, targets = one([main, side], 1.0, after=arrays([(0, -1), (5, -1)]), cross_segment="chained", **options)
    alone, _ = one([side], 1.0, gamma=1.0, lambda_policy=float(lam))
    close(chained[1], alone[0])  # neither begins behind the other
    assert targets[0][-1] == 1.0


def test_segments_that_open_out_of_one_share_what_follows_it() -> None:
    """Two calls at once, then a summary of both: each goes on there, under `chained`, and neither in the other."""
    parts: Trajectory = [([0, 1, 1], [9, 0.2, 0.4]), ([0, 1], [9, 0.1]), ([0, 1, 1], [9, 0.5, 0.6])]
    order = [(2, 2), (2, 2), (0, -1)]
    options: dict[str, Any] = {"gamma": 0.9, "lambda_policy": 0.8, "cross_segment": "chained"}
    adv, tgt = one(parts, 1.0, after=arrays(order), **options)
    for first in (0, 1):
        alone, targets = one([parts[first], parts[2]], 1.0, **options)
        close([adv[first], adv[2]], alone)
        close([tgt[first], tgt[2]], targets)


@given(batches(), options, st.data())
def test_any_order_agrees_with_the_oracle(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any], data: st.DataObject
) -> None:
    trajectories, rewards = batch
    later: list[int] = []
    following: list[int] = []
    want_adv, want_tgt = [], []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        n = len(trajectory)
        nexts = [data.draw(st.sampled_from([-1, *range(s + 1, n)])) for s in range(n)]
        order = [(data.draw(st.integers(0, 50)), after) for after in nexts]
        a, b = arrays(order, len(later))
        later, following = later + a, following + b
        a, c, _ = oracle.gae(trajectory, reward, after=order, **chosen)
        want_adv += a
        want_tgt += c
    adv, tgt, _ = run(trajectories, rewards, after=(later, following), **chosen)
    close(adv, want_adv, 1e-5)
    close(tgt, want_tgt, 1e-5)


@given(batches(), options)
def test_segments_in_order_are_the_same_to_the_bit(
    batch: tuple[list[Trajectory], list[float]], chosen: dict[str, Any]
) -> None:
    trajectories, rewards = batch
    later: list[int] = []
    following: list[int] = []
    for trajectory in trajectories:
        counts = [sum(map(bool, mask)) for mask, _ in trajectory]
        n = len(counts)
        a, b = arrays([(sum(counts[s + 1 :]), s + 1 if s + 1 < n else -1) for s in range(n)], len(later))
        later, following = later + a, following + b
    assert (
        run(trajectories, rewards, **chosen)[:2] == run(trajectories, rewards, after=(later, following), **chosen)[:2]
    )


@pytest.mark.parametrize(
    ("later", "following", "words"),
    [
        ([0], [-1, -1], r"after\[0\]: 1 entries for 2 segments"),
        ([0, -1], [-1, -1], r"after\[0\]\[1\]: -1 is negative"),
        ([0, 0], [-1, 1], r"after\[1\]\[1\]: 1 is neither -1 nor a later segment"),
        ([0, 0], [2, -1], r"after\[1\]\[0\]: 2 is neither -1 nor a later segment"),
    ],
)
def test_a_wrong_order_is_refused(later: list[int], following: list[int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        one([([0, 1], [0.0, 0.0])] * 2, 1.0, after=(later, following))
