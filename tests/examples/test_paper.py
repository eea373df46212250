"""The settings of the papers as published: both files pass a dry run, and hold the papers' numbers."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sao import config
from sao.cli import app
from sao.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "examples" / "paper"


@pytest.mark.parametrize("name", ["sao", "compaction_rl"])
def test_a_dry_run_passes(name, tiny_model, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    more = [f"model.path={tiny_model}", "generator.engine=scripted"]
    result = CliRunner().invoke(app, ["train", str(FOLDER / f"{name}.toml"), "--dry-run", *more])
    assert result.exit_code == 0, result.output
    assert "dry run: nothing was started" in result.output


def test_the_numbers_are_those_of_the_papers():
    sao, compaction = (config.load(FOLDER / f"{name}.toml") for name in ("sao", "compaction_rl"))
    assert (sao.algorithm.eps_low, sao.algorithm.eps_high, sao.algorithm.lambda_alpha) == (0.3, 5.0, 1.5)
    assert (sao.learner.policy_lr, sao.learner.critic_lr, sao.sampling.context_tokens) == (1e-6, 5e-6, 131_072)
    assert (compaction.sampling.context_tokens, compaction.compaction.threshold_tokens) == (65_536, 10_240)
    assert (compaction.learner.policy_lr, compaction.learner.critic_lr) == (2e-6, 3e-6)
    for one in (sao, compaction):
        assert (one.learner.batch_trajectories, one.learner.critic_passes, one.algorithm.group_size) == (128, 2, 1)


def test_the_papers_threshold_needs_a_permission_that_cuts_nothing():
    path = FOLDER / "compaction_rl.toml"
    assert config.load(path).compaction.clip is False
    with pytest.raises(ConfigError, match=r"threshold_tokens: 10240 must be at least .*small_threshold = true"):
        config.load(path, ["compaction.small_threshold=false"])


@pytest.mark.parametrize("name", ["sao", "compaction_rl"])
def test_every_value_says_where_it_is_from(name):
    text = (FOLDER / f"{name}.toml").read_text()
    for section in ("algorithm", "compaction", "value_pretraining"):
        for line in text.partition(f"[{section}]\n")[2].partition("\n[")[0].splitlines():
            assert " # " in line or not line or line.startswith(("preset", "enabled")), line
