"""Value pretraining: when it stops, what it trains, and that reinforcement learning can start from its critic."""

import json

import numpy as np
import pytest
import torch
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch
from learner.test_loop import Broker

from sao.algorithms.value import value_moments
from sao.config import parse
from sao.config.sections import ValuePretrainingSection
from sao.errors import ConfigError, LearnerError
from sao.learner.loop import STOPPED
from sao.learner.pretrain import Progress, pretrain
from sao.learner.step import Learner
from sao.runtime.train import value_pretraining as derive


def moments(explained, n=100):
    """Moments of a batch with this explained variance: returns 0 and 1, errors scaled to it."""
    returns = torch.tensor([0.0, 1.0] * n)
    values = returns - (1 - explained) ** 0.5 * torch.tensor([-0.5, 0.5] * n)
    return value_moments(values=values, returns=returns)


def stops(series, **settings):
    """After how many batches, and why."""
    progress = Progress(ValuePretrainingSection(**settings))
    for number, explained in enumerate(series, start=1):
        reason = progress.add(moments(explained))
        if reason:
            return number, reason, progress.explained_variance
    return None


class TestProgress:
    """The rule, on made-up batches."""

    def test_it_stops_at_the_target_over_a_window_not_at_a_lucky_batch(self):
        number, reason, explained = stops([0.0, 0.9, 0.0, 0.6, 0.6, 0.6], window=3, target=0.5)
        assert (number, explained) == (6, pytest.approx(0.6))
        assert reason == "explained variance 0.600 reached value_pretraining.target = 0.5"

    def test_fifty_batches_are_fifty(self):
        """A critic that stands still for long may still learn; by default nothing but a target ends it earlier."""
        assert stops([0.1] * 60)[:2] == (50, "50 batches done")

    def test_it_stops_on_a_plateau_if_asked(self):
        rising = [0.1, 0.2, 0.3, 0.3, 0.305, 0.309, 0.3]
        number, reason, _ = stops(rising, window=1, patience=4, min_gain=0.01)
        assert number == 7 and reason == "explained variance 0.300 has not gained 0.01 in 4 batches"
        assert stops(rising, window=1, patience=5, min_gain=0.01) is None

    def test_it_stops_after_its_batches(self):
        assert stops([0.1, 0.2, 0.3, 0.4], steps=3, window=1)[:2] == (3, "3 batches done")

    def test_the_window_pools_batches_and_nothing_is_measured_before_it_is_full(self):
        progress = Progress(ValuePretrainingSection(window=2))
        progress.add(moments(0.8, n=300))
        assert progress.explained_variance is None
        progress.add(moments(0.4, n=100))
        assert progress.explained_variance == pytest.approx((3 * 0.8 + 0.4) / 4)

    def test_equal_returns_have_no_explained_variance_and_stop_nothing(self):
        progress = Progress(ValuePretrainingSection(window=1, patience=2, steps=9))
        same = value_moments(values=torch.rand(9), returns=torch.ones(9))
        assert [progress.add(same) for _ in range(8)] == [None] * 8 and progress.explained_variance is None


def made(tiny_model, **settings):
    """The configuration of the pretraining run for the tests' own."""
    return derive(make_config(tiny_model, value_pretraining__window=1, **settings))


def learnable(seed, count=16):
    """Rollouts whose return shows in their first token."""
    rng = np.random.default_rng(seed)
    batch = []
    for index in range(count):
        segment = make_segment(rng, [(3, 3)])
        reward = float(rng.integers(0, 2))
        segment = type(segment)(
            kind="execution",
            token_ids=np.where(np.arange(6) == 0, 10 + int(reward), segment.token_ids).astype(np.int32),
            action_mask=segment.action_mask,
            logprobs=segment.logprobs,
            version_spans=segment.version_spans,
        )
        batch.append(make_trajectory(rng, [segment], reward=reward, ordinal=seed * count + index))
    return batch


def test_the_derived_run_trains_a_critic_on_returns_and_nothing_else(tiny_model):
    config = made(tiny_model, learner__critic_warmup_steps=3, algorithm__lambda_critic=0.9, run__target_success=0.9)
    assert (config.run.task, config.run.name, config.run.steps) == ("pretrain_value", "run-critic", 50)
    assert config.algorithm.lambda_critic == 1 and config.run.target_success is None and config.eval.every_steps == 0
    data = make_config(tiny_model).model_dump(mode="json")
    data["algorithm"] |= {"estimator": "running_mean"}
    data["learner"] |= {"critic_lr": 5e-6}
    with pytest.raises(ConfigError, match="pretrain_value needs an estimator with a critic"):
        derive(parse(data))


