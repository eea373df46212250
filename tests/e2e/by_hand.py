"""A run whose actors are started one by one, as a user would on several hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from sao.telemetry import sinks
from sao.transport import keys

RUN = """
[run]
name = "r"
dir = "at-broker"
steps = {steps}
[model]
path = "no-such-folder-on-the-brokers-host"
[env]
name = "lookup"
max_turns = 3
[sampling]
max_response_tokens = 6
context_tokens = 96
[generator]
concurrency = 2
[learner]
batch_trajectories = 8
row_tokens = 192
policy_lr = 1e-3
critic_lr = 1e-3
critic_warmup_steps = 1
save_every_steps = 2
max_skipped_in_a_row = 1000
[staleness]
max_lag = {max_lag}
[eval]
every_steps = 0
[telemetry]
tensorboard = false
plot = false
[transport]
bind = "tcp://{host}:{port}"
weights_bind = "tcp://*:{weights_port}"
keys = "keys"
heartbeat_s = 0.5
peer_timeout_s = {peer_timeout_s}
shutdown_s = 5.0
"""
LIMIT_S = 120.0


class ByHand:
    """Commands of one run in one folder; `before` is put before a command, per name."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        host: str = "127.0.0.1",
        steps: int = 4,
        peer_timeout_s: float = 10.0,
        max_lag: int = 2,
        before: dict[str, list[str]] | None = None,
    ) -> None:
        self.folder, self.model, self.before = folder, model, before or {}
        port, weights_port = _free(), _free()
        self.endpoint = f"tcp://{host}:{port}"
        values = {"host": host, "port": port, "weights_port": weights_port, "max_lag": max_lag}
        (folder / "run.toml").write_text(RUN.format(steps=steps, peer_timeout_s=peer_timeout_s, **values))
        keys.write(folder / "keys")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.family: set[psutil.Process] = set()

    def start(self, name: str, *arguments: str, before: Sequence[str] | None = None) -> None:
        """`sao ARGUMENTS` in the folder; its output goes to `NAME.log` there."""
        prefix = before if before is not None else self.before.get(name, [])
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "sao.cli", *arguments],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"},
            )

    def broker(self, *more: str) -> None:
        """`sao broker run.toml`."""
        self.start("broker", "broker", "run.toml", *more)

    def learner(self, *more: str, folder: str = "at-learner") -> None:
        """`sao learner`, with its own copy of the model's path and its own run folder."""
        self.start("learner", "learner", *self._join(folder), *more)

    def generator(self, name: str = "g0", *more: str) -> None:
        """`sao generator`."""
        self.start(name, "generator", "--name", name, *self._join(f"at-{name}"), *more)

    def log(self, name: str) -> str:
        """What a command wrote."""
        return (self.folder / f"{name}.log").read_text()

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Of the run, as the broker's host has it."""
        path = self.folder / "at-broker" / "r" / "metrics.jsonl"
        return [row for row in (sinks.read(path) if path.exists() else []) if row["kind"] == kind]

    def until_step(self, step: int) -> None:
        """Waits for a step of the learner."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.records("step")) < step:
            assert time.monotonic() < deadline, self.everything()
            assert all(process.poll() is None for process in self.processes.values()), self.everything()
            self.watch()
            time.sleep(0.05)

    def watch(self) -> None:
        """Notes all processes of the run, so that leftovers can be found."""
        for process in self.processes.values():
            if process.poll() is None:
                try:
                    self.family |= set(psutil.Process(process.pid).children(recursive=True))
                except psutil.NoSuchProcess:
                    continue

    def wait(self) -> dict[str, int]:
        """Exit codes of all commands, when all have ended."""
        deadline = time.monotonic() + LIMIT_S
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"has not ended\n{self.everything()}") from None
        return {name: process.returncode for name, process in self.processes.items()}

    def leftovers(self) -> list[str]:
        """Processes of the run that still live."""
        _, alive = psutil.wait_procs(self.family, timeout=2.0)
        return [str(process) for process in alive]

    def everything(self) -> str:
        """All output, for a failed assertion."""
        return "\n".join(f"== {name}\n{self.log(name)[-3000:]}" for name in self.processes)

    def stop(self) -> None:
        """Kills what is left."""
        self.watch()
        for process in [*self.processes.values(), *self.family]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue

    def _join(self, folder: str) -> list[str]:
        return ["--connect", self.endpoint, "--keys", "keys", "--model", str(self.model), "--folder", folder]


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def closes(step: dict[str, Any]) -> bool:
    """Whether the tokens of a step record are all accounted for."""
    dropped = sum(value for name, value in step.items() if name.startswith("broker/tokens_dropped/"))
    parts = sum(step[f"broker/tokens_{name}"] for name in ("trained", "masked", "held"))
    return bool(step["broker/tokens_sampled"] == parts + dropped)


def pulled(log: str) -> list[tuple[int, int, float]]:
    """(version, bytes, seconds) of every transfer that a generator's log tells of."""
    found = []
    for line in log.splitlines():
        if "weights of version" in line and " bytes in " in line:
            words = line.partition("weights of version ")[2].split()
            found.append((int(words[0]), int(words[3]), float(words[6])))
    return found


def show(value: object) -> str:
    """For a failed assertion."""
    return json.dumps(value, indent=1, default=str)
