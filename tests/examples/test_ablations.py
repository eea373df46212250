"""The ablations of the quickstart are runs of the same task, model and size, and each is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.config import load

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
FILES = sorted((FOLDER / "ablations").glob("*.toml"))
SAO = load(FOLDER / "run.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_ablation_is_the_quickstart_but_for_its_algorithm(path):
    config = load(path)
    assert config.run.name == f"quickstart-{path.stem.replace('_', '-')}" and config.run.seed == SAO.run.seed
    for section in ("model", "sampling", "generator", "staleness", "eval", "buffer", "transport", "compaction"):
        assert getattr(config, section) == getattr(SAO, section), section
    for key in ("batch_trajectories", "policy_lr", "row_tokens", "rows_per_micro_batch", "grad_clip"):
        assert getattr(config.learner, key) == getattr(SAO.learner, key), key
    assert config.algorithm != SAO.algorithm or config.learner != SAO.learner
    if config.algorithm.has_critic:
        assert config.learner.critic_lr == SAO.learner.critic_lr
    assert f"sao train examples/quickstart/ablations/{path.name}" in path.read_text()


def test_every_baseline_has_a_file():
    configs = {path.stem: load(path) for path in FILES}
    assert {c.algorithm.estimator for c in configs.values()} == {"sao", "vapo", "grpo", "running_mean", "prompt_mean"}
    assert {c.algorithm.policy_loss for c in configs.values()} == {"dis", "ppo", "tis"}
    assert configs["grpo_dis"].algorithm.policy_loss == "dis" and configs["lambda_1"].algorithm.lambda_policy == 1
