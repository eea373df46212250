"""A run without a critic, in groups, on two ranks, with real processes: what is shown, trained and left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.runs import Run, write

from sao._core import Ledger

pytestmark = pytest.mark.timeout(180)


def test_grpo_runs_in_the_same_loop_on_two_ranks(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write(tmp_path, tiny_model)
    text = run_file.read_text().replace("critic_lr = 1e-3\ncritic_warmup_steps = 1\n", "critic_warmup_steps = 0\n")
    run_file.write_text(text + '[algorithm]\nestimator = "grpo"\ngroup_size = 4\npolicy_loss = "ppo"\n')
    run = Run(run_file, "run.steps=3", "learner.ranks=2", "telemetry.keep_trajectories=3")
    run.until("step")
    listening = [c for p in run.family for c in p.net_connections() if c.status == "LISTEN"]
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1"}, listening
    assert run.wait() == 0 and run.leftovers() == [], run.output.read_text()
    steps = run.records("step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert not [name for step in steps for name in step if name.startswith(("critic/", "loss/critic", "lambda/"))]
    assert (tmp_path / "r" / "curves.png").exists()
    (model,) = (tmp_path / "r" / "checkpoints").iterdir()
    assert (model / "model.safetensors").exists() and not (model / "critic.safetensors").exists()
    ledger = Ledger(str(tmp_path / "r" / "journal"))
    assert ledger.counts()["trained"] == 24
    groups = Counter(ordinal // 4 for ordinal in range(ledger.next_ordinal) if ledger.state(ordinal) == "finished")
    assert set(groups.values()) == {4}
