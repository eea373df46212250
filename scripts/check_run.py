"""Checks what a finished run left in its folder: `check_run.py RUN_FOLDER [--success-from A] [--success-to B]`.

Exit code 0 if the run ended by itself, its metrics are whole, the ledger of tokens closed at every step, some tokens
were trained on at a lag above zero (it was asynchronous), and the success rate rose from at most A to at least B.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sao.telemetry import sinks
from sao.telemetry.metrics import watched

EDGE = 5  # steps averaged at either end


def faults(records: Sequence[dict[str, Any]], folder: Path, success_from: float, success_to: float) -> list[str]:
    """What is wrong with the run, in words."""
    found = []
    steps = [watched(record) for record in records if record["kind"] == "step"]
    ends = [record for record in records if record["kind"] == "end"]
    if len(ends) != 1 or ends[0]["exit_code"] != 0:
        found.append(f"metrics.jsonl: expected one end record with exit code 0, got {ends}")
    if len(steps) < 2 * EDGE:
        return [*found, f"metrics.jsonl: {len(steps)} step records, expected at least {2 * EDGE}"]
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        found.append(f"metrics.jsonl: steps are not 1, 2, ...: {[step['step'] for step in steps][:10]} ...")
    if not max(step["lag_max"] for step in steps) > 0:
        found.append("lag/max: never above 0, the run was not asynchronous")
    if not any(record["kind"] == "eval" and record["n"] for record in records):
        found.append("metrics.jsonl: no held-out evaluation")
    first = sum(step["success"] for step in steps[:EDGE]) / EDGE
    last = sum(step["success"] for step in steps[-EDGE:]) / EDGE
    print(f"success of the training batches: {first:.3f} in the first {EDGE} steps, {last:.3f} in the last {EDGE}")
    if not (first <= success_from and last >= success_to and last > first):
        found.append(f"reward/success: expected a rise from at most {success_from} to at least {success_to}")
    found += [f"{name}: missing" for name in ("config.json", "curves.png", "journal") if not (folder / name).exists()]
    return found


def main() -> None:
    """Prints the faults; the exit code says whether there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--success-from", type=float, default=1.0)
    parser.add_argument("--success-to", type=float, default=0.0)
    args = parser.parse_args()
    records = sinks.read(args.run_folder / "metrics.jsonl")
    found = faults(records, args.run_folder, args.success_from, args.success_to)
    for fault in found:
        print(fault, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
