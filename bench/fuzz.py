"""An hour of fuzzing for each decoder that reads bytes from outside: `python bench/fuzz.py [TARGET]... [--seconds N]`.

Targets: `wire` (trajectories) and `ledger` (its file) by libFuzzer (`scripts/fuzz.sh`), `frames` (messages between
actors) by `scripts/fuzz_frames.py`. They run side by side at a low priority. results/fuzz.json keeps one row a
target: executions, seconds, seconds of CPU, crashes, corpus size, peak memory. Exit code 1 if anything crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

ROOT = Path(__file__).parents[1]
RESULT = RESULTS / "fuzz.json"
COMMANDS = {
    "wire": ("bash", "scripts/fuzz.sh", "wire"),
    "ledger": ("bash", "scripts/fuzz.sh", "ledger"),
    "frames": (sys.executable, "scripts/fuzz_frames.py"),
}


SUMS = ("executions", "seconds", "cpu_seconds", "crashes")


def fuzz(target: str, seconds: int, niceness: int, logs: Path) -> dict[str, Any]:
    """Runs one target and reads its closing statistics; what it printed stays in `logs`."""
    log = logs / f"{target}.log"
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMANDS[target], str(seconds)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(niceness),
        )
        _, status, usage = os.wait4(process.pid, 0)
    text = log.read_text(errors="replace")
    stats = {name: int(value) for name, value in re.findall(r"^stat::(\w+):\s+(\d+)", text, re.MULTILINE)}
    corpus = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "fuzz" / "corpus"
    crashes = len(list(corpus.glob(f"crash-{target}-*")))
    return {
        "executions": stats.get("number_of_executed_units", 0),
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "crashes": crashes,
        "corpus": stats.get("corpus_units", len(list((corpus / target).glob("*")))),
        "peak_memory_mib": stats.get("peak_rss_mb", 0),
        "slowest_input_s": stats.get("slowest_unit_time_ms", 1000 * stats.get("slowest_unit_time_sec", 0)) / 1000,
        "exit_code": os.waitstatus_to_exitcode(status),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--nice", type=int, default=19, help="on top of this process's own")
    parser.add_argument("--add", action="store_true", help="add to what the result file has, the corpus goes on, too")
    arguments = parser.parse_args()
    targets = arguments.targets or list(COMMANDS)
    if unknown := set(targets) - set(COMMANDS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}")
    logs = ROOT / "target" / "fuzz" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}

    def run(target: str) -> None:
        found[target] = fuzz(target, arguments.seconds, arguments.nice, logs)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = json.loads(RESULT.read_text())["targets"] if RESULT.exists() else {}
    for target, row in found.items() if arguments.add else ():
        row |= {name: round(row[name] + kept.get(target, {}).get(name, 0), 1) for name in SUMS}
    result = {"machine": machine(), "targets": dict(sorted({**kept, **found}.items()))}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(any(row["crashes"] or row["exit_code"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
