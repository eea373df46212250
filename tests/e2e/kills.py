"""Runs that are killed again and again and resumed each time, and what must be true at their end.

A kill is SIGKILL to one process: at a named point (`sao.storage.failpoints.POINTS`), or to a random process at a random
time. All is drawn from a seed. Whatever was killed, at the end every task of the undisturbed run was trained exactly
once, the ledger and the learner say so step by step, and the books close.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sao._core import Ledger, ledger_history
from sao.storage.checkpoints import Ordinals, newest, steps
from sao.storage.failpoints import KILL, POINTS
from sao.telemetry import sinks

LIFE_LIMIT_S = 240.0  # of one start, on a machine that does other things too
PROGRAMS = {
    "plain": (sys.executable, str(Path(__file__).with_name("plain_run.py"))),
    "torch": (sys.executable, "-m", "sao.cli"),
}
PLAIN_LEARNER = str(Path(__file__).with_name("plain_learner.py"))
ROLES = {"broker": "sao.broker", "generator": "sao.generator", "learner": "learner", "supervisor": ""}
RUN = """
[run]
name = "r"
dir = {folder!r}
seed = {seed}
steps = {steps}
restart_killed = false
[model]
path = {model!r}
[env]
name = "coin_env:Coin"
[sampling]
max_response_tokens = 6
context_tokens = 192
[generator]
count = 1
concurrency = 8
engine = "scripted"
[learner]
batch_trajectories = 4
row_tokens = 192
policy_lr = 1e-4
critic_lr = 1e-3
critic_warmup_steps = 1
save_every_steps = {every}
[staleness]
max_lag = 2
order = {order!r}
[eval]
every_steps = 0
[transport]
heartbeat_s = 0.5
peer_timeout_s = 10.0
shutdown_s = 3.0
[telemetry]
tensorboard = false
plot = false
"""


@dataclass(frozen=True)
class Wish:
    """What the next start shall suffer: a named point, or a role and a time after the start, seconds."""

    point: str = ""
    role: str = ""
    after_s: float = 0.0

    def __str__(self) -> str:
        return self.point or f"{self.role} after {self.after_s:.2f} s"


@dataclass
class Story:
    """One run with everything that happened to it."""

    folder: Path
    model: Path
    learner: str
    seed: int
    steps: int = 24
    every: int = 2
    order: str = "window"
    lives: list[dict[str, object]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def run_folder(self) -> Path:
        return self.folder / "r"

    def wishes(self, count: int, slowest_s: float) -> list[Wish]:
        """`count` kills drawn from the seed: three of four at named points, the others at random times."""
        rng, found = random.Random(self.seed), []
        for number in range(count):
            if rng.random() < 0.75:
                name = rng.choice([p for p in POINTS if number or p not in ("learner.restored", "ledger.rewound")])
                often = 1 if name in ("learner.restored", "ledger.rewound", "supervisor.started") else 3
                found.append(Wish(point=f"{name}:{rng.randint(1, often)}"))
            else:
                found.append(Wish(role=rng.choice(list(ROLES)), after_s=rng.uniform(0.1, slowest_s)))
        return found

    def start(self, wish: Wish | None) -> int:
        """One start of the run, to its end or death; returns the exit code. Counts what was really killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run_file = self.folder / "run.toml"
        if not run_file.exists():
            values = {"folder": str(self.folder), "model": str(self.model), "seed": self.seed, "steps": self.steps}
            run_file.write_text(RUN.format(**values, every=self.every, order=self.order))
        resume = ["--resume"] if (self.run_folder / "config.json").exists() else []
        known = len(self._texts())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()} | (
            {KILL: wish.point} if wish and wish.point else {}
        )
        began = time.monotonic()
        with (self.folder / "output.txt").open("a") as output:
            command = [*PROGRAMS[self.learner], "train", str(run_file), *resume]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            if wish and wish.role:
                self._kill_later(process, wish)
            code = process.wait(LIFE_LIMIT_S)
        finally:
            process.kill()
            process.wait()
        dead = Counter(name for text in self._texts()[known:] for name in re.findall(_DEATH, text))
        dead = Counter({_role(name): count for name, count in dead.items()})
        dead["supervisor"] += code == -signal.SIGKILL
        self.kills += dead
        seconds = round(time.monotonic() - began, 2)
        self.lives.append({"wish": str(wish or "none"), "killed": dict(+dead), "exit_code": code, "seconds": seconds})
        return code

    def _kill_later(self, process: subprocess.Popen[bytes], wish: Wish) -> None:
        try:
            process.wait(wish.after_s)
            return
        except subprocess.TimeoutExpired:
            pass
        if wish.role == "supervisor":
            process.kill()
            return
        deadline = time.monotonic() + 60.0
        while process.poll() is None and time.monotonic() < deadline:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if any(ROLES[wish.role] in word for word in child.cmdline()[1:3]):
                        child.kill()
                        return
                except psutil.Error:
                    continue
            time.sleep(0.02)

    def _texts(self) -> list[str]:
        """What was said of ended processes, in order."""
        metrics = self.run_folder / "metrics.jsonl"
        records = sinks.read(metrics) if metrics.exists() else []
        return [str(r.get("text") or r.get("reason") or "") for r in records if r["kind"] in ("event", "end")]

    def play(self, kills: int, slowest_s: float = 4.0) -> None:
        """Kills and resumes until so many processes were killed or the run is complete, then lets it end."""
        for wish in self.wishes(10 * kills, slowest_s):
            if self.kills.total() >= kills or self.complete:
                break
            if wish.point.startswith("learner.restored") and not steps(self.run_folder / "checkpoints"):
                continue  # nothing was saved yet, so nothing will be restored
            self.start(wish)
        for _ in range(3):
            if self.complete:
                return
            code = self.start(None)
            assert code == 0, f"seed {self.seed}: exit code {code}\n{(self.folder / 'output.txt').read_text()[-3000:]}"
        raise AssertionError(f"seed {self.seed}: the run is not complete")

    @property
    def complete(self) -> bool:
        """Whether the checkpoint of the last step is there."""
        return (self.run_folder / "checkpoints" / f"step-{self.steps}" / "manifest.json").exists()

    def check(self) -> None:
        """Raises `AssertionError` unless every task of the undisturbed run was trained exactly once."""
        said = f"seed {self.seed}, {self.learner} learner, {self.order}"
        _, history = ledger_history(self.run_folder / "journal")
        expected = Counter(range(4 * self.steps))  # what an undisturbed run trains: no rollout of these fails
        trained = Counter(ordinal for step in history for ordinal, _ in step["tasks"])
        assert trained == expected, f"{said}: lost {expected - trained}, twice {trained - expected}"
        assert [step["step"] for step in history] == list(range(1, self.steps + 1)), said
        if self.order == "window":
            batches = [sorted(ordinal for ordinal, _ in step["tasks"]) for step in history]
            assert batches == [list(range(4 * n, 4 * n + 4)) for n in range(self.steps)], said
        last, ignored = newest(self.run_folder / "checkpoints")
        assert last is not None and last.step == self.steps and not ignored, f"{said}: {ignored}"
        assert Ordinals(last.manifest["ledger"]["trained"]).runs == [[0, 4 * self.steps]], said
        if self.learner == "plain":  # its weights: everything it ever saw in this line of history
            seen = json.loads((last.state / "seen.json").read_text())
            assert seen == [[list(task) for task in step["tasks"]] for step in history], said
        with Ledger(self.run_folder / "journal") as ledger:
            ledger.check()
            counts = ledger.counts()
            assert (counts["trained"], counts["dropped"], ledger.unfinished()) == (4 * self.steps, 0, []), said
        metrics = self.run_folder / "metrics.jsonl"  # not there where a disk refused to make it
        rows = sinks.surviving(sinks.read(metrics)) if metrics.exists() else []
        steps = [row["step"] for row in rows if row["kind"] == "step"]
        assert len(steps) == len(set(steps)), f"{said}: {steps}"


def python_path() -> str:
    """For the environment, which lies beside this file."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


_DEATH = r"^([\w-]+) ended unexpectedly.*killed by SIGKILL"


def _role(name: str) -> str:
    return "generator" if re.fullmatch(r"g\d+", name) else "learner" if name.startswith("learner") else name
