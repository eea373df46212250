"""What compaction's parts are worth: whole runs of examples/compaction, one arm a switch, some seeds each.

Every run is `sao train` with real processes, all from one start policy; seeds differ in tasks, sampling and order. The
success of a run is that of its last held-out evaluation. Results are kept after every run in results/compaction.json;
arms and seeds that are there already are not run again.
`python bench/compaction.py [--arms ARM ...] [--seeds N ...] [--plot FILE.png] [--lock FILE]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/compaction"
RESULT = RESULTS / "compaction.json"
MODEL = "runs/compaction-model"
LIMIT_S = 900.0
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("summaries trained, token mean, paper's credit", ()),
    "untrained": ("summary tokens untrained", ("compaction.train_summaries=false",)),
    "fixed": ("start policy writes the summaries", (f"compaction.summariser={MODEL}",)),
    "segment": ("mean of segment means", ("algorithm.denominator=segment",)),
    "none": ("no cross-segment factor", ("algorithm.cross_segment=none",)),
    "chained": ("credit chained across cuts", ("algorithm.cross_segment=chained",)),
}


def train(arm: str, seed: int, runs: Path, lock: str | None) -> dict[str, Any]:
    """One run: its evaluations, its rewards and its time."""
    name = f"{arm}-{seed}"
    command = [sys.executable, "-m", "sao.cli", "train", f"{EXAMPLE}/run.toml", "--overwrite"]
    command += [
        f"run.name={name}",
        f"run.dir={runs}",
        f"run.seed={seed}",
        "run.target_success=1.0",
        *ARMS[arm][1],
    ]
    command += ["telemetry.tensorboard=false", "telemetry.plot=false"]
    if lock is not None:
        command = ["flock", lock, *command]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (ROOT / runs / name / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval"]
    return {
        "arm": arm,
        "seed": seed,
        "seconds": round(records[-1]["time_s"] - records[0]["time_s"], 1),
        "evals": [[record["step"], record["success"], record["n"]] for record in evals],
        "success": evals[-1]["success"],
        "rewards": [round(record["reward/mean"], 4) for record in steps],
        "summary_tokens": round(statistics.fmean(record["rollout/summary_tokens"] for record in steps[-10:]), 3)
        if "rollout/summary_tokens" in steps[-1]
        else None,
        "compactions": round(statistics.fmean(record["rollout/compactions"] for record in steps[-10:]), 3),
        "masked_share": round(sum(r["tokens/masked"] for r in steps) / sum(r["tokens/action"] for r in steps), 4),
        "load_1min": machine()["load_1min"],
    }


def table(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """One row an arm: seeds, mean, smallest and largest success, mean seconds."""
    rows = []
    for arm, (text, _) in ARMS.items():
        mine = [run for run in runs if run["arm"] == arm]
        if mine:
            found = [run["success"] for run in mine]
            row = [arm, text, len(mine), statistics.fmean(found), min(found), max(found)]
            rows.append([*row, statistics.fmean(run["seconds"] for run in mine)])
    return rows


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Held-out success by step: a line an arm, through the means, and a band from the smallest to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for index, (arm, (text, _)) in enumerate(ARMS.items()):
        mine = [run for run in runs if run["arm"] == arm]
        if not mine:
            continue
        by_step: dict[int, list[float]] = {}
        for run in mine:
            for step, success, _ in run["evals"]:
                by_step.setdefault(step, []).append(success)
        steps = sorted(step for step, found in by_step.items() if len(found) == len(mine))
        means = [statistics.fmean(by_step[step]) for step in steps]
        axes.plot(steps, means, marker="o", markersize=3, color=f"C{index}", label=f"{text} ({len(mine)})")
        low, high = ([pick(by_step[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set(xlabel="optimizer step", ylabel="held-out success", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="arm (seeds)", title_fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.6))
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> None:
    """Runs what is missing, then prints and plots everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/compaction"), help="where run folders go")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "img" / "compaction.png")
    parser.add_argument("--lock", help="a file to lock during each run, where the machine is shared")
    args = parser.parse_args()
    if not (ROOT / MODEL / "config.json").is_file():
        subprocess.run([sys.executable, f"{EXAMPLE}/make_model.py", MODEL], cwd=ROOT, check=True)
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {"machine": machine(), "runs": []}
    runs: list[dict[str, Any]] = result["runs"]
    for seed in args.seeds:
        for arm in args.arms:
            if any(run["arm"] == arm and run["seed"] == seed for run in runs):
                continue
            begin = time.monotonic()
            runs.append(train(arm, seed, args.runs, args.lock))
            print(f"{arm} {seed}: {runs[-1]['success']:.3f} ({time.monotonic() - begin:.0f} s)", flush=True)
            RESULTS.mkdir(exist_ok=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for arm, text, seeds, mean, low, high, seconds in table(runs):
        print(f"{arm:10} {text:46} {seeds} seeds  {mean:.3f} ({low:.3f} to {high:.3f})  {seconds:.0f} s")
    plot(runs, args.plot)


if __name__ == "__main__":
    main()
