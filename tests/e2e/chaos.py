"""One run of `sao train` in which processes are killed and stopped and links are cut, again and again, from one seed.

Three generators, the plain learner, the broker. What happens is drawn from the seed; what it meets depends on the
clock. At the end every task was trained exactly once, the books close, no token was older than the bound, and nothing
of the run is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.e2e.kills import RUN
from tests.e2e.proxy import Proxy

from sao._core import Ledger, ledger_history
from sao.telemetry import sinks
from sao.transport.sockets import private_folder

PROGRAM = Path(__file__).with_name("chaos_run.py")
GENERATORS, BATCH, MAX_LAG = 3, 4, 2
STANDSTILL_S = 20.0  # without a step, after which the next event comes all the same
ROLES = {"broker": "sao.broker", "learner": "plain_learner.py", "generator": "sao.generator"}
# what, to whom, how often, for how long in seconds (peers are given up after 4)
EVENTS: list[tuple[str, str, float, tuple[float, float]]] = [
    ("kill", "generator", 0.28, (0, 0)),
    ("kill", "broker", 0.12, (0, 0)),
    ("kill", "learner", 0.10, (0, 0)),
    ("stop", "generator", 0.14, (0.2, 6.0)),
    ("stop", "broker", 0.08, (0.2, 5.0)),
    ("stop", "learner", 0.06, (0.2, 6.0)),
    ("cut", "generator", 0.22, (0.2, 6.0)),
]


@dataclass
class Chaos:
    """One run with everything that is done to it; `every_s`: mean time between two events."""

    folder: Path
    model: Path
    seed: int
    events: int
    steps: int
    every_s: float = 0.7
    step_s: float = 0.3
    happened: Counter[str] = field(default_factory=Counter)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    journal_bytes: int = 0
    exit_code: int | None = None
    seconds: float = 0.0
    _family: set[psutil.Process] = field(default_factory=set)

    @property
    def run_folder(self) -> Path:
        return self.folder / "r"

    def play(self, limit_s: float) -> None:
        """Starts the run, makes the events, lets the run end; returns when it has. Raises `AssertionError` else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"folder": str(self.folder), "model": str(self.model), "seed": self.seed, "steps": self.steps}
        text = RUN.format(**values, every=3, order="window").replace("restart_killed = false", "")
        text = text.replace("count = 1", f"count = {GENERATORS}").replace(
            "peer_timeout_s = 10.0", "peer_timeout_s = 4.0"
        )
        text = text.replace('name = "coin_env:Coin"', 'name = "coin_env:Coin"\nargs = {turns = 4}')
        text += "\n[buffer]\nledger_growth_bytes = 0\n"  # every step stays listed, to be looked at in the end
        (self.folder / "run.toml").write_text(text)
        links = private_folder("chaos-")
        proxies = [Proxy(links / f"g{index}", (links / "endpoint").read_text) for index in range(GENERATORS)]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CHAOS_FOLDER": str(links), "STEP_S": str(self.step_s)}
        began = time.monotonic()
        with (self.folder / "output.txt").open("w") as output:
            command = [sys.executable, str(PROGRAM), "train", str(self.folder / "run.toml")]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | more)
        try:
            self._disturb(process, proxies, began + limit_s)
            (self.folder / "hurry").touch()
            self.exit_code = process.wait(max(1.0, began + limit_s - time.monotonic()))
        finally:
            process.kill()
            process.wait()
            for proxy in proxies:
                proxy.close()
            for path in links.iterdir():
                path.unlink()
            links.rmdir()
            self.seconds = time.monotonic() - began

    def _disturb(self, process: subprocess.Popen[bytes], proxies: list[Proxy], deadline: float) -> None:
        rng, timers = random.Random(self.seed), []
        while self._steps() < 1:
            assert process.poll() is None and time.monotonic() < deadline, (self.folder / "output.txt").read_text()
            time.sleep(0.1)
        done = 0
        while done < self.events:
            time.sleep(min(4 * self.every_s, rng.expovariate(1 / self.every_s)))
            steps, patience = self._steps(), time.monotonic() + STANDSTILL_S
            while self._steps() == steps and process.poll() is None and time.monotonic() < patience:
                time.sleep(0.1)  # the next event meets a run that works, however slow the machine is
            assert process.poll() is None, (self.folder / "output.txt").read_text()[-3000:]
            assert time.monotonic() < deadline, f"{done} of {self.events} events in time"
            if self._steps() >= self.steps - 8:
                return  # the run is about to end: what is killed then is not started again
            ((what, role, _, span),) = rng.choices(EVENTS, [weight for _, _, weight, _ in EVENTS])
            number, seconds = rng.randrange(GENERATORS), rng.uniform(*span)
            if what == "cut":
                proxies[number].hold(seconds)
            else:
                target = self._find(process, role, number)
                if target is None:
                    continue
                target.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                if what == "stop":
                    timers.append(threading.Timer(seconds, _go_on, (target,)))
                    timers[-1].start()
            self.happened[f"{what} {role}"] += 1
            done += 1
        for timer in timers:
            timer.join()

    def _find(self, process: subprocess.Popen[bytes], role: str, number: int) -> psutil.Process | None:
        """A living process of the role; looks at the memory of all on the way."""
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                words, size = child.cmdline(), child.memory_info().rss
            except psutil.Error:
                continue
            self._family.add(child)
            for name, word in ROLES.items():
                if any(word in part for part in words[1:3]):
                    self.rss_bytes[name] = max(size, self.rss_bytes.get(name, 0))
                    if name == role and (role != "generator" or f"g{number}" in words):
                        found.append(child)
        journal = self.run_folder / "journal"
        self.journal_bytes = max(self.journal_bytes, sum(path.stat().st_size for path in _files(journal)))
        return found[0] if found else None

    def _steps(self) -> int:
        """The last step that was shown."""
        metrics = self.run_folder / "metrics.jsonl"
        records = sinks.read(metrics) if metrics.exists() else []
        return max((record["step"] for record in records if record["kind"] == "step"), default=0)

    def check(self) -> dict[str, Any]:
        """What came of it. Raises `AssertionError`, with the seed, for anything lost, doubled, too old or left."""
        said = f"seed {self.seed}, {dict(self.happened)}, {self.folder}"
        assert self.exit_code == 0, (
            f"{said}: exit code {self.exit_code}\n{(self.folder / 'output.txt').read_text()[-3000:]}"
        )
        _, history = ledger_history(self.run_folder / "journal")
        trained = Counter(ordinal for step in history for ordinal, _ in step["tasks"])
        twice = {ordinal: count for ordinal, count in trained.items() if count > 1}
        assert not twice, f"{said}: {twice}"
        assert [step["step"] for step in history] == list(range(1, self.steps + 1)), said
        with Ledger(self.run_folder / "journal") as ledger:
            ledger.check()
            counts, tokens, issued = ledger.counts(), ledger.tokens(), ledger.next_ordinal
            assert ledger.unfinished() == [], said
        lost = issued - counts["trained"] - counts["dropped"]
        assert lost == 0 and len(trained) == counts["trained"] == BATCH * self.steps, f"{said}: {lost} lost"
        steps = [r for r in sinks.read(self.run_folder / "metrics.jsonl") if r["kind"] == "step"]
        lag = max(record["lag/max"] for record in steps)
        assert lag <= MAX_LAG, f"{said}: a token was {lag} versions old"
        _, alive = psutil.wait_procs(self._family, timeout=5.0)
        left = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        assert not left and len(_files(self.run_folder / "journal")) == 1, f"{said}: {left}"
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "events": self.happened.total(),
            "by_event": dict(self.happened.most_common()),
            "steps": self.steps,
            "tasks_trained": counts["trained"],
            "tasks_trained_twice": 0,
            "tasks_lost": lost,
            "tasks_dropped": counts["dropped"],
            "tokens": tokens,
            "lag_max": lag,
            "lag_bound": MAX_LAG,
            "rss_max_mib": {name: round(size / 2**20, 1) for name, size in self.rss_bytes.items()},
            "journal_max_kib": round(self.journal_bytes / 1024, 1),
            "processes_left": 0,
        }


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.exists()]
    except FileNotFoundError:
        return []
