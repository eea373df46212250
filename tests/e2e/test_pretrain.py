"""`sao pretrain-value` with real processes: it ends by its own rule and leaves a critic that a learner starts from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.runs import write

from sao.config import load
from sao.learner.step import Learner
from sao.telemetry import sinks

LIMIT_S = 200.0
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def test_a_critic_is_pretrained_and_a_learner_starts_from_it(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write(tmp_path, tiny_model)
    settings = ["value_pretraining.steps=3", "value_pretraining.window=1", "telemetry.plot=false"]
    command = [sys.executable, "-m", "sao.cli", "pretrain-value", str(run_file), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = tmp_path / "r-critic"
    assert "all steps done" in ended.stdout and f'learner.critic_path = "{folder / "critic"}"' in ended.stdout
    facts = json.loads((folder / "critic" / "pretraining.json").read_text())
    assert (facts["batches"], facts["rollouts"], facts["model"]) == (3, 24, str(tiny_model))
    steps = [row for row in sinks.read(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert [step["step/version"] for step in steps] == [0, 0, 0] and not (folder / "checkpoints").exists()
    assert not [name for step in steps for name in step if name.startswith("policy/")]
    assert {"loss/critic_2", "time/idle_share", "broker/generators"} <= steps[-1].keys()
    learner = Learner(load(run_file, [f"learner.critic_path={folder / 'critic'}"]))
    written = load_file(folder / "critic" / "critic.safetensors")
    assert written.keys() == dict(learner.critic.named_parameters()).keys()
    assert all(torch.equal(written[name], parameter) for name, parameter in learner.critic.named_parameters())
