"""The token-level loss does not see where a rollout was cut (CompactionRL, Eq. 12); a mean of means does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sao.algorithms.advantage import whiten
from sao.algorithms.policy_loss import dis_loss, ppo_loss

Loss = Callable[..., Any]


def step_loss(
    loss: Loss, tokens: dict[str, torch.Tensor], cuts: Sequence[int], rows: int
) -> tuple[float, torch.Tensor]:
    """The loss of a step over segments [cuts[i], cuts[i + 1]), `rows` of them in a micro-batch: sums, one division."""
    leaf = tokens["logprobs"].clone().requires_grad_()
    pieces = list(itertools.pairwise(cuts))
    totals, count = [], 0
    for first in range(0, len(pieces), rows):
        at = torch.cat([torch.arange(a, b) for a, b in pieces[first : first + rows]])
        part = {name: tensor[at] for name, tensor in tokens.items() if name != "logprobs"}
        found = loss(logprobs=leaf[at], eps_low=0.3, eps_high=5.0, **part)
        totals.append(found.total)
        count += int(found.count)
    mean = sum(totals) / count
    mean.backward()
    return float(mean.detach()), leaf.grad


@pytest.mark.parametrize("loss", [dis_loss, ppo_loss], ids=["dis", "ppo"])
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), data=st.data())
def test_any_cut_into_any_rows_gives_the_same_loss(loss: Loss, seed: int, n: int, data: st.DataObject) -> None:
    """Same advantage a token, float64: 1e-12, gradients too."""
    rng = np.random.default_rng(seed)
    behaviour = -rng.exponential(1.0, n)
    tokens = {
        "logprobs": torch.from_numpy(np.minimum(behaviour + rng.normal(0, 1.0, n), 0.0)),
        "rollout_logprobs": torch.from_numpy(behaviour),
        "advantages": torch.from_numpy(rng.normal(0, 2.0, n)),
    }
    results = []
    for _ in range(2):
        inner = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
        results.append(step_loss(loss, tokens, [0, *inner, n], data.draw(st.integers(1, n))))
    (one, gradient), (other, again) = results
    assert other == pytest.approx(one, rel=1e-12, abs=1e-12)
    assert torch.allclose(gradient, again, rtol=1e-12, atol=1e-12)


def test_worked_example_of_token_and_segment_means() -> None:
    """Rollout X in segments of losses 1111, 22, 66, rollout Y of eight 0.5: 1.5 by tokens however X is cut; by segments
    2.375, and 1.5 when X is one."""
    losses = torch.tensor([1.0] * 4 + [2.0] * 2 + [6.0] * 2 + [0.5] * 8, dtype=torch.float64)
    tokens = {"logprobs": -losses, "rollout_logprobs": -losses, "advantages": torch.ones_like(losses)}
    for cuts in ([0, 4, 6, 8, 16], [0, 8, 16], [0, 1, 2, 3, 8, 12, 16]):
        for rows in (1, 2, 16):
            assert step_loss(dis_loss, tokens, cuts, rows)[0] == 1.5

    def by_segment(cuts: list[int]) -> float:
        lengths = np.diff(cuts)
        weights = torch.from_numpy(np.repeat(1.0 / lengths, lengths))
        found = dis_loss(**tokens, eps_low=0.3, eps_high=5.0, token_weights=weights)
        return float(found.total) / len(lengths)

    assert by_segment([0, 4, 6, 8, 16]) == 2.375 and by_segment([0, 8, 16]) == 1.5


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 40))
def test_whitening_counts_sampled_tokens_once_however_a_rollout_is_cut(seed: int, n: int) -> None:
    """Cutting adds context rows, copies of tokens that are already there; they are not in the statistics."""
    rng = np.random.default_rng(seed)
    values = rng.normal(1.0, 2.0, n).astype(np.float32)
    whole = whiten(values, np.ones(n, bool))
    at = int(rng.integers(1, n))
    copied = np.concatenate([values[:at], values[:at] * 100, values[at:]])
    mask = np.concatenate([np.ones(at, bool), np.zeros(at, bool), np.ones(n - at, bool)])
    pieces = whiten(copied, mask)
    assert np.allclose(pieces[mask], whole, rtol=1e-6, atol=1e-6)
