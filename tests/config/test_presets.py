"""Presets: each method is one name that sets all that belongs to it, in a file and on the command line."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from sao import config
from sao.algorithms.policy_loss import dis_loss, ppo_loss
from sao.config import parse
from sao.config.presets import PRESETS
from sao.config.sections import AlgorithmSection
from sao.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
AT = {"model": {"path": "m"}, "env": {"name": "e", "train_tasks": 256}}


def coefficient(resolved, ratio, advantage):
    """Factor of grad log pi under the loss and band of a configuration."""
    loss = {"dis": dis_loss, "ppo": ppo_loss}[resolved.algorithm.policy_loss]
    rollout = torch.tensor([-3.0], dtype=torch.float64)
    logprobs = (rollout + math.log(ratio)).requires_grad_()
    band = {"eps_low": resolved.algorithm.eps_low, "eps_high": resolved.algorithm.eps_high}
    loss(logprobs=logprobs, rollout_logprobs=rollout, advantages=torch.tensor([advantage]), **band).total.backward()
    return round(-float(logprobs.grad), 9) + 0.0


def test_the_names_are_those_of_the_schema():
    names = [name for part in get_args(AlgorithmSection.model_fields["preset"].annotation) for name in get_args(part)]
    assert names == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_in_a_file_and_over_the_quickstart(name, tmp_path):
    preset = PRESETS[name]
    for resolved in (
        parse({**AT, "algorithm": {"preset": name}}),
        config.load(QUICKSTART, [f"algorithm.preset={name}", "env.train_tasks=256"]),
    ):
        for section in ("algorithm", "learner"):
            for key, value in getattr(preset, section).items():
                assert getattr(getattr(resolved, section), key) == value, key
        config.save(resolved, tmp_path / "config.json")
        assert config.load(tmp_path / "config.json") == resolved
    assert resolved.learner.policy_lr == 3e-4
    if preset.has_critic:
        assert (resolved.learner.critic_lr, resolved.learner.critic_warmup_steps) == (3e-3, 10)


def test_no_clip_of_ppo_has_the_band_of_the_mask():
    assert coefficient(config.load(QUICKSTART), 3.0, 1.0) == 3.0
    for baseline in ("ppo", "grpo", "vapo", "compaction_rl"):
        assert coefficient(config.load(QUICKSTART, [f"algorithm.preset={baseline}"]), 3.0, 1.0) == 0.0, baseline
    assert coefficient(parse({**AT, "algorithm": {"policy_loss": "ppo"}}), 3.0, 1.0) == 0.0
    with pytest.raises(ConfigError, match=r"algorithm.eps_high: 0.8/3.0 is a band of the double-sided mask"):
        config.load(QUICKSTART, ["algorithm.policy_loss=ppo"])


def test_a_key_beside_a_preset_wins_also_after_it_on_the_command_line():
    assert parse({**AT, "algorithm": {"preset": "vapo", "group_size": 4}}).algorithm.group_size == 4
    resolved = config.load(QUICKSTART, ["algorithm.preset=ppo", "algorithm.eps_high=0.3"])
    assert (resolved.algorithm.eps_low, resolved.algorithm.eps_high) == (0.2, 0.3)


def test_no_baseline_has_the_critic_of_sao():
    for name in ("ppo", "vapo"):
        learner = parse({**AT, "algorithm": {"preset": name}}).learner
        assert learner.critic_frozen == "none" and learner.critic_passes == learner.policy_passes


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"algorithm.preset: must be 'sao', .*'prompt_mean'.*got 'dapo'"):
        parse({**AT, "algorithm": {"preset": "dapo"}})
