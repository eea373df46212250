"""What a container may use: control groups 1 and 2, their parents, and a kernel that says nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sao import config
from sao.errors import ConfigError
from sao.runtime import machine, preflight
from sao.runtime.processes import Command, Family

GIB = 1 << 30


@pytest.fixture
def process(tmp_path, monkeypatch) -> Path:
    """A stand-in for /proc/self."""
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "stat").touch()
    monkeypatch.setattr(machine, "PROCESS", folder)
    monkeypatch.setattr(machine, "_USUAL", tmp_path / "usual")
    return folder


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")
    return folder


def version_2(process: Path, mounted: Path, path: str, root: str = "/") -> None:
    (process / "cgroup").write_text(f"0::{path}\n")
    (process / "mountinfo").write_text(f"30 23 0:26 {root} {mounted} rw,nosuid - cgroup2 cgroup2 rw\n")


def test_the_least_of_a_group_and_all_above_it_counts(process, tmp_path):
    top = group(tmp_path / "g", memory__max=str(4 * GIB), cpu__max="150000 100000")
    group(top / "pod", memory__max=str(8 * GIB), cpu__max="max 100000")
    group(top / "pod" / "box", memory__max="max", cpu__max="900000 100000")
    version_2(process, top, "/pod/box")
    assert machine.memory_limit() == 4 * GIB
    assert machine.cpus() == min(2, len(machine.os.sched_getaffinity(0)))


def test_half_a_cpu_is_one(process, tmp_path):
    version_2(process, group(tmp_path / "g", cpu__max="50000 100000"), "/")
    assert machine.cpus() == 1


def test_a_container_that_sees_its_own_group_as_the_root(process, tmp_path):
    version_2(process, group(tmp_path / "g", memory__max=str(GIB)), "/docker/0123/not/seen")
    assert machine.memory_limit() == GIB


def test_version_1_as_docker_binds_it(process, tmp_path):
    memory = group(tmp_path / "memory", memory__limit_in_bytes=str(2 * GIB), memory__oom_control="oom_kill 3")
    cpu = group(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    (process / "cgroup").write_text("4:memory:/docker/ab\n1:cpu,cpuacct:/docker/ab\n0::/\n")
    lines = [
        f"31 23 0:27 /docker/ab {memory} ro - cgroup cgroup rw,memory",
        f"32 23 0:28 /docker/ab {cpu} ro - cgroup cgroup rw,cpu,cpuacct",
    ]
    (process / "mountinfo").write_text("\n".join(lines) + "\n")
    assert machine.memory_limit() == 2 * GIB
    assert machine.cpus() == len(machine.os.sched_getaffinity(0))
    assert machine.killed_for_memory() == 3


@pytest.mark.parametrize("text", ["9223372036854771712", "max", "", "no number"])
def test_no_limit_is_none(process, tmp_path, text):
    version_2(process, group(tmp_path / "g", memory__max=text, memory__limit_in_bytes=text), "/")
    assert machine.memory_limit() is None
    assert machine.memory()[1] == psutil.virtual_memory().total


def test_without_proc_there_is_no_limit(process):
    assert machine.memory_limit() is None and machine.cpus() >= 1 and machine.killed_for_memory() == 0


def test_files_that_the_kernel_may_drop_count_as_free(process, tmp_path):
    files = {"memory__max": str(GIB), "memory__current": str(GIB), "memory__stat": f"anon 1\ninactive_file {GIB // 4}"}
    version_2(process, group(tmp_path / "g", **files), "/")
    assert machine.memory() == (GIB // 4, GIB)


def test_too_little_memory_is_one_fault_with_both_numbers(process, tmp_path, run_file, monkeypatch):
    monkeypatch.setattr(preflight, "GPUS", ())
    version_2(process, group(tmp_path / "g", memory__max=str(256 << 20)), "/")
    with pytest.raises(ConfigError, match=r"^memory: run needs \d+ MB at least, .* is 268 MB; .*--memory") as caught:
        preflight.check(config.load(run_file))
    assert len(str(caught.value).splitlines()) == 1


def test_a_machine_without_proc_is_one_fault(process, run_file):
    (process / "stat").unlink()
    with pytest.raises(ConfigError, match=r"^/proc is not mounted"):
        preflight.check(config.load(run_file))


def test_who_is_killed_for_memory_is_told_so(process, tmp_path):
    events = group(tmp_path / "g", memory__max=str(GIB), memory__events="oom 0\noom_kill 0") / "memory.events"
    version_2(process, tmp_path / "g", "/")
    with Family() as family:
        child = family.start(Command("learner", "learner", ("sleep", "60"), {}))
        other = family.start(Command("learner", "learner", ("sleep", "60"), {}))
        other.kill()
        other.wait(10)
        assert other.how_it_ended == "killed by SIGKILL"
        events.write_text("oom 1\noom_kill 1\n")
        child.kill()
        child.wait(10)
        assert child.how_it_ended == "killed by SIGKILL: the memory of this container, 1074 MB, was used up"


ORPHAN = "import os, sys; os.fork() and sys.exit(); os.setsid(); os.fork() and os._exit(0); os._exit(0)"


def test_orphans_do_not_stay_as_zombies(tmp_path):
    def zombies() -> list[int]:
        return [one.pid for one in psutil.Process().children() if one.status() == psutil.STATUS_ZOMBIE]

    with Family() as family:
        child = family.start(Command("generator", "g0", (sys.executable, "-c", "import time; time.sleep(60)"), {}))
        for _ in range(3):
            subprocess.run([sys.executable, "-c", ORPHAN], check=True)
        psutil.wait_procs([], timeout=0)
        deadline = machine.os.times().elapsed + 10
        while machine.os.times().elapsed < deadline:
            family.reap()
            if not (left := zombies()):
                break
        assert not left and child.poll() is None  # one that ends just now is for the next time
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
