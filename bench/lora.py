"""The quickstart by full training and by LoRA, three seeds each: steps and seconds until 0.95 of the held-out tasks.

    python bench/lora.py [--seeds 0 1 2] [--models FOLDER] [--rates full 1e-3]

Writes bench/results/lora.json. Real processes: a broker, a learner, two generators. `--models` keeps start policies.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report

from sao.telemetry import sinks

RUN_FILE = Path("examples/quickstart/run.toml")
COLUMNS = ["training", "rate", "seed", "steps", "seconds", "held-out before", "after", "episodes", "ended", "step, s"]


def measure(variant: list[str], seed: int, model: Path, folder: Path) -> list[Any]:
    """One run from its start policy to its end."""
    if not model.is_dir():
        subprocess.run([sys.executable, "examples/quickstart/make_model.py", model, "--seed", str(seed)], check=True)
    name, rate = f"seed-{seed}-{len(list(folder.iterdir()))}", "3e-4"
    overrides = [f"model.path={model}", f"run.dir={folder}", f"run.name={name}", f"run.seed={seed}"]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "sao.cli", "train", str(RUN_FILE), *overrides, *variant], check=True)
    seconds = round(time.perf_counter() - began)
    records = sinks.read(folder / name / "metrics.jsonl")
    rounds = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    computed = sum(
        step.get(f"time/{part}_s", 0.0) for step in steps for part in ("critic", "policy", "optimizer", "publish")
    )
    first, last = rounds[0]["success"], rounds[-1]["success"]
    if variant:
        rate = variant[-1].partition("=")[2]
    reached = "reached 0.95" if last >= 0.95 else "did not reach 0.95"
    kind = "LoRA" if variant else "full"
    shown = [kind, rate, seed, len(steps), seconds, first, last, rounds[-1]["n"], reached]
    return [*shown, round(computed / len(steps), 3)]


def main() -> None:
    """Runs all of them one after another and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", default=["full", "1e-3"], help="of LoRA, or `full`")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    lora = f"lora.rank={options.rank}"
    variants = [[] if rate == "full" else [lora, f"lora.policy_lr={rate}"] for rate in options.rates]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "runs").mkdir()
        models = options.models or folder
        rows = [
            measure(variant, seed, models / f"m{seed}", folder / "runs")
            for seed in options.seeds
            for variant in variants
        ]
    report("lora", COLUMNS, rows, f"LoRA of rank {options.rank}, alpha 32, merged updates; seconds of wall time")


if __name__ == "__main__":
    main()