def test_batches_are_trained_on_until_it_is_enough_and_the_critic_is_kept(tiny_model, tmp_path):
    settings = {"value_pretraining__target": 0.5, "value_pretraining__steps": 40, "value_pretraining__patience": 40}
    config = made(tiny_model, model__dtype="float32", learner__critic_lr=1e-2, **settings)
    learner = Learner(config)
    start = {name: parameter.detach().clone() for name, parameter in learner.critic.named_parameters()}
    broker = Broker(*((learnable(seed), 0) for seed in range(40)))
    reason = pretrain(learner, broker, tmp_path)
    assert "reached value_pretraining.target = 0.5" in reason and 1 < learner.steps < 40
    assert [commit.done for commit in broker.commits] == [""] * (learner.steps - 1) + [reason]
    assert {(commit.version, commit.weights) for commit in broker.commits} == {(0, None)}
    assert {commit.masked_tokens for commit in broker.commits} == {0}
    explained = [commit.metrics["critic/explained_variance_window"] for commit in broker.commits]
    assert explained[0] < 0.1 and explained[-1] >= 0.5
    metadata = json.loads((tmp_path / "critic" / "pretraining.json").read_text())
    assert metadata["batches"] == learner.steps and metadata["rollouts"] == 16 * learner.steps
    assert metadata["explained_variance"] == explained[-1] and metadata["reason"] == reason
    assert {path.name for path in (tmp_path / "critic").iterdir()} == {
        "config.json",
        "critic.safetensors",
        "pretraining.json",
    }
    again = Learner(make_config(tiny_model, model__dtype="float32", learner__critic_path=str(tmp_path / "critic")))
    for name, parameter in again.critic.named_parameters():
        assert torch.equal(parameter, dict(learner.critic.named_parameters())[name])
        assert torch.equal(parameter, start[name]) == (".self_attn." in name), "the frozen set is that of training"
    fresh = again.step(learnable(99)).metrics
    assert fresh["critic/explained_variance"] > 0.4, "it knows rollouts that it has not seen"


def test_a_learner_of_values_has_no_policy(tiny_model):
    learner = Learner(made(tiny_model))
    with pytest.raises(LearnerError, match="has a critic and no policy"):
        _ = learner.policy
    result = learner.step(random_batch(0, 4))
    assert result.version == 0 and result.weights is None and set(learner.optimizers) == {"critic"}
    assert not [name for name in result.metrics if name.startswith("policy/")]


def test_a_run_that_is_stopped_keeps_what_there_is(tiny_model, tmp_path):
    config = made(tiny_model)
    assert pretrain(Learner(config), Broker("stop"), tmp_path) == STOPPED
    assert not (tmp_path / "critic").exists()
    broker = Broker((random_batch(0, 4), 0), "stop")
    assert pretrain(Learner(config), broker, tmp_path) == STOPPED
    assert json.loads((tmp_path / "critic" / "pretraining.json").read_text())["batches"] == 1


@pytest.mark.parametrize("more", [{}, {"algorithm__bootstrap_truncated": True}, {"algorithm__lambda_critic": 1.0}])
def test_explained_variance_is_of_the_returns_whatever_lambda_critic_is(tiny_model, more):
    """Targets at lambda 0.3 follow the critic, however wrong it is about the rewards: they would look explained."""
    config = make_config(tiny_model, **{"algorithm__lambda_critic": 0.3, "learner__critic_lr": 0.1} | more)
    learner = Learner(config)
    for seed in range(3):
        learner.step(random_batch(seed, 12))
    batch = random_batch(7, 12)
    result, update = learner.step(batch), learner.critic_update
    rewards = np.array([trajectory.reward for trajectory in batch for _ in range(trajectory.n_actions)])
    assert update.moments[1:3].tolist() == pytest.approx([rewards.sum(), (rewards**2).sum()])
    count, _, _, error, squares = update.moments.tolist()
    expected = 1 - (squares / count - (error / count) ** 2) / rewards.var()
    assert result.metrics["critic/explained_variance"] == pytest.approx(expected)
