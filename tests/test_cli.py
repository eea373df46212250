"""The command line: help is quick, faults end with exit code 2 and no trace, a dry run starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sao import config


def sao(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "sao", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=60)


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_help_is_quick_and_names_the_commands():
    began = time.process_time(), os.times().children_user
    result = sao("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("train", "eval", "doctor"))
    cpu_s = os.times().children_user - began[1]
    assert cpu_s < 1.0, f"{cpu_s:.2f} s of CPU time"


def test_version():
    import sao as package

    assert sao("--version").stdout == f"sao {package.__version__}\n"


def test_without_a_command_help_is_shown():
    result = sao()
    assert result.returncode == 2 and "Usage" in result.stdout + result.stderr


def test_a_dry_run_prints_what_would_be_done_and_makes_nothing(run_file, tiny_model):
    model = (f"model.path='{tiny_model}'", "sampling.context_tokens=512")
    before = everything_in(run_file.parent)
    result = sao("train", run_file, "run.steps=33", "learner.ranks=2", *model, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert everything_in(run_file.parent) == before
    text, _, commands = result.stdout.partition("\n\n")
    assert json.loads(text)["run"]["steps"] == 33
    assert [line[2:] for line in commands.splitlines() if line.startswith("# ")] == [
        "broker",
        "learner-0",
        "learner-1",
        "g0",
        "g1",
        "dry run: nothing was started",
    ]
    assert "OMP_NUM_THREADS=1" in commands and "--incarnation 0" in commands and "WORLD_SIZE=2" in commands


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["learner.polcy_lr=1"], "learner.polcy_lr: unknown key; did you mean policy_lr?"),
        (["run.steps=0"], "run.steps: must be greater than or equal to 1 (got 0)"),
        (["nonsense"], "override 'nonsense': expected section.key=value"),
        (["env.name=lokup"], "did you mean 'lookup'?"),
        (["model.path=absent"], "model.path: absent is not a folder"),
        (["--dry-run", "model.path=absent"], "model.path: absent is not a folder"),
        (["--nonsense"], "No such option"),
    ],
)
def test_faults_end_with_code_2_before_anything_is_made(run_file, arguments, expected):
    before = everything_in(run_file.parent)
    result = sao("train", run_file, *arguments)
    assert result.returncode == 2
    assert expected in result.stderr and "Traceback" not in result.stderr and result.stdout == ""
    assert everything_in(run_file.parent) == before


def test_all_faults_are_shown(run_file):
    result = sao("train", run_file, "run.steps=0", "learner.ranks=0", "sampling.top_p=0.9", "nonsense")
    assert [line.startswith("error: ") for line in result.stderr.splitlines()] == [True] * 4


def test_broken_toml_is_shown_with_its_place(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = = 3\n")
    result = sao("train", tmp_path / "run.toml")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path / 'run.toml'}: not valid TOML: Invalid value (at line 2, column 9)\n"


def test_eval_checks_before_it_loads(run_file):
    began = time.monotonic()
    result = sao("eval", "absent folder", run_file)
    assert result.returncode == 2 and "model.path: absent folder is not a folder" in result.stderr
    assert time.monotonic() - began < 20


def test_doctor_tells_what_is_here():
    result = sao("doctor")
    assert result.returncode == 0, result.stdout
    for subject in ("python", "torch", "pyzmq", "environments", "cpus", "shared memory", "ipc", "engines"):
        assert subject in result.stdout
    assert "lookup" in result.stdout and "answer in" in result.stdout


def test_sigterm_ends_process_1_of_a_container_before_a_run_begins():
    """The kernel drops a signal for process 1 that has no handler."""
    program = (
        "import os, signal; real = os.getpid(); os.getpid = lambda: 1; from sao import cli;"
        "cli.app = lambda: os.kill(real, signal.SIGTERM); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr


def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch):
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "sao.cli", "keys", "~/keys"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "keys" / "broker.key").exists() and not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", ["plain", "quote ' and \"", "back\\slash", "new\nline", "läufe 🙂", "[b] %s"])
def test_a_path_on_the_command_line_is_no_toml(name):
    data = {"env": {"name": "lookup"}, "model": {"path": "m"}}
    assert config.parse(data, [config.toml_override("run.dir", f"/{name}")]).run.dir == f"/{name}"
