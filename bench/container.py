"""The quickstart's run inside an unprivileged container, once a condition: it learns, or one line says what to change.

    python bench/container.py [NAME ...] [--list]

A container is made with bubblewrap, which needs no rights: a user without an entry in /etc/passwd, a home and a system
that cannot be written, 64 MiB of /dev/shm, /tmp on a file system of its own, no network but loopback, no variables of
ours. Each condition changes one thing about it. Without names all are tried and docs/results/containers.md is written.
Exit code 1 if a condition ended in another way than by one of the two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import sao

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "docs" / "results" / "containers.md"
STEPS = 2
LIMIT_S = 240.0
UID = "12345"
SMALL = [
    *(f"run.steps={STEPS}", "eval.episodes=16", "eval.every_steps=2", "run.target_success=0.999", "generator.count=1"),
    *("learner.batch_trajectories=16", "generator.concurrency=16", "learner.critic_warmup_steps=1"),
]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl")
SHELL = 'exec "$@"'


@dataclass(frozen=True)
class Condition:
    """One thing that is otherwise than in the plain container.

    flags: further ones of bubblewrap, `{work}` is the scratch folder. environment: further variables, None removes.
    shell: what runs the command, which are its arguments. overrides: of the run file. limits: of a control group,
    `memory` in bytes and `cpus`. expected: `runs`, or what the one line holds. stop_s: SIGTERM after so many seconds.
    """

    text: str
    flags: Sequence[str] = ()
    environment: dict[str, str | None] = field(default_factory=dict)
    shell: str = SHELL
    overrides: Sequence[str] = ()
    limits: dict[str, float] = field(default_factory=dict)
    command: Sequence[str] = ()
    folder: str = "/data"
    proc: bool = True
    shm_mib: int | None = 64
    tmp: bool = True
    expected: str = "runs"
    stop_s: float | None = None


TRAIN = (
    "-m",
    "sao.cli",
    "train",
    "/source/examples/quickstart/run.toml",
    "model.path=/model",
    "run.dir=/data/runs",
    *SMALL,
)

CONDITIONS: dict[str, Condition] = {
    "plain": Condition("the plain container"),
    "doctor": Condition("`sao doctor` in the plain container", command=("-m", "sao.cli", "doctor")),
    "no-shm": Condition("no /dev/shm", shm_mib=None),
    "shm-1m": Condition("/dev/shm of 1 MiB", shm_mib=1),
    "shm-read-only": Condition("/dev/shm that cannot be written", flags=("--remount-ro", "/dev/shm")),
    "home-unset": Condition("HOME not set", environment={"HOME": None}),
    "home-root": Condition("HOME=/", environment={"HOME": "/"}),
    "home-absent": Condition("a home folder that does not exist", environment={"HOME": "/nonexistent"}),
    "no-proc": Condition("/proc not mounted", proc=False, expected="/proc"),
    "cwd-read-only": Condition("a current folder that cannot be written", folder="/source"),
    "relative-run-dir": Condition(
        "run.dir relative to a current folder that cannot be written",
        folder="/source",
        overrides=("run.dir=runs",),
        expected="run.dir",
    ),
    "locale-c": Condition(
        "LC_ALL=C, no UTF-8 mode", environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ),
    "locale-posix": Condition("LANG=POSIX", environment={"LANG": "POSIX"}),
    "locale-turkish": Condition("LC_ALL=tr_TR.ISO-8859-9", environment={"LC_ALL": "tr_TR.ISO-8859-9"}),
    "locale-c-unicode": Condition(
        "LC_ALL=C and a run folder with letters beyond ASCII, blanks and brackets",
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        overrides=('run.dir="/data/läufe [1] 日本"',),
    ),
    "newline": Condition("a newline in the run's path", overrides=('run.dir="/data/a\\nb"',)),
    "ascii-output": Condition("an output that takes ASCII only", environment={"PYTHONIOENCODING": "ascii:strict"}),
    "tmpdir-work": Condition("TMPDIR on another disk than /tmp", environment={"TMPDIR": "/data/tmp"}),
    "tmpdir-absent": Condition("TMPDIR that does not exist", environment={"TMPDIR": "/nowhere"}),
    "tmp-read-only": Condition(
        "no temporary folder that can be written", flags=("--remount-ro", "/tmp"), expected="TMPDIR"
    ),
    "tmp-read-only-tmpdir": Condition(
        "/tmp that cannot be written, TMPDIR that can",
        flags=("--remount-ro", "/tmp"),
        environment={"TMPDIR": "/data/tmp"},
    ),
    "tmpdir-long": Condition(
        "/tmp that cannot be written, TMPDIR of 120 bytes",
        flags=("--remount-ro", "/tmp"),
        environment={"TMPDIR": "/data/" + "t" * 114},
        expected="TMPDIR",
    ),
    "umask-077": Condition("umask 077", shell=f"umask 077; {SHELL}"),
    "umask-000": Condition("umask 000", shell=f"umask 000; {SHELL}"),
    "files-32": Condition("32 open files at most", shell=f"ulimit -n 32; {SHELL}", expected="open files"),
    "files-128": Condition("128 open files at most", shell=f"ulimit -n 128; {SHELL}"),
    "files-256-of-4096": Condition(
        "256 open files, 4096 for who asks", shell=f"ulimit -Sn 256; ulimit -Hn 4096; {SHELL}"
    ),
    "long-hostname": Condition("a host name of 63 bytes", flags=("--hostname", "h" * 63)),
    "memory-256m": Condition("256 MiB of memory (control group)", limits={"memory": 256 << 20}, expected="memory"),
    "memory-4g": Condition("4 GiB of memory (control group)", limits={"memory": 4 << 30}),
    "cpu-half": Condition("half a CPU (control group)", limits={"cpus": 0.5}),
    "cgroup2-memory": Condition(
        "256 MiB of memory as control groups 2 tell it",
        flags=("--ro-bind", "{work}/cgroup2", "/sys/fs/cgroup"),
        expected="memory",
    ),
    "stdin-closed": Condition("stdin closed", shell=f"exec <&-; {SHELL}"),
    "stdout-closed": Condition("stdout closed", shell=f"exec >&-; {SHELL}"),
    "all-closed": Condition("stdin, stdout and stderr closed", shell=f"exec <&- >&- 2>&-; {SHELL}"),
    "stdout-full": Condition("stdout on a full disk", shell=f"exec >/dev/full; {SHELL}"),
    "reader-gone": Condition(
        "a reader of the output that leaves", shell='{ "$@" 2>&1; echo "code $?" >&3; } 3>&2 | true; sleep 1; wait'
    ),
    "nohup": Condition(
        "nohup and setsid, SIGHUP sent", shell='nohup setsid "$@" & p=$!; sleep 5; kill -HUP $p; wait $p'
    ),
    "pid-1": Condition("process 1 of the container", flags=("--as-pid-1",), shell=SHELL),
    "pid-1-sigterm": Condition(
        "process 1 of the container, SIGTERM",
        flags=("--as-pid-1",),
        overrides=("run.steps=1000",),
        stop_s=25.0,
        expected="SIGTERM",
    ),
    "full-disk": Condition(
        "a run folder with 100 KiB left",
        flags=("--size", str(100 << 10), "--tmpfs", "/small"),
        overrides=("run.dir=/small",),
        shm_mib=None,
        expected="run.dir",
    ),
    "sandbox": Condition(
        "the environment `workspace`, where a container may not mount /proc again",
        overrides=("env.name=workspace",),
        expected="sandbox",
    ),
}
SUBSET = ("plain", "locale-c-unicode", "no-proc", "tmp-read-only", "files-32", "cgroup2-memory", "pid-1-sigterm")


def container(condition: Condition, place: Path, model: Path) -> list[str]:
    """The command of a condition inside its container."""
    bound = dict.fromkeys(path for path in (*SYSTEM, sys.base_prefix, sys.prefix) if Path(path).exists())
    bwrap = ["bwrap", "--unshare-user", "--uid", UID, "--gid", UID]
    bwrap += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--die-with-parent"]
    bwrap += [*(("--proc", "/proc") if condition.proc else ()), "--dev", "/dev"]
    if condition.shm_mib is not None:
        bwrap += ["--perms", "1777", "--size", str(condition.shm_mib << 20), "--tmpfs", "/dev/shm"]
    else:  # bubblewrap makes the folder
        bwrap += ["--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev/shm"]
    bwrap += ["--perms", "1777", "--tmpfs", "/tmp"]
    for path in bound:
        bwrap += ["--ro-bind", path, path]
    bwrap += [
        "--ro-bind",
        str(PROJECT),
        "/source",
        "--ro-bind",
        str(Path(sao.__file__).resolve().parent),
        "/package/sao",
    ]
    bwrap += ["--ro-bind", str(model), "/model", "--bind", str(place), "/data"]
    bwrap += ["--ro-bind", str(place / "passwd"), "/etc/passwd", "--perms", "0555", "--dir", "/home/user"]
    bwrap += [flag.replace("{work}", str(place)) for flag in condition.flags]
    bwrap += ["--remount-ro", "/", "--chdir", condition.folder, "--clearenv"]
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/home/user", "PYTHONPATH": "/package", **condition.environment}
    for name, value in variables.items():
        bwrap += ["--setenv", name, value] if value is not None else []
    command = [str(Path(sys.prefix) / "bin" / "python"), *(condition.command or TRAIN), *condition.overrides]
    return [*bwrap, "--", "/bin/sh", "-c", condition.shell, "sh", *command]


@contextmanager
def control_group(limits: dict[str, float]) -> Iterator[Path | None]:
    """The file into which a process writes itself to be limited. Raises `OSError` where no group can be made."""
    groups: list[Path] = []
    try:
        if "memory" in limits:
            groups.append(Path("/sys/fs/cgroup/memory") / f"sao-container-{os.getpid()}")
            groups[-1].mkdir()
            (groups[-1] / "memory.limit_in_bytes").write_text(str(int(limits["memory"])))
        if "cpus" in limits:
            groups.append(Path("/sys/fs/cgroup/cpu") / f"sao-container-{os.getpid()}")
            groups[-1].mkdir()
            (groups[-1] / "cpu.cfs_quota_us").write_text(str(int(limits["cpus"] * 100_000)))
        yield groups[0] if groups else None
    finally:
        for group in groups:
            with suppress(OSError):
                group.rmdir()


def attempt(condition: Condition, model: Path) -> tuple[bool, str]:
    """Runs a condition: whether it ended as it should, and how it ended, in words."""
    with tempfile.TemporaryDirectory(prefix="container-") as name, control_group(condition.limits) as group:
        place = Path(name)
        (place / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (place / "tmp").mkdir()
        (place / ("t" * 114)).mkdir()
        (place / "cgroup2").mkdir()
        (place / "cgroup2" / "memory.max").write_text(f"{256 << 20}\n")
        (place / "cgroup2" / "cgroup.controllers").write_text("cpu memory\n")
        command = container(condition, place, model)
        flags: list[str] = []
        if group is not None:  # before bubblewrap, so that all of it is in the group
            shell = f'echo $$ >{group}/cgroup.procs && exec "$@"'
            hierarchy = group.parent
            at = command.index("--remount-ro", command.index("/home/user"))
            flags = ["--ro-bind", str(group), str(hierarchy)]
            command = ["/bin/sh", "-c", shell, "sh", *command[:at], *flags, *command[at:]]
        with (place / "output").open("w+b") as output:
            began = time.monotonic()
            child = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                if condition.stop_s is not None:
                    time.sleep(condition.stop_s)
                    inner = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
                    os.kill(int(inner[0]), signal.SIGTERM)
                code = child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            seconds = time.monotonic() - began
        text = (place / "output").read_bytes().decode(errors="replace")
        saved = [path for path in place.rglob(f"step-{STEPS}") if (path / "manifest.json").exists()]
        if os.environ.get("SHOW"):
            print(f"--- {code}\n{text}---")
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    if code is None:
        return False, f"still going on after {LIMIT_S:g} s: {lines[-1:]}"
    if "Traceback" in text:
        return False, f"a traceback, exit code {code}: {lines[-1]}"
    if code == 2 and len(said) == 1:
        return condition.expected in said[0], f"one line: `{said[0]}`"
    if condition.stop_s is not None:
        last = next((line for line in reversed(lines) if "SIGTERM" in line), "")
        return code == 130 and bool(last), f"ended in order: `{last}`"
    if condition.command:
        return code == 0, f"exit code 0, {len(lines)} lines" if code == 0 else f"exit code {code}: {lines[-3:]}"
    if code == 0 and saved and condition.expected == "runs":
        return True, f"runs, {seconds:.0f} s"
    return False, f"exit code {code}, {len(saved)} checkpoints: {lines[-3:]}"


def main() -> int:
    """Tries conditions, prints how each ends, writes the page when all were tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="conditions; default: all")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CONDITIONS))
        return 0
    if shutil.which("bwrap") is None:
        print("bubblewrap is not installed")
        return 1
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory(prefix="container-model-") as name:
        sys.path.insert(0, str(PROJECT / "tests"))
        import tiny_model

        model = tiny_model.make_folder(Path(name) / "model")
        for one in arguments.names or CONDITIONS:
            try:
                right, ended = attempt(CONDITIONS[one], model)
            except OSError as error:
                right, ended = True, f"cannot be tried here: {error}"
            wrong += not right
            print(f"{'ok ' if right else 'BAD'} {one}: {ended}", flush=True)
            rows.append((one, CONDITIONS[one].text, ended if right else f"**wrong**: {ended}"))
    if not arguments.names:
        RESULTS.write_text(PAGE + "".join(f"| `{one}` | {text} | {ended} |\n" for one, text, ended in rows))
    return int(wrong > 0)


PAGE = f"""# In containers

Written by `python bench/container.py`: the quickstart's run, {STEPS} steps, inside a container without rights, once a
condition. The plain container: a user without an entry in `/etc/passwd`, a home folder and a system that cannot be
written, 64 MiB of `/dev/shm`, `/tmp` on a file system of its own, no network but loopback, none of the outer
environment variables. Each condition changes one thing. Right is a run that makes its checkpoint, or exit code 2 and
one line that says what to change. What the lines ask for is in [How to run in a container](../how-to/containers.md).

| condition | what is otherwise | how it ended |
| --- | --- | --- |
"""


if __name__ == "__main__":
    sys.exit(main())
