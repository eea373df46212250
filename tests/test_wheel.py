"""A wheel of this tree does what the pages promise in an empty environment, and what needs an extra says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sao.errors import missing_package

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_parts_work_without_rust_and_without_torch(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "maturin", "build", "--release", "--compatibility", "linux", "--out", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, ROOT / "scripts" / "try_wheel.py", wheel], check=True, timeout=280)


def test_a_module_of_no_extra_is_left_alone() -> None:
    assert missing_package(ModuleNotFoundError("no", name="numpy"), "it") is None
    assert missing_package(ModuleNotFoundError("no"), "it") is None
    missing = missing_package(ModuleNotFoundError("no", name="torch.nn"), "sao eval")
    assert str(missing) == "sao eval needs torch, which is not installed: pip install 'sao[train]'"
