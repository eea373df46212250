"""What an outage costs: a killed generator's rollouts elsewhere, and a broker or learner that stands still.

`python bench/outages.py`; writes results/outages.json. Runs of `sao train` with scripted engines and a learner without
a model (`tests/e2e/plain_learner.py`), so that the times are those of the system and not of a model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402
from tests.e2e.kills import PROGRAMS, RUN  # noqa: E402

from sao._core import ledger_history  # noqa: E402
from sao.telemetry import sinks  # noqa: E402

WORDS = {"broker": "sao.broker", "learner": "plain_learner.py", "g0": "g0", "g1": "g1"}
LIMIT_S = 240.0


class Run:
    """One run of `sao train`."""

    def __init__(self, folder: Path, model: Path, steps: int, env: str, step_s: float = 0.02, **changes: str) -> None:
        folder.mkdir()
        self.folder = folder
        text = RUN.format(folder=str(folder), model=str(model), seed=1, steps=steps, every=5, order="completion")
        text = text.replace("restart_killed = false", "").replace("count = 1", "count = 2")
        text = text.replace('name = "coin_env:Coin"', env)
        for old, new in {"peer_timeout_s = 10.0": "peer_timeout_s = 4.0", **changes}.items():
            assert old in text, old
            text = text.replace(old, new)
        (folder / "run.toml").write_text(text)
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": _paths(), "STEP_S": str(step_s)}
        with (folder / "output.txt").open("w") as output:
            command = [*PROGRAMS["plain"], "train", str(folder / "run.toml")]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | more)

    def steps(self) -> int:
        path = self.folder / "r" / "metrics.jsonl"
        return max((r["step"] for r in (sinks.read(path) if path.exists() else []) if r["kind"] == "step"), default=0)

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, (self.folder / "output.txt").read_text()[-2000:]
            assert time.monotonic() < deadline, (self.folder / "output.txt").read_text()[-2000:]
            time.sleep(0.02)

    def actor(self, name: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            if any(WORDS[name] in word for word in (words if name in ("g0", "g1") else words[1:3])):
                return child
        raise AssertionError(f"no {name}")

    def end(self) -> None:
        """Waits for the regular end and checks that every step was made, with tasks that were in no other."""
        code = self.process.wait(LIMIT_S)
        assert code == 0, (self.folder / "output.txt").read_text()[-2000:]
        _, history = ledger_history(self.folder / "r" / "journal")
        ordinals = [ordinal for step in history for ordinal, _ in step["tasks"]]
        assert len(ordinals) == len(set(ordinals)) == 4 * len(history)


def failover(folder: Path, model: Path, *, replayable: bool) -> dict[str, Any]:
    """Kills one of two generators in the middle of its rollouts; when are they running elsewhere, and from where?"""
    log = folder.with_suffix(".jsonl")
    word = "true" if replayable else "false"
    env = f'name = "slow_env:Slow"\nargs = {{log = "{log}", turns = 6, step_s = 1.0, replayable = {word}}}'
    run = Run(folder, model, 10, env, **{"concurrency = 8": "concurrency = 12"})
    try:
        run.until(lambda: run.steps() >= 2)
        victim = run.actor("g0")
        run.until(lambda: len(_open(log, victim.pid)) >= 3 and min(_open(log, victim.pid).values()) >= 2)
        killed_at = time.time()
        victim.kill()
        held = _open(log, victim.pid)
        run.until(lambda: set(held) <= {line["seed"] for line in _lines(log) if _again(line, victim.pid, killed_at)})
        run.end()
    finally:
        run.process.kill()
        run.process.wait()
    times, engine = defaultdict(list), defaultdict(int)
    for line in _lines(log):
        if _again(line, victim.pid, killed_at) and line["seed"] in held:
            times[line["seed"]].append(line["at"] - killed_at)
            engine[line["seed"]] += line["what"] == "step"
    first = sorted(min(values) for values in times.values())
    return {
        "environment_replayable": replayable,
        "rollouts": len(held),
        "running_elsewhere_s": {"median": round(first[len(first) // 2], 3), "max": round(first[-1], 3)},
        "turns_that_were_over": sum(held.values()),
    }


def standstill(folder: Path, model: Path, who: str, seconds: float) -> dict[str, Any]:
    """Stops broker or learner; the generators' memory meanwhile, and whether all goes on."""
    run = Run(
        folder, model, 400, 'name = "coin_env:Coin"\nargs = {turns = 4}', **{"heartbeat_s = 0.5": "heartbeat_s = 0.2"}
    )
    try:
        run.until(lambda: run.steps() >= 20)
        generators, target = [run.actor("g0"), run.actor("g1")], run.actor(who)
        before = [process.memory_info().rss for process in generators]
        broker_before = run.actor("broker").memory_info().rss
        target.send_signal(signal.SIGSTOP)
        peak, stopped = list(before), time.monotonic()
        while time.monotonic() - stopped < seconds:
            peak = [max(size, process.memory_info().rss) for size, process in zip(peak, generators, strict=True)]
            time.sleep(0.1)
        at = run.steps()
        target.send_signal(signal.SIGCONT)
        went_on = time.monotonic()
        run.until(lambda: run.steps() > at)
        again_s = time.monotonic() - went_on
        same = [process.is_running() for process in [*generators, target]]
        peak = [max(size, process.memory_info().rss) for size, process in zip(peak, generators, strict=True)]
        broker_after = run.actor("broker").memory_info().rss
        run.end()
    finally:
        run.process.kill()
        run.process.wait()
    assert all(same), "a process did not outlive the standstill"
    return {
        "stopped": who,
        "seconds": seconds,
        "generator_rss_before_mib": round(max(before) / 2**20, 2),
        "generator_rss_grown_kib": round(max(b - a for a, b in zip(before, peak, strict=True)) / 1024),
        "broker_rss_grown_kib": round((broker_after - broker_before) / 1024),
        "next_step_after_s": round(again_s, 2),
        "processes_restarted": 0,
    }


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


def _open(log: Path, pid: int) -> dict[int, int]:
    """Seed -> turns that are over, of the episodes that this process plays now."""
    found: dict[int, int] = {}
    for line in _lines(log):
        if line["pid"] == pid:
            if line["what"] == "done":
                found.pop(line["seed"], None)
            else:
                found[line["seed"]] = line["turn"] - (line["what"] == "step")
    return found


def _again(line: dict[str, Any], pid: int, since: float) -> bool:
    return line["pid"] != pid and line["at"] > since


def _paths() -> str:
    return os.pathsep.join([str(ROOT / "tests" / "e2e"), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    with tempfile.TemporaryDirectory(prefix="outages-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = make_folder(folder / "model")
        result = {
            "machine": machine(),
            "failover": [failover(folder / f"f{int(kind)}", model, replayable=kind) for kind in (True, False)],
            "standstill": [standstill(folder / who, model, who, 10.0) for who in ("broker", "learner")],
        }
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "outages.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
