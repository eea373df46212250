"""Whole steps with each estimator and loss: the same numbers as plain code, the state that is kept, what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from learner.oracle import Oracle
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch

from sao.errors import ConfigError, ValidationError
from sao.learner.checkpoint import Checkpointer, restore
from sao.learner.step import Learner
from sao.storage.checkpoints import read
from sao.trajectory import Termination

BARE = {"learner__critic_lr": 5e-6}  # the default: any other is refused without a critic
GRPO = BARE | {"algorithm__estimator": "grpo", "algorithm__group_size": 2}
MEAN = BARE | {"algorithm__estimator": "running_mean"}
PPO = {"algorithm__policy_loss": "ppo", "algorithm__eps_low": 0.2, "algorithm__eps_high": 0.28}
VAPO = PPO | {"algorithm__estimator": "vapo", "algorithm__positive_weight": 0.1}
NO_CRITIC = {"grpo": GRPO, "grpo-ppo": GRPO | PPO, "running_mean": MEAN}
NO_CRITIC["prompt_mean"] = BARE | {"algorithm__estimator": "prompt_mean", "env__train_tasks": 3}


def batch_of(rewards, seed=0, ordinal=0, **fields):
    """Rollouts of two turns with these rewards and ordinals from `ordinal` on."""
    rng = np.random.default_rng(seed)
    return [
        make_trajectory(rng, [make_segment(rng, [(3, 2), (2, 3)])], reward=reward, ordinal=ordinal + index, **fields)
        for index, reward in enumerate(rewards)
    ]


def plain(learner, batch, advantages, loss):
    """loss(log-prob, rollout log-prob, advantage) of each action token, added up: plain autograd on whole sequences."""
    oracle = Oracle(learner.policy.lm, learner.config)
    terms, count = [], 0
    for trajectory, advantage in zip(batch, advantages, strict=True):
        for segment in trajectory.segments:
            logp = oracle.logprob(segment, trajectory.temperature)
            rollout = torch.from_numpy(segment.logprobs[segment.action_mask]).double()
            terms.append(loss(logp, rollout, advantage).sum())
            count += segment.n_actions
    return float(sum(terms).detach() / count)


def dis(logp, rollout, advantage):
    ratio = (logp - rollout).exp()
    return -torch.where((ratio > 0.7) & (ratio < 6.0), ratio, 0.0).detach() * advantage * logp


def tis(logp, rollout, advantage):
    return -(logp - rollout).exp().clamp(max=2.0).detach() * advantage * logp


def ppo(logp, rollout, advantage, low=0.2, high=0.28):
    ratio = (logp - rollout).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def parameters(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (GRPO, dis),
        (GRPO | PPO, ppo),
        (GRPO | {"algorithm__policy_loss": "tis", "algorithm__eps_high": 1.0}, tis),
    ],
    ids=["dis", "ppo", "tis"],
)
def test_a_group_step_equals_plain_code(tiny_model, settings, loss):
    learner = Learner(make_config(tiny_model, **settings))
    batch = batch_of([1.0, 0.0, 0.5, 0.5, 2.0, 1.0])
    expected = plain(learner, batch, [1 / 1, -1, 0, 0, 1, -1], loss)
    metrics = learner.step([batch[i] for i in (4, 1, 0, 3, 5, 2)]).metrics  # order does not matter
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NO_CRITIC)
def test_without_a_critic_there_is_none(tiny_model, tmp_path, name):
    learner = Learner(make_config(tiny_model, **NO_CRITIC[name]))
    assert learner.critic is None and set(learner.optimizers) == {"policy"}
    before = parameters(learner.policy)
    result = learner.step(batch_of([1.0, 0.0, 1.0, 0.0]))
    assert result.skipped is None and result.version == 1
    assert not [metric for metric in result.metrics if metric.startswith(("critic/", "loss/critic", "lambda/"))]
    assert all(not torch.equal(before[key], value) for key, value in parameters(learner.policy).items())
    saver, folder = Checkpointer(learner, tmp_path), tmp_path / "step-1"
    assert saver.save(0, []) is None and saver.finish() is None
    assert not (folder / "critic.safetensors").exists() and (folder / "model.safetensors").exists()


@pytest.mark.parametrize("name", NO_CRITIC)
def test_every_action_token_of_a_rollout_has_its_advantage_and_no_other(tiny_model, name):
    config = make_config(tiny_model, telemetry__keep_trajectories=1, **NO_CRITIC[name])
    learner = Learner(config)
    rng = np.random.default_rng(0)
    cut = make_trajectory(
        rng, [make_segment(rng, [(3, 2)]), make_segment(rng, [(2, 1), (4, 3)])], reward=1.0, turn_rewards=((0, 3, 0.5),)
    )
    whole = make_trajectory(rng, [make_segment(rng, [(1, 4)])], reward=0.5, ordinal=1)
    advantages = learner.step([cut, whole]).arrays["advantages"]
    expected = {"grpo": 1 / (1 + 2e-6), "grpo-ppo": 1 / (1 + 2e-6)}.get(name, 0.5)
    tokens = [*cut.segments, whole.segments[0]]
    mask = np.concatenate([segment.action_mask for segment in tokens])
    signs = np.concatenate([np.full(segment.n_tokens, sign) for segment, sign in zip(tokens, (1, 1, -1), strict=True)])
    assert advantages.tolist() == pytest.approx((mask * signs * expected).tolist(), rel=1e-6)


def test_a_torn_group_is_refused_before_anything_changes(tiny_model):
    learner = Learner(make_config(tiny_model, **GRPO))
    before = parameters(learner.policy)
    with pytest.raises(ValidationError, match="group 1: 1 rollouts, expected 2"):
        learner.step(batch_of([1.0, 0.0, 1.0]))
    assert all(torch.equal(before[key], value) for key, value in parameters(learner.policy).items())
    assert learner.steps == 0


def test_windows_go_on_over_steps_and_into_another_learner(tiny_model):
    learner = Learner(make_config(tiny_model, **MEAN))
    first = learner.step(batch_of([1.0, 0.0, 0.0, 0.0])).metrics
    assert first["advantage/mean"] == pytest.approx(0.0, abs=1e-7)
    other = Learner(make_config(tiny_model, **MEAN))
    other.baseline_state = learner.baseline_state
    second = learner.step(batch_of([1.0, 1.0], seed=1, ordinal=4)).metrics
    assert second["advantage/mean"] == pytest.approx(0.75)
    assert other.step(batch_of([1.0, 1.0], seed=1, ordinal=4)).metrics["advantage/mean"] == pytest.approx(0.75)
    assert learner.baseline_state == other.baseline_state and "baseline_state" in Learner.NUMBERS


def test_windows_and_a_learner_without_a_critic_go_through_a_checkpoint(tiny_model, tmp_path):
    learner, other = (Learner(make_config(tiny_model, **MEAN)) for _ in range(2))
    learner.step(batch_of([1.0, 0.0, 0.0, 0.0]))
    saver = Checkpointer(learner, tmp_path)
    saver.save(1, [(ordinal, 0) for ordinal in range(4)])
    assert saver.finish() is None
    restore(other, read(tmp_path / "step-1"))
    assert other.steps == other.version == 1 and other.baseline_state == learner.baseline_state
    one, two = (each.step(batch_of([1.0, 1.0], seed=1, ordinal=4)).metrics for each in (learner, other))
    assert one["loss/policy"] == two["loss/policy"] and one["advantage/mean"] == pytest.approx(0.75)


# -- PPO with old log-probs of the step, several passes, VAPO


def test_recomputed_old_log_probs_make_the_first_ratio_1_however_old_the_rollout(tiny_model):
    settings = GRPO | PPO | {"algorithm__old_logprobs": "recomputed"}
    learner = Learner(make_config(tiny_model, **settings))
    batch = batch_of([1.0, 0.0])
    expected = plain(learner, batch, [1, -1], lambda logp, _, advantage: -advantage * torch.ones_like(logp))
    result = learner.step(batch)
    assert result.metrics["loss/policy"] == pytest.approx(expected, abs=1e-9)
    assert result.masked_tokens == 0 and result.metrics["policy/ratio_max"] > 1.3  # against the rollout's
    assert result.metrics["time/old_logprobs_s"] > 0


@pytest.mark.parametrize("old", ["rollout", "recomputed"])
def test_passes_after_the_first_see_the_policy_move_away(tiny_model, old):
    """Old log-probs are frozen: the second pass has another loss, and the step is one version all the same."""
    settings = GRPO | PPO | {"algorithm__old_logprobs": old, "learner__policy_lr": 1e-4}
    once, twice = (Learner(make_config(tiny_model, learner__policy_passes=passes, **settings)) for passes in (1, 3))
    batch = batch_of([1.0, 0.0, 0.0, 1.0])
    one, three = once.step(batch), twice.step(batch)
    assert one.metrics["loss/policy"] == three.metrics["loss/policy"] and three.version == 1
    assert "loss/policy_2" not in one.metrics
    assert three.metrics["loss/policy_3"] < three.metrics["loss/policy_2"] < three.metrics["loss/policy"]
    assert three.metrics["policy/grad_norm_3"] > 0
    assert twice.optimizers["policy"].adam.state_dict()["state"][0]["step"] == 3


def test_a_later_pass_without_gradient_ends_the_passes_and_the_step_counts(tiny_model):
    """One token, rewarded: the first update lifts its ratio over an upper edge that is close."""
    settings = MEAN | PPO | {"algorithm__old_logprobs": "recomputed", "algorithm__eps_high": 1e-6}
    learner = Learner(make_config(tiny_model, learner__policy_passes=4, **settings))
    learner.baseline_state = {"all": [0.0], "tasks": []}
    rng = np.random.default_rng(0)
    result = learner.step([make_trajectory(rng, [make_segment(rng, [(5, 1)])], reward=1.0)])
    assert learner.optimizers["policy"].adam.state_dict()["state"][0]["step"] == 1
    assert result.skipped is None and result.version == 1 and result.trained_tokens == 1


def test_vapo_adds_the_likelihood_of_successes(tiny_model):
    batch = batch_of([1.0, 0.0])
    bare, added = (
        Learner(make_config(tiny_model, **VAPO | {"algorithm__positive_weight": w, "learner__grad_clip": 1e9}))
        for w in (0.0, 0.1)
    )
    expected = plain(added, batch[:1], [1.0], lambda logp, *_: -logp)
    gradients = []
    for learner in (bare, added):
        learner.optimizers["policy"].adam.step = lambda learner=learner: gradients.append(
            [p.grad.clone() for p in learner.optimizers["policy"].parameters.values()]
        )
        metrics = learner.step(batch).metrics
    assert metrics["loss/positive"] == pytest.approx(expected, rel=1e-6)
    oracle = Oracle(added.policy.lm, added.config)  # nothing was applied, so these are the weights of before
    logp = oracle.logprob(batch[0].segments[0], 1.0)
    logp.neg().mean().backward()
    for one, other, parameter in zip(*gradients, oracle.lm.parameters(), strict=True):
        torch.testing.assert_close(other - one, 0.1 * parameter.grad, atol=1e-6, rtol=0)


def test_vapo_without_a_success_is_ppo(tiny_model):
    metrics = Learner(make_config(tiny_model, **VAPO)).step(batch_of([0.0, 0.5])).metrics
    assert "loss/positive" not in metrics and metrics["step/skipped"] == 0


@pytest.mark.parametrize("settings", [GRPO | PPO | {"algorithm__old_logprobs": "recomputed"}, VAPO, MEAN])
def test_nothing_depends_on_packing(tiny_model, settings):
    runs = []
    for rows, chunk in ((1, 1024), (64, 7)):
        more = {"learner__rows_per_micro_batch": rows, "learner__logprob_chunk_tokens": chunk}
        if "algorithm__policy_loss" in settings:
            more["learner__policy_passes"] = 2
        learner = Learner(make_config(tiny_model, **settings, **more))
        result = learner.step(random_batch(0, 8))
        numbers = {name: value for name, value in result.metrics.items() if not name.startswith("time/")}
        runs.append((numbers, parameters(learner.policy)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-9, abs=1e-9)
    for name, value in runs[0][1].items():
        torch.testing.assert_close(value, runs[1][1][name], rtol=0, atol=1e-9)


# -- the critic's loss


@pytest.mark.parametrize("lambda_critic", [1.0, 0.9])
def test_value_clipping_measures_from_before_the_first_pass(tiny_model, lambda_critic):
    """Pass 1 moves V by about 0.5; pass 2 must see that, not the difference of a prediction from itself."""
    settings = {"learner__value_loss": "clipped", "learner__value_clip": 0.2, "learner__critic_frozen": "none"}
    config = make_config(tiny_model, **settings, learner__critic_lr=0.5, algorithm__lambda_critic=lambda_critic)
    learner = Learner(config)
    for name, parameter in learner.critic.named_parameters():
        parameter.requires_grad_(name == "head.bias")
    metrics = learner.step(batch_of([1.0, 1.0])).metrics
    assert learner.critic.head.bias.item() == pytest.approx(0.5, abs=0.5)
    assert metrics["critic/clipped_1"] == 0 and metrics["critic/clipped_2"] == 1
    if lambda_critic != 1:
        return
    # V = 0.5 (Adam's first step is the rate), held at 0.2: the larger error is (1 - 0.2)^2, which has no gradient.
    assert metrics["loss/critic_1"] == pytest.approx(1.0) and metrics["critic/grad_norm_2"] == 0
    assert metrics["loss/critic_2"] == pytest.approx(0.64, abs=1e-5)


def test_a_wide_value_clip_is_the_squared_error(tiny_model):
    runs = []
    for settings in ({}, {"learner__value_loss": "clipped", "learner__value_clip": 1e6}):
        learner = Learner(make_config(tiny_model, **settings))
        metrics = learner.step(random_batch(0, 6)).metrics
        runs.append([metrics["loss/critic_1"], metrics["loss/critic_2"], metrics["critic/grad_norm_2"]])
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)


def test_offloading_needs_a_process_group(tiny_model):
    with pytest.raises(ConfigError, match=r"learner\.offload_optimizer: needs the process group"):
        Learner(make_config(tiny_model, learner__offload_optimizer=True))


def test_of_truncated_rollouts_those_cut_by_the_clock_alone_are_bootstrapped(tiny_model):
    config = make_config(tiny_model, env__at_time_limit="bootstrap", algorithm__lambda_policy=1.0)
    found = {}
    for reason in ("max_turns", "time_limit"):
        learner = Learner(config)
        with torch.no_grad():
            learner.critic.head.bias.fill_(0.5)
        rng = np.random.default_rng(1)
        rollout = make_trajectory(rng, [make_segment(rng, [(4, 3), (2, 0)])], reward=0.25, kind="truncated")
        rollout = dataclasses.replace(rollout, termination=Termination("truncated", reason))
        found[reason] = learner.step([rollout]).metrics["advantage/mean"]
    assert found == {"max_turns": pytest.approx(0.25 - 0.5), "time_limit": pytest.approx(0.25 + 0.5 - 0.5)}
