"""Presets: every setting that belongs to a method, under one name, with its source (`algorithm.preset`).

A key that a run file gives beside its preset wins. A preset named on the command line replaces the whole method of the
file: the keys of any preset that the file gives are dropped first, with those of a critic where the method has none.
Rates, batch and warm-up belong to the model and the task, not to the method, and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sao.config.estimators import OF_A_CRITIC

Keys = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of a method and where they are from; "ours" marks what the source leaves open."""

    source: str
    algorithm: Keys
    learner: Keys = field(default_factory=dict)

    @property
    def has_critic(self) -> bool:
        """Whether its advantages come from a critic."""
        return self.algorithm["estimator"] in ("sao", "vapo")


_MASK = {"policy_loss": "dis", "eps_low": 0.3, "eps_high": 5.0, "old_logprobs": "rollout", "denominator": "all"}
_GAE = {"lambda_policy": "adaptive", "lambda_alpha": 1.5, "lambda_critic": 1.0, "skip_observations": True}
_SAO = {"estimator": "sao", "group_size": 1, **_MASK, **_GAE}
_CRITIC = {"critic_passes": 2, "critic_frozen": "attention", "value_loss": "mse", "policy_passes": 1}
_PPO_CRITIC = {"critic_frozen": "none", "value_loss": "clipped"}
_ONCE = {"policy_passes": 1}

PRESETS = {
    "sao": Preset("SAO (2607.07508), sections 3 and 4.1, band of mathematics", _SAO, _CRITIC),
    "sao_code": Preset("SAO, section 4.1, band of coding", {**_SAO, "eps_low": 0.8, "eps_high": 3.0}, _CRITIC),
    "sao_full_critic": Preset("SAO, table 3: all of the critic is trained", _SAO, {**_CRITIC, "critic_frozen": "none"}),
    "sao_one_value_update": Preset("SAO, table 3: K = 1", _SAO, {**_CRITIC, "critic_passes": 1}),
    "sao_with_observations": Preset(
        "SAO, figure 4: every position is a step of the GAE", {**_SAO, "skip_observations": False}, _CRITIC
    ),
    "sao_lambda_1": Preset("SAO with returns minus values (PACT, 2609.26355)", {**_SAO, "lambda_policy": 1.0}, _CRITIC),
    "compaction_rl": Preset(
        "CompactionRL (2607.05378), sections 4 and 5.1; clip 0.2, which it does not give: ours",
        {**_SAO, "policy_loss": "ppo", "eps_low": 0.2, "eps_high": 0.2, "cross_segment": "paper"},
        {**_CRITIC, "critic_frozen": "none"},
    ),
    "ppo": Preset(
        "PPO (1707.06347), equation 7, GAE 0.95; clipped values and skipped observations as common trainers: ours",
        {
            **_SAO,
            **{"policy_loss": "ppo", "eps_low": 0.2, "eps_high": 0.2, "old_logprobs": "recomputed"},
            **{"lambda_policy": 0.95, "lambda_critic": 0.95},
        },
        {**_PPO_CRITIC, "critic_passes": 4, "policy_passes": 4},
    ),
    "vapo": Preset(
        "VAPO (2504.05118), sections 4 and 5.1; one pass, clipped values: ours",
        {
            **_SAO,
            **{"estimator": "vapo", "group_size": 16, "positive_weight": 0.1, "lambda_alpha": 0.05},
            **{"policy_loss": "ppo", "eps_low": 0.2, "eps_high": 0.28},
        },
        {**_PPO_CRITIC, "critic_passes": 1, "policy_passes": 1},
    ),
    "grpo": Preset(
        "GRPO (2402.03300), section 4.1, without its KL term; groups of 8 as in SAO, section 4.1",
        {
            **{"estimator": "grpo", "group_size": 8, "policy_loss": "ppo", "eps_low": 0.2, "eps_high": 0.2},
            **{"old_logprobs": "rollout", "denominator": "trajectory"},
        },
        _ONCE,
    ),
    "grpo_dis": Preset("SAO, section 4.1: GRPO with DIS", {"estimator": "grpo", "group_size": 8, **_MASK}, _ONCE),
    "tis": Preset(
        "truncated importance sampling, weights at most 2, with the rest of SAO: ours",
        {**_SAO, "policy_loss": "tis", "eps_high": 1.0},
        _CRITIC,
    ),
    "running_mean": Preset("SAO, section 4.5", {"estimator": "running_mean", "baseline_window": 128, **_MASK}, _ONCE),
    "prompt_mean": Preset("SAO, section 4.3", {"estimator": "prompt_mean", "prompt_window": 8, **_MASK}, _ONCE),
}


def fill(data: Any) -> Any:
    """Plain data with the settings of its preset beneath its own; as it is where it names none."""
    preset = _named(data)
    if preset is None:
        return data
    learner = data.get("learner", {})
    filled = {**data, "algorithm": {**preset.algorithm, **data["algorithm"]}}
    if isinstance(learner, dict):
        none = {} if preset.has_critic else {"critic_warmup_steps": 0}
        filled["learner"] = {**preset.learner, **none, **learner}
    return filled


def replace_method(data: dict[str, Any]) -> None:
    """Drops from plain data, in place, what its preset replaces."""
    preset = _named(data)
    if preset is None:
        return
    for section in ("algorithm", "learner"):
        keys = {key for one in PRESETS.values() for key in getattr(one, section)}
        if not preset.has_critic:
            keys |= {*OF_A_CRITIC[section], *(["critic_warmup_steps"] if section == "learner" else [])}
        table = data.get(section)
        if isinstance(table, dict):
            for key in keys:
                table.pop(key, None)


def _named(data: Any) -> Preset | None:
    algorithm = data.get("algorithm") if isinstance(data, dict) else None
    name = algorithm.get("preset") if isinstance(algorithm, dict) else None
    return PRESETS.get(name) if isinstance(name, str) else None
