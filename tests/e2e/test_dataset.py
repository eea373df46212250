"""The dataset example as the README shows it: made, checked, trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_example_of_the_readme_learns(tmp_path: Path, steps: int) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("examples/quickstart/make_model.py", "runs/quickstart-model")
    run("-m", "sao", "train", "examples/dataset/run.toml", "--dry-run")
    output = run("-m", "sao", "train", "examples/dataset/run.toml", *([] if steps == 40 else [f"run.steps={steps}"]))
    found = re.search(rf"held-out success: ([\d.]+) at step 0, then ([\d.]+) at step {steps}", output)
    assert found is not None, output
    if steps == 40:
        assert float(found[2]) > max(0.9, float(found[1])), output
