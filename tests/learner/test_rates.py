"""Learning rates by step and by update, and tokens that are older than generators are paced for."""

import numpy as np
import pytest
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch

from sao.learner.step import Learner


def test_rates_follow_training_steps_not_optimizer_calls(tiny_model):
    config = make_config(tiny_model, run__steps=10, learner__lr_decay="linear", learner__critic_passes=3)
    learner = Learner(config)
    for number in range(6):
        metrics = learner.step(random_batch(number, 3)).metrics
    assert metrics["policy/lr"] == pytest.approx(1e-3 * (1 - 5 / 10))
    assert metrics["critic/lr"] == pytest.approx(1e-2 * (1 - 5 / 10))


def test_each_optimizer_warms_up_over_its_own_updates(tiny_model):
    """Two steps of critic warm-up and ten of the policy's rate: its first update is at a tenth of it, not at three."""
    own = {"learner__policy_lr_warmup_steps": 10, "learner__critic_lr_warmup_steps": 4}
    warm = Learner(make_config(tiny_model, learner__critic_warmup_steps=2, **own))
    rates = [warm.step(random_batch(number, 3)).metrics for number in range(5)]
    assert [m["policy/lr"] for m in rates] == pytest.approx([1e-4, 1e-4, 1e-4, 2e-4, 3e-4])
    assert [m["critic/lr"] for m in rates] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert (warm.version, warm.critic_steps, warm.steps) == (3, 5, 5)


def test_beyond_the_bound_a_token_is_trained_unless_it_is_masked(tiny_model):
    """`keep`: the ratio alone decides, as for any token; the lag stays visible."""
    rng = np.random.default_rng(0)
    batch = [make_trajectory(rng, [make_segment(rng, [(3, 4)], versions=(0,))])]
    kept = {}
    for stale in ("keep", "mask"):
        bands = {"algorithm__eps_low": 0.999, "algorithm__eps_high": 1e6}
        learner = Learner(make_config(tiny_model, staleness__max_lag=0, staleness__stale=stale, **bands))
        learner.version = 3
        result = learner.step(batch)
        kept[stale] = result.trained_tokens
        assert result.metrics["lag/max"] == 3
    assert kept["mask"] == 0 < kept["keep"] <= 4
