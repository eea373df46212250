"""The quickstart from nothing, once a seed: seconds of start policy and training, held-out success before and after.

    python bench/quickstart.py [--seeds 0 1 2]

Writes bench/results/quickstart.json. Every seed makes its own start policy and its own run with real processes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report

from sao.telemetry import sinks

RUN_FILE = Path("examples/quickstart/run.toml")


def measure(seed: int, folder: Path) -> list[Any]:
    """One seed from an empty folder to the end of the run."""
    model = folder / f"model-{seed}"
    began = time.perf_counter()
    subprocess.run([sys.executable, "examples/quickstart/make_model.py", str(model), "--seed", str(seed)], check=True)
    made = time.perf_counter()
    overrides = [f"model.path={model}", f"run.dir={folder}", f"run.name=seed-{seed}", f"run.seed={seed}"]
    subprocess.run([sys.executable, "-m", "sao.cli", "train", str(RUN_FILE), *overrides], check=True)
    ended = time.perf_counter()
    records = sinks.read(folder / f"seed-{seed}" / "metrics.jsonl")
    rounds = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    return [
        seed,
        round(made - began),
        round(ended - made),
        len(steps),
        rounds[0]["success"],
        rounds[-1]["success"],
        rounds[-1]["n"],
        round(statistics.fmean(step["lag/mean"] for step in steps), 2),
        max(step["lag/max"] for step in steps),
    ]


def main() -> None:
    """Runs the seeds one after another and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(seed, Path(folder)) for seed in seeds]
    report(
        "quickstart",
        [
            "seed",
            "start policy, s",
            "training, s",
            "steps",
            "held-out before",
            "after",
            "episodes",
            "lag, mean",
            "lag, most",
        ],
        rows,
        "seconds of wall time, the machine not to itself if load_1min says so; run.target_success ends a run early",
    )


if __name__ == "__main__":
    main()
