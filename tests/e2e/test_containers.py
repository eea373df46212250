"""The quickstart's run inside containers without rights: some of the conditions of `bench/container.py`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make_folder

SCRIPT = Path(__file__).parents[2] / "bench" / "container.py"
spec = importlib.util.spec_from_file_location("container", SCRIPT)
assert spec is not None and spec.loader is not None
container = importlib.util.module_from_spec(spec)
sys.modules["container"] = container
spec.loader.exec_module(container)

QUICK = ("no-proc", "tmp-read-only", "files-32", "cgroup2-memory")
pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None
    or subprocess.run(
        ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"],
        capture_output=True,
        check=False,
    ).returncode
    != 0,
    reason="no name spaces here",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in container.SUBSET]
)
def test_it_learns_or_one_line_says_what_to_change(name, tmp_path):
    right, ended = container.attempt(container.CONDITIONS[name], make_folder(tmp_path / "model"))
    assert right, ended
