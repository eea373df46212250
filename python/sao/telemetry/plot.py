"""`curves.png`: a run's course on one page, drawn from its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.telemetry.metrics import watched, wilson
from sao.telemetry.sinks import surviving

TRAINING, HELD_OUT, GENERATORS, LEARNER, LIMIT = "#3572b0", "#d1495b", "#3a8f5c", "#3572b0", "#888888"
SMOOTH = 9  # steps in the running mean of what is noisy


def curves(records: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draws the step and eval records. Raises `ImportError` without matplotlib, `ValueError` without a step record."""
    records = surviving(records)
    steps = [watched(record) for record in records if record["kind"] == "step"]
    if not steps:
        raise ValueError("records: no step record to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    held_out = [record for record in records if record["kind"] == "eval" and record.get("success") is not None]
    config = next((record for record in records if record["kind"] == "run"), {})
    x = np.array([step.step for step in steps])
    column = {name: np.array([getattr(step, name) for step in steps], dtype=float) for name in vars(steps[0])}

    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 4).ravel()

    _noisy(panels[0], x, column["success"], TRAINING, "training batch")
    if held_out:
        rate = np.array([record["success"] for record in held_out], dtype=float)
        range_95 = np.array([wilson(round(record["success"] * record["n"]), record["n"]) for record in held_out]).T
        bars = np.abs(range_95 - rate)
        at = [record["step"] for record in held_out]
        panels[0].errorbar(at, rate, yerr=bars, color=HELD_OUT, marker="o", capsize=3, label="held out, 95%")
    _finish(panels[0], "success rate", (0, 1))

    _noisy(panels[1], x, column["reward"], TRAINING, "mean")
    _finish(panels[1], "reward of the batch")

    panels[2].axhline(0, color=LIMIT, lw=0.8)
    _noisy(panels[2], x, column["explained_variance"], TRAINING, "critic")
    _finish(panels[2], "explained variance", (-1, 1))

    _noisy(panels[3], x, 100 * column["masked_share"], TRAINING, "out of band or too old")
    _finish(panels[3], "action tokens without gradient, %", (0, None))

    panels[4].step(x, column["lag_max"], color=HELD_OUT, lw=1, where="mid", label="max")
    panels[4].plot(x, column["lag_mean"], color=TRAINING, label="mean")
    if "config/staleness/max_lag" in config:
        panels[4].axhline(config["config/staleness/max_lag"], color=LIMIT, ls="--", lw=1, label="staleness.max_lag")
    _finish(panels[4], "lag of action tokens, versions", (0, None))

    _noisy(panels[5], x, column["sampled_per_s"], GENERATORS, "sampled by generators")
    _noisy(panels[5], x, column["trained_per_s"], LEARNER, "trained by learner")
    _finish(panels[5], "action tokens per second", (0, None))

    _noisy(panels[6], x, 100 * column["generator_idle"], GENERATORS, "generators")
    _noisy(panels[6], x, 100 * column["learner_idle"], LEARNER, "learner")
    _finish(panels[6], "idle time, %", (0, 100))

    gap = np.where(column["gap"] > 0, column["gap"], np.nan)
    panels[7].plot(x, gap, color=TRAINING, lw=1, marker="o", ms=3, label="mean at lag 0")
    if np.isfinite(gap).any():
        panels[7].set_yscale("log")
    _finish(panels[7], "log-prob gap, engine to learner, nats")

    for panel in panels:
        panel.set_xlabel("optimizer step")
        panel.set_xlim(0, x[-1] + 1)
    name = title or config.get("config/run/name", "")
    if name:
        figure.suptitle(name)
    figure.savefig(path, dpi=110)


def _noisy(panel: Any, x: NDArray[np.int64], y: NDArray[np.float64], colour: str, label: str) -> None:
    """The raw line faint, its running mean strong."""
    if not np.isfinite(y).any():
        return
    panel.plot(x, y, color=colour, alpha=0.3, lw=0.8)
    panel.plot(x, _running_mean(y), color=colour, lw=1.8, label=label)


def _running_mean(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred mean of the finite values in a window of `SMOOTH`; NaN where there is none."""
    half = SMOOTH // 2
    means = np.full_like(y, np.nan)
    for index in range(len(y)):
        window = y[max(0, index - half) : index + half + 1]
        window = window[np.isfinite(window)]
        if len(window):
            means[index] = window.mean()
    return means


def _finish(panel: Any, title: str, limits: tuple[float | None, float | None] | None = None) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    panel.grid(alpha=0.25)
    if limits:
        panel.set_ylim(*limits)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)
