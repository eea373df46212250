"""Combinations of estimator, group, loss and critic: what makes no sense is refused with the field's name."""

import json

import pytest

from sao import config
from sao.config import parse
from sao.errors import ConfigError

NO_CRITIC = {"learner": {"critic_warmup_steps": 0}}


def make(**sections):
    """A configuration of `algorithm__group_size=2`-like settings."""
    data = {"model": {"path": "m"}, "env": {"name": "e"}}
    for name, value in sections.items():
        section, _, field = name.partition("__")
        data.setdefault(section, {})[field] = value
    return parse(data)


GRPO = {"algorithm__estimator": "grpo", "algorithm__group_size": 8, "learner__critic_warmup_steps": 0}
MEAN = {"algorithm__estimator": "running_mean", "learner__critic_warmup_steps": 0}
PPO = {"algorithm__policy_loss": "ppo"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        GRPO,
        GRPO | PPO | {"algorithm__old_logprobs": "recomputed", "learner__policy_passes": 4},
        MEAN | {"algorithm__baseline_window": 64},
        MEAN | {"algorithm__estimator": "prompt_mean", "env__train_tasks": 512, "algorithm__prompt_window": 4},
        PPO | {"algorithm__estimator": "vapo", "algorithm__group_size": 16, "algorithm__positive_weight": 0.1},
        {"algorithm__lambda_policy": 1.0},
        {"algorithm__policy_loss": "tis", "algorithm__eps_high": 1.0},
        {"learner__value_loss": "clipped", "learner__value_clip": 0.5},
        {"run__task": "pretrain_value", "learner__critic_warmup_steps": 200},
    ],
)
def test_what_goes_together(settings, tmp_path):
    resolved = make(**settings)
    config.save(resolved, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == resolved


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"algorithm__group_size": 2}, "algorithm.group_size: 2 must be 1 with estimator = sao"),
        (MEAN | {"algorithm__group_size": 2}, "algorithm.group_size: 2 must be 1 with estimator = running_mean"),
        (GRPO | {"algorithm__group_size": 1}, "algorithm.group_size: 1 must be at least 2 with estimator = grpo"),
        (
            GRPO | {"algorithm__group_size": 7},
            "learner.batch_trajectories: 128 must be a multiple of algorithm.gro",
        ),
        (GRPO | {"staleness__stale": "drop"}, "staleness.stale: drop would tear groups apart"),
        (
            GRPO | {"learner__critic_warmup_steps": 10},
            "learner.critic_warmup_steps: 10 must be 0 with estimator = g",
        ),
        (GRPO | {"learner__critic_path": "c"}, "learner.critic_path: has no effect with estimator = grpo"),
        (GRPO | {"learner__critic_passes": 1}, "learner.critic_passes: has no effect with estimator = grpo"),
        (GRPO | {"learner__value_loss": "clipped"}, "learner.value_loss: has no effect with estimator = grpo"),
        (GRPO | {"algorithm__lambda_policy": 1.0}, "algorithm.lambda_policy: has no effect with estimator = grpo"),
        (GRPO | {"algorithm__gamma": 0.9}, "algorithm.gamma: has no effect with estimator = grpo"),
        (
            GRPO | {"run__task": "pretrain_value"},
            "run.task: pretrain_value needs an estimator with a critic (got g",
        ),
        (MEAN | {"algorithm__estimator": "prompt_mean"}, "env.train_tasks: prompt_mean needs tasks that come again"),
        (
            MEAN | {"algorithm__prompt_window": 4},
            "algorithm.prompt_window: has no effect with estimator = running_",
        ),
        ({"algorithm__baseline_window": 4}, "algorithm.baseline_window: has no effect with estimator = sao"),
        ({"algorithm__positive_weight": 0.1}, "algorithm.positive_weight: 0.1 needs estimator = vapo (got sao)"),
        (
            {"algorithm__estimator": "vapo", "algorithm__positive_weight": 0.1, "algorithm__denominator": "kept"},
            "algorithm.positive_weight: needs a denominator that is known before the pass",
        ),
        (
            {"algorithm__old_logprobs": "recomputed"},
            "algorithm.old_logprobs: recomputed needs policy_loss = ppo (got",
        ),
        ({"learner__policy_passes": 2}, "learner.policy_passes: 2 needs policy_loss = ppo (got dis)"),
        ({"learner__value_clip": 0.5}, "learner.value_clip: has no effect with value_loss = mse"),
    ],
)
def test_what_does_not(settings, fault):
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    lines = [line.removeprefix("config: ") for line in str(caught.value).splitlines()]
    assert len(lines) == 1 and lines[0].startswith(fault), lines


def test_a_critic_is_known_by_the_estimator():
    assert [make(**s).algorithm.has_critic for s in ({}, GRPO, MEAN)] == [True, False, False]


def test_rollouts_of_a_group_play_one_task_and_tasks_come_again():
    grouped = make(**GRPO, env__train_tasks=3)
    assert [grouped.prompt_of(ordinal) for ordinal in (0, 7, 8, 23, 24, 31)] == [0, 0, 1, 2, 0, 0]
    assert [make().prompt_of(ordinal) for ordinal in (0, 7, 2**40)] == [0, 7, 2**40]
    assert json.dumps(grouped.prompt_of(5)) == "0"
