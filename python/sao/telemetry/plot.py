"""`curves.png`: a run's course on one page, drawn from its `metrics.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sao.telemetry.metrics import watched, wilson

RED, BLUE, GREEN, GREY = "#d1495b", "#3572b0", "#3a8f5c", "#888888"
SMOOTH = 9  # steps in the running mean of what is noisy


class Panel(NamedTuple):
    """One of the pictures. lines: watched number, colour and label of each; limits of y; scale: of the numbers."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    limits: tuple[float | None, float | None] = (None, None)
    scale: float = 1.0


PANELS = (
    Panel("success rate", (("success", BLUE, "training batch"),), (0, 1)),
    Panel("reward of the batch", (("reward", BLUE, "mean"),)),
    Panel("explained variance", (("explained_variance", BLUE, "critic"),), (-1, 1)),
    Panel("action tokens without gradient, %", (("masked_share", BLUE, "out of band or too old"),), (0, None), 100),
    Panel("lag of action tokens, versions", (("lag_max", RED, "max"), ("lag_mean", BLUE, "mean")), (0, None)),
    Panel(
        "action tokens per second",
        (("sampled_per_s", GREEN, "sampled by generators"), ("trained_per_s", BLUE, "trained by learner")),
        (0, None),
    ),
    Panel("idle time, %", (("generator_idle", GREEN, "generators"), ("learner_idle", BLUE, "learner")), (0, 100), 100),
    Panel("log-prob gap, engine to learner, nats", (("gap", BLUE, "mean at lag 0"),)),
)


def curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the step and eval records, without lost ones (`sinks.surviving`).

    Raises `ImportError` without matplotlib, `ValueError` without a step record.
    """
    steps = [watched(record) for record in records if record["kind"] == "step"]
    if not steps:
        raise ValueError("records: no step record to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    held_out = [record for record in records if record["kind"] == "eval" and record.get("success") is not None]
    config = next((record for record in records if record["kind"] == "run"), {})
    column = {name: np.array([step[name] for step in steps], dtype=float) for name in steps[0]}
    x = column["step"]
    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    success, _, explained, _, lag, _, _, gap = axes = figure.subplots(2, 4).ravel()
    if held_out:
        rate = np.array([record["success"] for record in held_out], dtype=float)
        range_95 = np.array([wilson(round(record["success"] * record["n"]), record["n"]) for record in held_out]).T
        at, bars = [record["step"] for record in held_out], np.abs(range_95 - rate)
        success.errorbar(at, rate, yerr=bars, color=RED, marker="o", capsize=3, label="held out, 95%")
    explained.axhline(0, color=GREY, lw=0.8)
    if "config/staleness/max_lag" in config:
        lag.axhline(config["config/staleness/max_lag"], color=GREY, ls="--", lw=1, label="staleness.max_lag")
    column["gap"][~(column["gap"] > 0)] = np.nan
    if np.isfinite(column["gap"]).any():
        gap.set_yscale("log")
    for panel, axis in zip(PANELS, axes, strict=True):
        for name, colour, label in panel.lines:
            if np.isfinite(column[name]).any():
                axis.plot(x, panel.scale * column[name], color=colour, alpha=0.3, lw=0.8)
                axis.plot(x, panel.scale * _running_mean(column[name]), color=colour, lw=1.8, label=label)
        axis.set_title(panel.title, fontsize=10, loc="left")
        axis.grid(alpha=0.25)
        axis.set(xlabel="optimizer step", xlim=(0, x[-1] + 1), ylim=panel.limits)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    figure.suptitle(config.get("config/run/name", ""))
    figure.savefig(path, dpi=110)


def _running_mean(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred mean of the finite values in a window of `SMOOTH`; NaN where there is none."""
    windows = sliding_window_view(np.pad(y, SMOOTH // 2, constant_values=np.nan), SMOOTH)
    means: NDArray[np.float64] = np.ma.masked_invalid(windows).mean(axis=1).filled(np.nan)
    return means
