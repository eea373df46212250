"""Whole runs on a faulty disk: what each combination of file, call and fault must come to.

A combination is a real `sao train` with `faults.c` loaded into all its processes. It either goes on or stops with one
line that names file and fault, never hangs, never shows a traceback; then `--resume` on a healthy disk ends it, and
every task was trained exactly once. What is lost for good (a record, a picture, a checkpoint) is said somewhere.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e import kills

from sao._core import Ledger
from sao.storage import checkpoints
from sao.telemetry import sinks

SOURCE = Path(__file__).with_name("faults.c")
LIMIT_S = 120.0  # of one start
STEPS = 6
PATIENCE_S = 3.0  # `run.disk_patience_s` of these runs
SLOW_MS = 400
SHORT = "short"
SLOW = "slow"
TELEMETRY = "[value_pretraining]\nsteps = 6\n[telemetry]\ntensorboard = true\nplot = true\nkeep_trajectories = 2\n"


@dataclass(frozen=True)
class Fault:
    """One combination. times: 0 is for ever. learner: of `kills.PROGRAMS`; the plain one starts without torch."""

    files: str  # what the program calls them
    path: str  # part of their paths
    call: str
    kind: str  # name of an errno, `slow` or `short`
    times: int = 1
    nth: int = 1
    learner: str = "plain"
    engine: str = "scripted"
    command: str = "train"  # or `pretrain-value`
    phase: str = "start"  # or `resume`: what a killed start has left is gone on with on the faulty disk

    def __str__(self) -> str:
        often = {0: "for ever", 1: "once"}.get(self.times, f"{self.times} times")
        later = f" from call {self.nth}" if self.nth > 1 else ""
        return f"{self.files}: {self.call} {self.kind} {often}{later}" + (
            " (--resume)" if self.phase == "resume" else ""
        )

    @property
    def text(self) -> str:
        """What the system calls the fault; empty for one that is none."""
        return os.strerror(getattr(errno, self.kind)) if self.kind.isupper() else ""

    def variables(self, library: Path, count: Path) -> dict[str, str]:
        """The environment in which it happens."""
        number = getattr(errno, self.kind) if self.kind.isupper() else 0
        found = {"FAULT_CALLS": self.call, "FAULT_PATH": self.path, "FAULT_NTH": self.nth, "FAULT_TIMES": self.times}
        found |= {"FAULT_ERRNO": number, "FAULT_COUNT": count, "LD_PRELOAD": library}
        found |= {"FAULT_SLOW_MS": SLOW_MS} if self.kind == SLOW else {}
        found |= {"FAULT_SHORT": 7} if self.kind == SHORT else {}
        return {name: str(value) for name, value in found.items()}


@dataclass
class Outcome:
    """What a combination came to. wrong: everything that must not be."""

    fault: Fault
    exit_code: int = -1
    reached: int = 0  # calls that matched
    suffered: int = 0  # calls that failed, were cut or delayed
    word: str = ""  # the line that says what happened
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def went_on(self) -> bool:
        return self.exit_code == 0


def library(folder: Path) -> Path:
    """Compiles `faults.c`."""
    target = folder / "faults.so"
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return target


class Trial:
    """A run in a folder of its own, on which a fault is tried."""

    def __init__(self, folder: Path, model: Path, library: Path, fault: Fault) -> None:
        self.folder, self.fault, self.library = folder, fault, library
        self.run_folder = folder / ("r" if fault.command == "train" else "r-critic")
        self.count = folder / "count"
        folder.mkdir(parents=True)
        self.count.write_bytes(bytes(16))
        values = {"folder": str(folder), "model": str(model), "seed": 7, "steps": STEPS, "every": 2, "order": "window"}
        text = kills.RUN.format(**values).replace("restart_killed", f"disk_patience_s = {PATIENCE_S}\nrestart_killed")
        self.run_file = folder / "run.toml"
        self.run_file.write_text(text.partition("[telemetry]")[0] + TELEMETRY)

    def start(self, *more: str, **variables: str) -> tuple[int, str]:
        """One start of the run; its exit code, None where it hung, and its output."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": kills.python_path(), **variables}
        command = [*kills.PROGRAMS[self.fault.learner], self.fault.command, str(self.run_file)]
        command += [f"generator.engine={self.fault.engine}", *more]
        output = self.folder / "output.txt"
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = HUNG
            finally:
                process.kill()
                process.wait()
        return code, output.read_text()

    def play(self) -> Outcome:
        """The faulty start, and the healthy one after it."""
        began, outcome = time.monotonic(), Outcome(self.fault)
        resume = self.fault.phase == "resume"
        if resume:
            self.start(SAO_KILL_AT="learner.commit:4")
            with max((self.run_folder / "journal").glob("*.journal")).open("ab") as file:
                file.write(b"what a crash of the machine has left")
        more = ["--resume"] if resume else []
        outcome.exit_code, output = self.start(*more, **self.fault.variables(self.library, self.count))
        outcome.reached, outcome.suffered = struct.unpack("QQ", self.count.read_bytes())
        self._judge(outcome, output)
        if not self.complete:
            again = "--resume" if self.fault.command == "train" else "--overwrite"
            more = [again] if (self.run_folder / "config.json").exists() else []
            code, output = self.start(*more)
            if code != 0:
                outcome.wrong.append(f"{more} on a healthy disk: exit code {code}: {output.strip()[-1500:]}")
        try:
            self._check()
        except Exception as error:
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        outcome.seconds = time.monotonic() - began
        return outcome

    @property
    def complete(self) -> bool:
        """Whether the checkpoint of the last step is there, or the critic."""
        if self.fault.command != "train":
            return (self.run_folder / "critic").exists()
        return (self.run_folder / "checkpoints" / f"step-{STEPS}" / checkpoints.MANIFEST).exists()

    def _judge(self, outcome: Outcome, output: str) -> None:
        fault = self.fault
        if not outcome.suffered:
            outcome.wrong.append(f"nothing suffered; {outcome.reached} calls matched")
        if outcome.exit_code == HUNG:
            outcome.wrong.append(f"hung for {LIMIT_S:g} s: {output[-500:]}")
        if "Traceback" in output:
            outcome.wrong.append(f"a traceback: {output[-1500:]}")
        lines = output.splitlines()
        outcome.word = self._word(lines, outcome.went_on)
        if not outcome.went_on and not outcome.word:
            outcome.wrong.append(f"stopped with {outcome.exit_code} without a line on it: {output[-1500:]}")
        if outcome.went_on and fault.text and not fault.times and fault.files not in HARMLESS and not outcome.word:
            outcome.wrong.append("silent")

    def _word(self, lines: list[str], went_on: bool) -> str:
        """The last line that names fault and file; for a run that went on, logs and records count as well."""
        if went_on:
            metrics = self.run_folder / "metrics.jsonl"
            rows = sinks.read(metrics) if metrics.exists() else []
            lines = [*lines, *(str(row.get("text", "")) for row in rows)]
            for log in sorted((self.run_folder / "logs").glob("*.log")):
                lines += log.read_text(errors="replace").splitlines()
        named = [line for line in lines if self.fault.text and self.fault.text in line]
        names = [self.fault.files, *filter(None, self.fault.path.split("/"))]
        exact = [line for line in named if any(name in line for name in names)]
        return next(reversed(exact or (named if went_on else [])), "").strip()

    def _check(self) -> None:
        if self.fault.command != "train":
            assert json.loads((self.run_folder / "critic" / "pretraining.json").read_text())["batches"] == STEPS
            with Ledger(self.run_folder / "journal") as ledger:
                ledger.check()
            return
        story = kills.Story(self.folder, self.folder, self.fault.learner, 7, steps=STEPS)
        story.check()

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


HUNG = 124
# What nobody misses: locks where there are none (nobody is judged then), logs of processes, what a killed start left.
HARMLESS = ("owner", "log")


def described(outcome: Outcome) -> dict[str, object]:
    """For a result file."""
    found = {"fault": str(outcome.fault), "learner": outcome.fault.learner, "exit_code": outcome.exit_code}
    return {**found, "suffered": outcome.suffered, "word": outcome.word, "seconds": round(outcome.seconds, 1)}


def show(outcome: Outcome) -> str:
    """One line."""
    end = "went on" if outcome.went_on else f"stopped ({outcome.exit_code})"
    return f"{'WRONG ' if outcome.wrong else ''}{outcome.fault}: {end}, {outcome.suffered} suffered: {outcome.word}" + (
        "\n    " + "\n    ".join(json.dumps(text) for text in outcome.wrong) if outcome.wrong else ""
    )
