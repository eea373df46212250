"""Faults: whole runs on a disk that fails, class of files by class of files, and nothing lost and nothing silent.

`python bench/faults.py [WORD] [--workers N]`: all combinations of `tests/faults/table.py`, or those with the word in
their name; what is done and what must hold: `tests/faults/harness.py`. Writes results/faults.json, where the
others stay as they were, and docs/results/faults.md when none is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402
from tests.faults import harness  # noqa: E402
from tests.faults.table import TABLE  # noqa: E402

RESULT = RESULTS / "faults.json"
PAGE = ROOT / "docs" / "results" / "faults.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only combinations with it in their name")
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--missing", action="store_true", help="only those that have no result yet")
    given = parser.parse_args()
    told = {row["fault"]: row for row in json.loads(RESULT.read_text())["combinations"]} if RESULT.exists() else {}
    there = set(told) if given.missing else set()
    chosen = [fault for fault in TABLE if given.word in str(fault) and str(fault) not in there]
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model, library = make_folder(folder / "model"), harness.library(folder)

        def attempt(numbered: tuple[int, harness.Fault]) -> harness.Outcome:
            number, fault = numbered
            trial = harness.Trial(folder / str(number), model, library, fault)
            try:
                outcome = trial.play()
            finally:
                trial.remove()
            print(f"{number + 1}/{len(chosen)} {outcome.seconds:.0f} s {harness.show(outcome)}", flush=True)
            told.pop(str(fault), None)
            if not outcome.wrong:
                told[str(fault)] = harness.described(outcome)
                save(told)
            return outcome

        with ThreadPoolExecutor(given.workers) as pool:
            outcomes = list(pool.map(attempt, enumerate(chosen)))
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    went_on = sum(outcome.went_on for outcome in outcomes)
    print(f"{len(outcomes)} combinations: {went_on} went on, {len(outcomes) - went_on} stopped, {wrong} wrong")
    sys.exit(wrong != 0)


def save(told: dict[str, dict[str, Any]]) -> None:
    """Writes what is known by now, in the order of the table, and the page once nothing is missing."""
    rows = [told[str(fault)] for fault in TABLE if str(fault) in told]
    text = json.dumps({"machine": machine(), "combinations": rows}, indent=1) + "\n"
    unfinished = RESULT.with_suffix(f".{threading.get_ident()}")
    unfinished.write_text(text)
    unfinished.replace(RESULT)
    if len(rows) == len(TABLE):
        PAGE.write_text(page(json.loads(text)))


def page(result: dict[str, Any]) -> str:
    """The page with the figures: by class of files, and by kind of fault."""
    rows, host = result["combinations"], result["machine"]
    went_on, minutes = sum(row["exit_code"] == 0 for row in rows), sum(row["seconds"] for row in rows) / 60
    lines = [
        "# Whole runs on a disk that fails",
        "",
        "Written by `bench/faults.py`, raw numbers in [faults.json](../../bench/results/faults.json), with the line",
        "that each run ended with. The faults are made by `tests/faults/faults.c`, which is loaded before libc into",
        "every process of a real `sao train` and fails, shortens or delays calls on the files that are named; what is",
        "tried stands in `tests/faults/table.py`, what must hold in `tests/faults/harness.py`. Some of it runs with",
        "every change.",
        "",
        "Each combination either goes on or stops with one line that names file and fault, without a traceback and in",
        "time; what is given up for good is said. Then the run is started on a healthy disk, with `--resume` where",
        "there is one: it ends, every task of it was trained exactly once, the steps have no gap, the books close, the",
        f"last checkpoint is whole. Writes are tried again for {harness.PATIENCE_S:g} s here",
        "(`run.disk_patience_s`, by default 30 s). A result stays until its combination is tried again.",
        "",
        "| | |",
        "| --- | ---: |",
        f"| combinations of file, call and fault | {len(rows)} |",
        f"| with the real learner and its checkpoints and weights | {sum(row['learner'] == 'torch' for row in rows)} |",
        f"| calls that failed, were cut short or delayed | {sum(row['suffered'] for row in rows):,} |",
        f"| the run went on | {went_on} |",
        f"| it stopped with one line | {len(rows) - went_on} |",
        "| tasks lost, trained twice | 0, 0 |",
        "| silent, hung, with a traceback | 0, 0, 0 |",
        f"| minutes of runs, on {host['cores']} shared cores ({host['cpu']}) | {minutes:.0f} |",
        "",
        "| files | went on | stopped |",
        "| --- | ---: | ---: |",
        *_counted(rows, lambda words: words.partition(": ")[0]),
        "",
        "| call and fault | went on | stopped |",
        "| --- | ---: | ---: |",
        *_counted(rows, lambda words: words.partition(": ")[2].partition(" from ")[0].partition(" (")[0]),
    ]
    return "\n".join(lines) + "\n"


def _counted(rows: list[dict[str, Any]], of: Any) -> list[str]:
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(of(row["fault"]), [0, 0])[row["exit_code"] != 0] += 1
    return [f"| {name} | {went_on} | {stopped} |" for name, (went_on, stopped) in found.items()]


if __name__ == "__main__":
    main()
