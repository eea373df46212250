"""The few numbers of a step that are watched: what live view and curves show, taken from a step's many metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Watched:
    """Numbers of one step; NaN where the step has none (a skipped step, a critic that is warming up, ...)."""

    step: int
    success: float
    """Share of the batch's trajectories with reward > 0."""
    reward: float
    """Mean reward of the batch."""
    explained_variance: float
    """Of the critic, before this step's passes: 1 is perfect, 0 is a constant, below 0 is worse than a constant."""
    masked_share: float
    """Share of action tokens without gradient: out of the band or too old."""
    lag_mean: float
    lag_max: float
    """Policy versions behind, over action tokens."""
    sampled_per_s: float
    """Tokens sampled by all generators per second."""
    trained_per_s: float
    """Action tokens that the learner went through per second of the step."""
    learner_idle: float
    """Share of the step in which the learner waited for a batch."""
    generator_idle: float
    """Share of the time in which the engines computed nothing, mean over generators."""
    gap: float
    """Mean distance of the learner's log-probs from the engine's at lag 0, nats."""
    step_s: float
    """Seconds from commit to commit."""


def watched(record: Mapping[str, Any]) -> Watched:
    """The watched numbers of a step record."""

    def get(name: str) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else float("nan")

    actions, step_s = get("tokens/action"), get("broker/step_s")
    return Watched(
        step=int(record["step"]),
        success=get("reward/success"),
        reward=get("reward/mean"),
        explained_variance=get("critic/explained_variance"),
        masked_share=get("tokens/masked") / actions if actions else float("nan"),
        lag_mean=get("lag/mean"),
        lag_max=get("lag/max"),
        sampled_per_s=get("broker/sampled_tokens_per_s"),
        trained_per_s=actions / step_s if step_s else float("nan"),
        learner_idle=get("time/idle_share"),
        generator_idle=1 - get("broker/busy_share"),
        gap=get("logprob_gap/mean"),
        step_s=step_s,
    )


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson interval of a success rate (95 % for z = 1.96); (0, 1) for n = 0. Holds at rates 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    rate, scale = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
