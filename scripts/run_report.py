"""Prints what a run did as Markdown: `run_report.py RUN_FOLDER [--every N]`.

Held-out success with its 95 % interval, the training curve in blocks of N steps, seconds of a learner step by cause,
and the gap between the engine's and the learner's log-probs at lag 0. The pages under docs/results are made with it.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sao.telemetry import sinks
from sao.telemetry.metrics import wilson

COLUMNS = {
    "success": "reward/success",
    "entropy, nats": "policy/entropy",
    "KL to the rollout, nats": "policy/kl",
    "out of band low": "policy/masked_low",
    "out of band high": "policy/masked_high",
    "too old": "policy/stale",
    "lag, mean": "lag/mean",
    "explained variance": "critic/explained_variance",
}


def report(records: Sequence[dict[str, Any]], every: int) -> str:
    """The page's tables; a value that no step of a block has is a dash."""
    steps = [record for record in sinks.surviving(records) if record["kind"] == "step"]
    lines = ["| held-out episodes after step | solved | of | success | 95 % interval |", "|---|---|---|---|---|"]
    for record in records:
        if record["kind"] == "eval" and record["n"]:
            solved = round(record["success"] * record["n"])
            low, high = wilson(solved, record["n"])
            step = record.get("step", "-")
            lines.append(f"| {step} | {solved} | {record['n']} | {record['success']:.3f} | {low:.3f} to {high:.3f} |")
    lines += ["", "| steps | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for first in range(0, len(steps), every):
        block = steps[first : first + every]
        cells = [_mean(block, key) for key in COLUMNS.values()]
        lines.append(f"| {block[0]['step']} to {block[-1]['step']} | " + " | ".join(cells) + " |")
    lines += ["", "| seconds of a step | median | least | most |", "|---|---|---|---|"]
    for key in sorted({key for step in steps for key in step if key.startswith("time/") and key.endswith("_s")}):
        seconds = [step[key] for step in steps if key in step]
        lines.append(f"| {key[5:-2]} | {statistics.median(seconds):.3g} | {min(seconds):.3g} | {max(seconds):.3g} |")
    gaps = [
        (step["step"], step["logprob_gap/mean"], step["logprob_gap/max"])
        for step in steps
        if "logprob_gap/mean" in step
    ]
    lines += ["", "| log-prob gap at lag 0, nats, at step | mean | largest |", "|---|---|---|"]
    lines += [f"| {step} | {mean:.2e} | {most:.2e} |" for step, mean, most in gaps] or ["| none | - | - |"]
    return "\n".join(lines)


def _mean(block: Sequence[dict[str, Any]], key: str) -> str:
    values = [step[key] for step in block if key in step]
    return f"{statistics.fmean(values):.3g}" if values else "-"


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--every", type=int, default=4)
    args = parser.parse_args()
    print(report(sinks.read(args.run_folder / "metrics.jsonl"), args.every))


if __name__ == "__main__":
    main()
