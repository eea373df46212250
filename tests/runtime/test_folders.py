"""Private folders are private, found again when their owner was killed, and nobody else's are touched."""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sao.errors import ConfigError
from sao.runtime import doctor, folders
from sao.storage import ownership


@pytest.fixture(autouse=True)
def bases(tmp_path, monkeypatch):
    for name in ("shm", "sockets", "temp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(folders, "SOCKETS", tmp_path / "sockets")


def test_private_folders_are_for_this_user_only_and_go_away(tmp_path):
    with folders.private(tmp_path) as private:
        for folder in (private.sockets, private.weights):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (folder / "file").write_text("x")
        assert private.weights.parent == tmp_path / "shm"
        assert folders.stale() == []
    assert not private.sockets.exists() and not private.weights.exists()
    with folders.private(tmp_path) as private:
        shutil.rmtree(private.weights)  # that it is gone already is no error


def test_without_shared_memory_weights_go_to_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "absent")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    with folders.private(run_folder) as private:
        assert private.weights.parent == run_folder
        assert folders.stale() == []


def test_weights_go_to_the_run_folder_where_shared_memory_is_too_small(tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    free = shutil.disk_usage(tmp_path).free
    for needed, place in ((1, tmp_path / "shm"), (2 * free, run_folder)):
        with folders.private(run_folder, needed) as private:
            assert private.weights.parent == place


OWNING = """
import os, signal, sys
from pathlib import Path
from sao.storage import ownership
ownership.own(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_owner(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", OWNING, str(folder)], check=False)
    assert (folder / ownership.OWNER).is_file()


def test_an_owner_is_alive_in_every_process_namespace(tmp_path):
    """Where its number is nobody's, or somebody else's."""
    begin = [
        "unshare",
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    if subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission for a process namespace")
    ask = "import sys, pathlib; from sao.storage import ownership; print(ownership.owner(pathlib.Path(sys.argv[1])))"

    def asked() -> str:
        done = subprocess.run(
            [*begin, sys.executable, "-c", ask, str(tmp_path)], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    with ownership.owned(tmp_path):
        assert ownership.owner(tmp_path) == os.getpid() and asked() == str(os.getpid())
    assert ownership.owner(tmp_path) is None
    killed_owner(tmp_path)
    assert ownership.owner(tmp_path) == 0 and asked() == "0"


def test_where_files_cannot_be_locked_nobody_is_judged(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ownership.owned(tmp_path):
        assert ownership.owner(tmp_path) is None


def test_a_folder_that_is_owned_again_stays_owned(tmp_path):
    ownership.own(tmp_path)
    with ownership.owned(tmp_path):
        assert ownership.owner(tmp_path) == os.getpid()
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_only_folders_of_dead_owners_are_stale(tmp_path):
    with folders.private(tmp_path) as alive:
        dead = tmp_path / "shm" / "sao-dead"
        dead.mkdir(mode=0o700)
        killed_owner(dead)
        names = ("sao-without-owner", "sao-unreadable", "somebody-else", "sao-other-format")
        others = [tmp_path / "shm" / name for name in names]
        for folder in others:
            folder.mkdir()
        (others[1] / ownership.OWNER).write_text("{")
        killed_owner(others[2])
        (others[3] / ownership.OWNER).write_text(json.dumps({"pid": 1, "started_s": 0.0}))
        (tmp_path / "shm" / "sao-link").symlink_to(others[2])
        assert folders.stale() == [dead]
        assert folders.remove_stale() == [dead]
        assert folders.stale() == []
        assert all(folder.exists() for folder in [*others, alive.weights, alive.sockets])


def test_what_a_killed_doctor_leaves_is_stale(tmp_path, monkeypatch):
    """It had made the folder of its sockets, and was about to try them."""
    monkeypatch.setattr(folders, "SOCKETS", tmp_path / "shm")
    if (child := os.fork()) == 0:
        monkeypatch.setattr(doctor, "_reachable", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        list(doctor._sockets())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = (tmp_path / "shm").iterdir()
    assert folders.remove_stale() == [left] and not left.exists()


def test_what_a_start_has_left_that_failed_early_is_no_run(tmp_path):
    """As when the disk was full before its configuration was written."""
    run = tmp_path / "run"
    folders.make_run_folder(run, overwrite=False)
    ownership.disown(run)
    (run / ".config.json.new").write_text("{")
    folders.make_run_folder(run, overwrite=False)
    ownership.disown(run)
    (run / "logs" / "broker.log").write_text("something happened")
    with pytest.raises(ConfigError, match="exists"):
        folders.make_run_folder(run, overwrite=False)


KILLED_ENGINE = """
import asyncio, os, signal
from sao.engines.vllm import engine as vllm_engine
vllm_engine.import_vllm = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(vllm_engine.VllmEngine(os.environ["MODEL"], context_tokens=64).start())
"""


def test_the_folder_of_a_killed_generators_vllm_is_stale(tmp_path, model_folder):
    environment = os.environ | {"TMPDIR": str(tmp_path / "temp"), "MODEL": str(model_folder)}
    killed = subprocess.run([sys.executable, "-c", KILLED_ENGINE], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = (tmp_path / "temp").iterdir()
    assert left.name.startswith("sao-vllm-") and folders.stale() == [left]
    folders.remove_stale()
    assert not left.exists()


def make_run(folder: Path, **more: bool) -> None:
    folders.make_run_folder(folder, overwrite=more.get("overwrite", False))
    (folder / "config.json").write_text("{}")


def test_a_run_folder_is_used_once_unless_it_may_be_overwritten(tmp_path):
    folder = tmp_path / "runs" / "r"
    make_run(folder)
    ownership.disown(folder)
    (folder / "metrics.jsonl").write_text("old")
    with pytest.raises(ConfigError, match=r"choose another run\.name or pass --overwrite"):
        make_run(folder)
    make_run(folder, overwrite=True)
    assert not (folder / "metrics.jsonl").exists() and (folder / "logs").is_dir()


def test_the_folder_of_a_running_run_is_never_overwritten(tmp_path):
    folder = tmp_path / "r"
    make_run(folder)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
        make_run(folder, overwrite=True)


@pytest.mark.parametrize("how", ["same folder", "new folder"])
def test_of_two_starts_that_overwrite_at_once_the_second_leaves_the_first_alone(tmp_path, monkeypatch, how):
    """Both have found nothing wrong with the old folder; the first has begun its run before the second has the lock."""
    folder = tmp_path / "r"
    make_run(folder)
    ownership.disown(folder)
    hold = folders.hold

    def wait(path: Path, *rest: object) -> int:
        lock = hold(path, *rest)
        monkeypatch.setattr(folders, "hold", hold)
        if how == "new folder":
            shutil.rmtree(path)
            (path / "logs").mkdir(parents=True)
        ownership.own(path)
        (path / "metrics.jsonl").write_text("of the first")
        return lock

    monkeypatch.setattr(folders, "hold", wait)
    with pytest.raises(ConfigError, match="is in use"):
        make_run(folder, overwrite=True)
    assert (folder / "metrics.jsonl").read_text() == "of the first"


def test_of_two_starts_that_make_a_folder_at_once_the_second_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "r"
    make_run(folder)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as it was when the second looked
    with pytest.raises(ConfigError, match="is in use"):
        folders.make_run_folder(folder, overwrite=False)


def test_a_folder_that_holds_something_else_is_never_emptied(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds no run \(no config.json\)"):
        folders.make_run_folder(folder, overwrite=True)
    assert (folder / "thesis.tex").exists()
    with pytest.raises(ConfigError, match="is not a folder"):
        folders.make_run_folder(folder / "thesis.tex", overwrite=True)
