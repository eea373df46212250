"""A run without a critic, in groups, with real processes: what is shown, trained and left behind."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.runs import write

from sao._core import Ledger
from sao.telemetry import sinks

LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def test_grpo_runs_in_the_same_loop(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write(tmp_path, tiny_model)
    text = run_file.read_text().replace("critic_lr = 1e-3\ncritic_warmup_steps = 1\n", "critic_warmup_steps = 0\n")
    run_file.write_text(text + '[algorithm]\nestimator = "grpo"\ngroup_size = 4\npolicy_loss = "ppo"\n')
    command = [sys.executable, "-m", "sao.cli", "train", str(run_file), "run.steps=3", "telemetry.keep_trajectories=3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [row for row in sinks.read(tmp_path / "r" / "metrics.jsonl") if row["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert not [name for step in steps for name in step if name.startswith(("critic/", "loss/critic", "lambda/"))]
    assert (tmp_path / "r" / "curves.png").exists()
    (model,) = (tmp_path / "r" / "checkpoints").iterdir()
    assert (model / "model.safetensors").exists() and not (model / "critic.safetensors").exists()
    ledger = Ledger(str(tmp_path / "r" / "ledger.log"))
    assert ledger.counts()["trained"] == 24
    groups = Counter(ordinal // 4 for ordinal in range(ledger.next_ordinal) if ledger.state(ordinal) == "finished")
    assert set(groups.values()) == {4}
