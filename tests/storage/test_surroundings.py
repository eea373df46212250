"""What programs of others inherit, and a process that finds no home, no name and no place for temporary files."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sao.errors import ConfigError
from sao.storage import surroundings

SECRETS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *(
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "GITHUB_TOKEN",
        "SSH_AUTH_SOCK",
        "KUBECONFIG",
        "DATABASE_URL",
        "LD_PRELOAD",
    ),
)


def test_no_secret_is_on_the_list():
    assert surroundings.inherited(dict.fromkeys(SECRETS, "x")) == {}


def test_what_a_program_needs_is_and_more_can_be_named():
    ours = {
        "PATH": "/bin",
        "LC_CTYPE": "C",
        "https_proxy": "p",
        "WANDB_API_KEY": "x",
        "MY_A": "1",
        "MY_B": "2",
        "MYSELF": "3",
    }
    assert surroundings.inherited(ours).keys() == {"PATH", "LC_CTYPE", "https_proxy"}
    assert surroundings.inherited(ours, ["MY_*"]).keys() - {"PATH", "LC_CTYPE", "https_proxy"} == {"MY_A", "MY_B"}
    assert surroundings.inherited(ours, ["*"]) == ours


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A process of a user who has a home that cannot be written, and an own folder for temporary files."""
    home = tmp_path / "home"
    home.mkdir()
    real = os.access
    monkeypatch.setattr(surroundings.os, "access", lambda path, mode: Path(path) != home and real(path, mode))
    for name in (*surroundings._CACHES, "HF_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield home
    for name in (*surroundings._CACHES, "HF_HOME", "LOGNAME", "USER"):
        os.environ.pop(name, None)


def test_caches_leave_a_home_that_cannot_be_written(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_HOME", "/mine")
    surroundings.prepare()
    caches = tmp_path / "tmp" / f"sao-caches-{os.getuid()}"
    assert stat.S_IMODE(caches.stat().st_mode) == 0o700
    assert os.environ["XDG_CACHE_HOME"] == str(caches / "cache") and os.environ["HOME"] == str(bare)
    assert os.environ["TRITON_HOME"] == "/mine"


def test_a_model_cache_that_is_there_is_still_read(bare):
    (bare / ".cache" / "huggingface").mkdir(parents=True)
    surroundings.prepare()
    assert os.environ["HF_HOME"] == str(bare / ".cache" / "huggingface")


def test_a_folder_of_that_name_that_others_may_enter_is_not_used(bare, tmp_path):
    theirs = tmp_path / "tmp" / f"sao-caches-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    surroundings.prepare()
    assert not os.environ["XDG_CACHE_HOME"].startswith(str(theirs) + "/")


@pytest.mark.parametrize("home", ["/nonexistent/home", "relative"])
def test_a_home_that_is_none_is_replaced(bare, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", home)
    surroundings.prepare()
    assert Path(os.environ["HOME"]).parent == tmp_path / "tmp"


def test_a_home_that_can_be_written_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    surroundings.prepare()
    assert "XDG_CACHE_HOME" not in os.environ


def test_a_user_without_an_entry_gets_a_name(bare, monkeypatch):
    def absent(_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("pwd.getpwuid", absent)
    surroundings.prepare()
    assert os.environ["USER"] == os.environ["LOGNAME"] == str(os.getuid())


def test_the_current_folder_is_no_place_for_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(Path.cwd()))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^TMPDIR: /tmp cannot be written; set TMPDIR"):
        surroundings.temporary_folder()


def test_as_many_files_as_may_be_had_are_asked_for(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        surroundings.prepare()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CLI = [sys.executable, "-m", "sao.cli"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full"])
def test_streams_that_are_closed_or_full_end_no_command(closed, tmp_path):
    done = subprocess.run(["/bin/sh", "-c", f'"$@" {closed}', "sh", *CLI, "keys", str(tmp_path / "keys")], check=False)
    assert (tmp_path / "keys" / "broker.key").exists()
    assert done.returncode == (0 if "full" not in closed else done.returncode)


@pytest.mark.parametrize("locale", ["C", "POSIX", "tr_TR.ISO-8859-9"])
def test_paths_are_utf_8_in_every_locale(locale, tmp_path):
    old = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    command = [*CLI, "train", str(tmp_path / "läufe 日本.toml")]
    done = subprocess.run(command, env=os.environ | old, capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.count(b"error: ") == 1 and b"Traceback" not in done.stderr
