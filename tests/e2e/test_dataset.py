"""The dataset example as the README shows it: made, checked, trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs the commands of the README where it says, and gives their output."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}

    def ended(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return ended


def test_the_example_of_the_readme_is_a_run(run: Callable[..., str], tiny_model: Path) -> None:
    output = run("-m", "sao", "train", "examples/dataset/run.toml", f"model.path={tiny_model}", "--dry-run")
    assert '"name": "dataset"' in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_of_the_readme_learns(run: Callable[..., str]) -> None:
    run("examples/quickstart/make_model.py", "runs/quickstart-model")
    output = run("-m", "sao", "train", "examples/dataset/run.toml")
    found = re.search(r"held-out success: ([\d.]+) at step 0, then ([\d.]+) at step 40", output)
    assert found is not None and float(found[2]) > max(0.9, float(found[1])), output
