"""Drawing: the reported log-prob is that of the distribution drawn from, and draws depend on seed and place alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sao.engines.sampling import sample, uniforms
from sao.engines.seeds import derive_seed

ONE = np.ones(1, np.float32)


def test_temperature_acts_before_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    tokens, logprobs = sample(logits, ONE * 2, np.array([0.1]))
    assert tokens.tolist() == [0]
    assert logprobs[0] == pytest.approx(-0.787339, abs=1e-6)
    assert sample(logits, ONE, np.array([0.1]))[1][0] == pytest.approx(-0.440190, abs=1e-6)


def test_temperature_zero_takes_the_most_likely_and_scores_it_unscaled() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, np.array([0.0, 1.0], np.float32), np.array([0.999, 0.999]))
    assert tokens.tolist() == [1, 2]
    assert logprobs.tolist() == pytest.approx(torch.log_softmax(logits[0], -1)[[1, 2]].tolist())


def test_the_inverse_of_the_cumulative_distribution() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    draws = np.array([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-52])
    tokens, logprobs = sample(p.log().repeat(6, 1), np.ones(6, np.float32), draws)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    assert np.isfinite(logprobs).all() and (logprobs <= 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_give_a_broken_logprob_not_a_crash(bad: float) -> None:
    logits = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 0.0]])
    tokens, logprobs = sample(logits, np.ones(2, np.float32), np.array([0.5, 0.5]))
    assert not np.isfinite(logprobs[0]) and np.isfinite(logprobs[1])
    assert (tokens < 3).all()


def test_a_large_vocabulary_keeps_small_probabilities() -> None:
    """200,000 equally likely tokens: in float32 the cumulative sum would lose some of them."""
    n = 200_000
    tokens, _ = sample(torch.zeros(1000, n), np.ones(1000, np.float32), (np.arange(1000) * 200 + 0.5) / n)
    assert tokens.tolist() == [i * 200 for i in range(1000)]


def test_uniforms_are_uniform_and_unrelated_between_seeds_and_places() -> None:
    seeds, places = np.repeat(np.arange(500), 200), np.tile(np.arange(200), 500)
    u = uniforms(seeds, places).reshape(500, 200)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - u.size / 64) ** 2 / (u.size / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    assert np.unique(u).size == u.size
    assert uniforms(np.array([7, 8]), np.array([3, 3])).tolist() == [u[7, 3], u[8, 3]]


def test_derived_seeds_tell_their_parts_apart() -> None:
    seeds = {derive_seed(run, name, k) for run in range(3) for name in ("g0", "g1") for k in range(3)}
    assert len(seeds) == 18 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "23") != derive_seed(12, "3")
    assert derive_seed(1, "g0", 0) == derive_seed(1, "g0", 0)
