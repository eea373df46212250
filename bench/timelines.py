"""The three timelines of SAO's figure 2, with real processes: what waiting for groups and for batches costs.

    python bench/timelines.py [--seeds 0 1 2] [--sigmas 0 1 1.5] [--arms ...] [--steps 6] [--model FOLDER]

Tool calls sleep for log-normal times, so that neither the engine nor the learner is the limit. All arms have the same
32 slots, batches of 32 rollouts and task: `sync_groups` (groups of 8, none started before the update), `async_groups`
(groups of 8, up to four versions ahead) and `single` (single rollouts, as far ahead). Wall clock is from the first
update to the last, for the action tokens trained in between.

What was measured is in bench/results/timelines.json, one entry for each arm, tail and seed; those that are there
already are not run again (delete an entry to repeat it). The page's picture is made from the same file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, machine

from sao.telemetry import sinks

RESULT = RESULTS / "timelines.json"
PICTURE = Path("docs/img/timelines.png")
SLOTS = 32
ARMS = {
    "sync_groups": ["algorithm.preset=grpo_dis", "algorithm.group_size=8", "staleness.max_lag=0"],
    "async_groups": ["algorithm.preset=grpo_dis", "algorithm.group_size=8"],
    "single": ["algorithm.preset=running_mean"],  # no critic here either: all arms have the same learner
}


def run(arm: str, sigma: float, seed: int, steps: int, model: str) -> dict[str, Any]:
    """One run; seconds and action tokens behind its first update, idle share of the slots, lag."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "waits")
        overrides = [
            *ARMS[arm],
            *(f"run.dir={folder}", "run.name=r", f"run.seed={seed}", f"run.steps={steps}", f"model.path={model}"),
            *("run.target_success=none", "eval.every_steps=0", "generator.count=1", f"generator.concurrency={SLOTS}"),
            *(f"learner.batch_trajectories={SLOTS}", "env.name=bench.slow_tools:SlowLookup", "telemetry.plot=false"),
            f'env.args={{log = "{log}", sigma = {float(sigma)}}}',
        ]
        command = [sys.executable, "-m", "sao.cli", "train", "examples/quickstart/run.toml", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [record for record in sinks.read(Path(folder, "r", "metrics.jsonl")) if record["kind"] == "step"]
        waits = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    begin, end = rows[0]["time_s"], rows[-1]["time_s"]
    busy_s = sum(max(0.0, min(b, end) - max(a, begin)) for a, b in waits)
    return {
        "seconds": end - begin,
        "tokens": sum(row["tokens/action"] for row in rows[1:]),
        "idle": 1 - busy_s / (SLOTS * (end - begin)),
        "lag_mean": statistics.fmean(row["lag/mean"] for row in rows[1:]),
        "lag_max": max(row["lag/max"] for row in rows[1:]),
    }


def interval(values: list[float], draws: int = 4000) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval over seeds."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    return statistics.fmean(values), means[int(0.025 * draws)], means[int(0.975 * draws)]


def ratios(entries: dict[str, Any], arm: str, sigma: float) -> list[float]:
    """Speed of an arm over synchronous groups, tokens a second, seed by seed."""
    found = []
    for name, sync in entries.items():
        kind, tail, seed = name.split("/")
        other = entries.get(f"{arm}/{tail}/{seed}")
        if kind == "sync_groups" and float(tail) == sigma and other:
            found.append(other["tokens"] / other["seconds"] / (sync["tokens"] / sync["seconds"]))
    return found


def show(entries: dict[str, Any]) -> None:
    """Prints the table and draws the picture."""
    sigmas = sorted({float(name.split("/")[1]) for name in entries})
    print("| tail (sigma) | arm | seeds | speed over synchronous groups | idle | lag, mean | lag, most |")
    print("| ---: | --- | ---: | --- | ---: | ---: | ---: |")
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for sigma in sigmas:
        for arm in ARMS:
            rows = [entry for name, entry in entries.items() if name.startswith(f"{arm}/{sigma:g}/")]
            speeds = ratios(entries, arm, sigma)
            if not rows or not speeds:
                continue
            mean, low, high = interval(speeds)
            curves.setdefault(arm, []).append((sigma, mean, low, high))
            means = [statistics.fmean(row[key] for row in rows) for key in ("idle", "lag_mean")]
            text = f"{mean:.2f} ({low:.2f} to {high:.2f})"
            most = max(row["lag_max"] for row in rows)
            print(f"| {sigma:g} | {arm} | {len(rows)} | {text} | {means[0]:.0%} | {means[1]:.2f} | {most} |")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.5))
    for arm, points in curves.items():
        x, mean, low, high = zip(*points, strict=True)
        axes.plot(x, mean, marker="o", label=arm)
        axes.fill_between(x, low, high, alpha=0.2)
    axes.set_xlabel("tail of a tool call's time (sigma of log-normal)")
    axes.set_ylabel("speed over synchronous groups")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Runs what is not in the result file yet, seed by seed, and shows all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.0, 1.0, 1.5])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="runs/quickstart-model")
    args = parser.parse_args()
    if not Path(args.model, "config.json").exists():
        subprocess.run([sys.executable, "examples/quickstart/make_model.py", args.model], check=True)
    data = json.loads(RESULT.read_text()) if RESULT.exists() else {"machine": machine(), "runs": {}}
    for seed in args.seeds:
        for sigma in args.sigmas:
            for arm in args.arms:
                name = f"{arm}/{sigma:g}/{seed}"
                if name not in data["runs"]:
                    data["runs"][name] = run(arm, sigma, seed, args.steps, args.model)
                    RESULT.write_text(json.dumps(data, indent=1) + "\n")
    show(data["runs"])


if __name__ == "__main__":
    main()
