"""The distance between the log-probs of engine and learner, where both should have computed the same policy."""

import numpy as np
import pytest
import torch
from learner.oracle import Oracle
from learner.rollouts import make_config, make_segment, make_trajectory

from sao.algorithms.policy_loss import LOG_RATIO_LIMIT
from sao.learner.metrics import PolicySums
from sao.learner.step import Learner
from sao.learner.world import World


def test_the_gap_to_the_engine_is_measured_at_lag_0_only_and_absent_without(tiny_model):
    rng = np.random.default_rng(0)
    learner = Learner(make_config(tiny_model))
    exact = Oracle(learner.policy.lm, learner.config)
    segment = make_segment(np.random.default_rng(5), [(5, 1)])
    current = exact.logprob(segment, 1.0).item()
    segment = make_segment(np.random.default_rng(5), [(5, 1)], logprob=current - 0.25)
    metrics = learner.step([make_trajectory(rng, [segment])]).metrics
    assert metrics["logprob_gap/mean"] == metrics["logprob_gap/max"] == pytest.approx(0.25, abs=1e-6)
    later = learner.step([make_trajectory(rng, [segment])]).metrics  # version 0 is now one behind
    assert later["lag/mean"] == 1 and "logprob_gap/mean" not in later


def test_the_gap_is_measured_while_the_critic_warms_up_without_touching_the_policy(tiny_model):
    learner = Learner(make_config(tiny_model, learner__critic_warmup_steps=2, learner__rows_per_micro_batch=1))
    before = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    exact = Oracle(learner.policy.lm, learner.config)
    for shift in (0.0, 0.5):
        segment = make_segment(np.random.default_rng(5), [(5, 1)])
        logprob = exact.logprob(segment, 1.0).item() - shift
        segment = make_segment(np.random.default_rng(5), [(5, 1)], logprob=logprob)
        metrics = learner.step([make_trajectory(np.random.default_rng(0), [segment])]).metrics
        assert metrics["logprob_gap/mean"] == pytest.approx(shift, abs=1e-6)
        assert "policy/ratio_mean" not in metrics and "loss/policy" not in metrics
    assert all(torch.equal(before[name], parameter) for name, parameter in learner.policy.named_parameters())
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


def test_shares_are_of_all_tokens_and_extremes_are_true_ones():
    """Three of 12 tokens and three of 4 are below the band: 6/16, not the mean of 1/4 and 3/4; then 0 of 16 more."""
    sums = PolicySums(0.3, 5.0, World.alone())
    for low, count in ((3, 12), (3, 4), (0, 16)):
        rollout = torch.full((count,), -1.0)
        logprobs = rollout + torch.log(torch.tensor([0.5] * low + [1.0] * (count - low)))
        lags = torch.full((count,), 1)
        sums.add(logprobs=logprobs, rollout_logprobs=rollout, entropies=torch.ones(count), lags=lags)
    metrics = sums.metrics(40)  # eight more tokens were too old to be looked at
    assert metrics["policy/masked_low"] == pytest.approx(6 / 40) and metrics["policy/masked_high"] == 0
    assert metrics["policy/stale"] == pytest.approx(8 / 40)
    assert metrics["policy/ratio_mean"] == pytest.approx((6 * 0.5 + 26) / 32) and metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/entropy"] == 1.0 and "logprob_gap/mean" not in metrics


def test_the_largest_ratio_and_gap_are_found_wherever_they_are():
    for place in (0, 1):
        sums = PolicySums(0.3, 5.0, World.alone())
        for part in range(2):
            shift = 2.0 if part == place else 0.1
            rollout = torch.full((3,), -5.0)
            sums.add(
                logprobs=rollout + torch.tensor([shift, 0.0, -shift]), rollout_logprobs=rollout,
                entropies=torch.zeros(3), lags=torch.tensor([0, 1, 0]),
            )  # fmt: skip
        metrics = sums.metrics(6)
        assert metrics["policy/ratio_max"] == pytest.approx(np.exp(2.0), rel=1e-6)
        assert metrics["logprob_gap/max"] == pytest.approx(2.0, abs=1e-6)
        assert metrics["logprob_gap/mean"] == pytest.approx((2 * 2.0 + 2 * 0.1) / 4, abs=1e-6)


def test_a_gap_beyond_what_a_ratio_can_show_is_still_the_gap():
    sums = PolicySums(0.3, 5.0, World.alone())
    far = 3 * LOG_RATIO_LIMIT
    one = torch.zeros(1)
    sums.add(logprobs=one - far, rollout_logprobs=one, entropies=one, lags=torch.zeros(1, dtype=torch.int64))
    assert sums.metrics(1)["logprob_gap/max"] == pytest.approx(far)
