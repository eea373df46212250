"""Records of a made-up run, shaped as a real one writes them."""

from typing import Any

import numpy as np

from sao.config import Config, parse
from sao.telemetry.sinks import record


def config(**sections: Any) -> Config:
    return parse({"model": {"path": "m"}, "env": {"name": "lookup"}, **sections})


def step(number: int, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    fields = {
        "step": number,
        "reward/success": 1 - 0.9 * np.exp(-number / 20).item(),
        "reward/mean": 0.5,
        "critic/explained_variance": 0.4,
        "tokens/action": 2000.0,
        "tokens/masked": float(rng.integers(0, 200)),
        "lag/mean": 1.3,
        "lag/max": 3.0,
        "broker/sampled_tokens_per_s": 1500.0 + float(rng.integers(0, 300)),
        "broker/step_s": 1.5,
        "broker/busy_share": 0.9,
        "time/idle_share": 0.2,
        "logprob_gap/mean": 1e-6,
        **changes,
    }
    return record("step", fields)


def evaluation(number: int, success: float | None, n: int = 64, failed: int = 0) -> dict[str, Any]:
    return record("eval", {"step": number, "version": number, "success": success, "n": n, "failed": failed})


def run(steps: int) -> list[dict[str, Any]]:
    records = [record("run", {"config": config().model_dump(mode="json")})]
    for number in range(1, steps + 1):
        records.append(step(number))
        if number % 20 == 0:
            records.append(evaluation(number, 1 - 0.9 * np.exp(-number / 20).item()))
    return records
