"""`sao pretrain-value`: an ordinary run of which only the critic is kept."""

from __future__ import annotations

from sao import config as configuration
from sao.config import Config
from sao.runtime import train as runtime

SUFFIX = "-critic"


def derive(config: Config) -> Config:
    """The run that pretrains a critic for `config`: same model, environment, sampling, batch and frozen set.

    Its name is that of the run with `-critic` behind it, so it has a folder of its own. Targets are returns
    (`lambda_critic = 1`), the start policy does not change, there are no held-out evaluations. Raises `ConfigError` for
    an estimator without a critic.
    """
    data = config.model_dump(mode="json")
    steps = config.value_pretraining.steps
    data["run"] |= {"task": "pretrain_value", "name": config.run.name + SUFFIX, "steps": steps, "target_success": None}
    data["algorithm"] |= {"lambda_critic": 1.0, "advantage_values": "before", "whiten_advantages": False}
    data["learner"] |= {"critic_warmup_steps": 0 if not config.algorithm.has_critic else steps, "save_every_steps": 0}
    data["eval"] |= {"every_steps": 0}
    return configuration.parse(data)


def pretrain(config: Config, *, overwrite: bool = False) -> int:
    """Runs it to its end; returns the exit code of the run. Raises `ConfigError` before any side effect."""
    return runtime.train(derive(config), overwrite=overwrite)


def describe(config: Config, *, overwrite: bool = False) -> str:
    """The derived configuration and the commands, as `sao train --dry-run` shows them."""
    return runtime.describe(derive(config), overwrite=overwrite)
