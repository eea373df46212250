"""The few numbers of a step that are watched: what live view and curves show, taken from a step's many metrics."""

import math
from collections.abc import Mapping
from typing import Any

# Watched number -> the metric of a step record that it is (`docs/reference/metrics.md`).
METRICS = {
    "success": "reward/success",
    "reward": "reward/mean",
    "explained_variance": "critic/explained_variance",
    "lag_mean": "lag/mean",
    "lag_max": "lag/max",
    "sampled_per_s": "broker/sampled_tokens_per_s",
    "learner_idle": "time/idle_share",
    "gap": "logprob_gap/mean",
    "step_s": "broker/step_s",
}


def watched(record: Mapping[str, Any]) -> dict[str, float]:
    """The watched numbers of a step record, by name; NaN where the step has none (a skipped step, a warm-up, ...).

    Beside `step` and `METRICS`: `masked_share`, of the action tokens those without a gradient; `trained_per_s`, action
    tokens a second of the step; `generator_idle`, share of the time in which the engines computed nothing.
    """

    def get(name: str) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    actions, step_s = get("tokens/action"), get("broker/step_s")
    return {name: get(metric) for name, metric in METRICS.items()} | {
        "step": int(record["step"]),
        "masked_share": get("tokens/masked") / actions if actions else math.nan,
        "trained_per_s": actions / step_s if step_s else math.nan,
        "generator_idle": 1 - get("broker/busy_share"),
    }


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson interval of a success rate (95 % for z = 1.96); (0, 1) for n = 0. Holds at rates 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    rate, scale = successes / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
