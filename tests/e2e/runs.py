"""Whole runs of `sao train` with a tiny model: real processes, sockets, engines and gradients."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
from tests.e2e.kills import PROGRAMS, python_path

from sao.telemetry import sinks

RUN = """
[run]
name = "r"
steps = 4
[env]
name = "lookup"
max_turns = 3
[sampling]
max_response_tokens = 6
context_tokens = 96
[generator]
count = 1
concurrency = 8
[learner]
batch_trajectories = 8
row_tokens = 192
policy_lr = 1e-3
critic_lr = 1e-3
critic_warmup_steps = 1
[staleness]
max_lag = 2
[eval]
every_steps = 2
episodes = 4
[transport]
heartbeat_s = 0.5
peer_timeout_s = 5.0
shutdown_s = 5.0
"""
LIMIT_S = 90.0


def write(folder: Path, model: Path) -> Path:
    """The run file; the run's folder is `folder / "r"`."""
    path = folder / "run.toml"
    path.write_text(RUN.replace("[run]\n", f"[run]\ndir = {str(folder)!r}\n") + f"[model]\npath = {str(model)!r}\n")
    return path


class Run:
    """A running `sao train`. plain: with engine and learner that compute nothing and start without torch."""

    def __init__(self, run_file: Path, *overrides: str, plain: bool = False) -> None:
        self.folder = run_file.parent / "r"
        self.output = run_file.parent / "output.txt"
        environment = os.environ | {"PYTHONPATH": python_path()}
        with self.output.open("w") as output:
            more = ["generator.engine=scripted"] if plain else []
            command = [*PROGRAMS["plain" if plain else "torch"], "train", str(run_file), *more, *overrides]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.family: set[psutil.Process] = set()

    def records(self, kind: str) -> list[dict]:
        """What is in metrics.jsonl now."""
        path = self.folder / "metrics.jsonl"
        return [row for row in (sinks.read(path) if path.exists() else []) if row["kind"] == kind]

    def until(self, kind: str, text: str = "", count: int = 1) -> list[dict]:
        """Waits until so many records of a kind (that hold a text) are there."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = [row for row in self.records(kind) if text in json.dumps(row)]
            if len(found) >= count:
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
                return found
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)
        raise AssertionError(f"no {kind} record with {text!r}\n{self.output.read_text()}")

    def actor(self, name: str) -> psutil.Process:
        """The process of an actor, by its name (`g0`) or module (`sao.broker`)."""
        (found,) = [process for process in self.family if process.is_running() and name in process.cmdline()]
        return found

    def private_folders(self) -> list[Path]:
        """The run's folders outside its own."""
        words = [word for process in self.family if process.is_running() for word in _command(process)]
        places = [word.removeprefix("ipc://") for word in words if word.startswith(("ipc:///tmp/", "/dev/shm/"))]
        return sorted({Path(place).parent if "broker" in place else Path(place) for place in places})

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(LIMIT_S)

    def leftovers(self) -> list[str]:
        """Living processes of this run."""
        _, alive = psutil.wait_procs(self.family, timeout=1.0)
        alive += [p for p in psutil.process_iter() if str(self.folder) in " ".join(_command(p))]
        return [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
