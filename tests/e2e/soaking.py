"""A run of agents that misbehave (`soak.py`), watched: memory and descriptors of each process, and what came of all."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from tests.e2e import kills, soak

from sao._core import Ledger, ledger_history
from sao.storage.checkpoints import newest
from sao.telemetry import sinks

BATCH, SEED = 64, 5
RUN = """
[run]
name = "r"
dir = {folder!r}
seed = {seed}
steps = {steps}
max_failures_in_a_row = 1000000
[model]
path = {model!r}
[env]
name = "soak:Soak"
max_turns = 8
episode_timeout_s = {episode_s}
[sampling]
max_response_tokens = 6
context_tokens = 192
[generator]
count = 1
concurrency = 96
engine = "scripted"
[learner]
batch_trajectories = {batch}
row_tokens = 192
policy_lr = 1e-4
critic_lr = 1e-3
critic_warmup_steps = 1
save_every_steps = 100
[staleness]
max_lag = 8
[eval]
every_steps = 0
[transport]
heartbeat_s = 1.0
peer_timeout_s = 60.0
rollout_timeout_s = 300.0
shutdown_s = 10.0
[telemetry]
tensorboard = false
plot = false
"""
ROLES = {"broker": "sao.broker", "generator": "sao.generator", "learner": "plain_learner.py"}


class Soaking:
    """One run of so many steps, each of 64 trained rollouts."""

    def __init__(self, folder: Path, model: Path, steps: int, episode_s: float = 10.0) -> None:
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        values = {"folder": str(folder), "model": str(model), "seed": SEED, "steps": steps, "batch": BATCH}
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN.format(**values, episode_s=episode_s))
        self.samples: list[dict[str, float]] = []
        self.seconds = 0.0

    def play(self, limit_s: float, every_s: float = 5.0) -> None:
        """Runs to the end. Raises `AssertionError` for an exit code, or a process that is left."""
        began = time.monotonic()
        environment = os.environ | {"PYTHONPATH": kills.python_path(), "OMP_NUM_THREADS": "1", "STEP_S": "0"}
        command = [*kills.PROGRAMS["plain"], "train", str(self.run_file)]
        output = self.folder / "output.txt"
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                if sample := self._sample(process.pid, time.monotonic() - began):
                    self.samples.append(sample)
                time.sleep(every_s)
            code = process.poll()
            assert code == 0, f"exit code {code}: {output.read_text()[-3000:]}"
        finally:
            process.terminate()
            process.wait()
        self.seconds = time.monotonic() - began
        left = [found for found in psutil.process_iter(["cmdline"]) if str(self.folder) in str(found.info["cmdline"])]
        assert not left, f"left: {left}"

    def _sample(self, pid: int, at_s: float) -> dict[str, float]:
        """Memory (MiB), descriptors and threads of each process, and how many others there are; empty at the start."""
        found: dict[str, float] = {"at_s": round(at_s, 1), "others": 0}
        try:
            family = psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            return {}
        for process in [psutil.Process(pid), *family]:
            with suppress(psutil.Error):  # agents come and go
                words = process.cmdline()[:3]
                role = next((name for name, word in ROLES.items() if any(word in one for one in words)), "")
                role = "supervisor" if process.pid == pid else role
                if not role:
                    found["others"] += 1
                    continue
                found[f"{role}/MiB"] = round(process.memory_info().rss / 2**20, 2)
                found[f"{role}/descriptors"] = process.num_fds()
                found[f"{role}/threads"] = process.num_threads()
        return found if all(f"{role}/threads" in found for role in ROLES) else {}

    def check(self) -> dict[str, Any]:
        """What came of every task, against what had to. Raises `AssertionError`."""
        with Ledger(self.folder / "r" / "journal") as ledger:
            ledger.check()
            issued, counts, tokens = ledger.next_ordinal, ledger.counts(), ledger.tokens()
            assert ledger.unfinished() == []
        runs, _ = ledger_history(self.folder / "r" / "journal", self.steps)
        last, _ = newest(self.folder / "r" / "checkpoints")
        assert last is not None and last.step == self.steps
        seen = json.loads((last.state / "seen.json").read_text())  # all that the learner was trained on
        trained = Counter(ordinal for step in seen for ordinal, _ in step)
        assert set(trained.values()) == {1} and trained.total() == BATCH * self.steps, trained.total()
        assert sorted(trained) == [ordinal for first, stop in runs for ordinal in range(first, stop)]
        tasks = soak.expected(SEED, issued)
        for ordinal in trained:
            assert tasks[ordinal][1].reason == soak.TRAINED, f"task {ordinal} was trained: {tasks[ordinal]}"
        steps = [row for row in sinks.read(self.folder / "r" / "metrics.jsonl") if row["kind"] == "step"]
        prefix = "broker/rollouts_dropped/failed_"
        dropped = {key.removeprefix(prefix): n for key, n in steps[-1].items() if key.startswith(prefix)}
        rest = Counter(kind.reason for ordinal, (_, kind, _) in tasks.items() if ordinal not in trained)
        open_at_the_end = issued - trained.total() - sum(dropped.values())
        assert 0 <= open_at_the_end <= 10 * BATCH, open_at_the_end
        for reason in rest.keys() | dropped.keys():
            if reason != soak.TRAINED:
                late = rest[reason] - dropped.get(reason, 0)  # they had not ended when the last step was made
                assert 0 <= late <= open_at_the_end, (
                    f"{reason}: {dropped.get(reason, 0)} dropped, {rest[reason]} had to"
                )
        began = Counter(name for name, _, _ in tasks.values())
        return {
            "rollouts": issued,
            "trained": trained.total(),
            "dropped_by_reason": dict(sorted(dropped.items())),
            "open_at_the_end": open_at_the_end,
            "programs": sum(program for _, _, program in tasks.values()),
            "by_way": dict(began.most_common()),
            "tokens": {name: tokens[name] for name in ("sampled", "trained", "masked", "held")},
            "tokens_dropped": tokens["dropped"],
            "counts": counts,
            "seconds": round(self.seconds),
        }
