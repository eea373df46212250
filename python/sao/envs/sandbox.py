"""A sandbox for shell scripts that nobody trusts: namespaces by bubblewrap, resource limits always.

With bubblewrap (`bwrap`) a script sees the system's programs read-only, the folders that it was given and a private
/tmp; no network, no capabilities, no other processes and nothing of this process's environment; when it ends, so does
everything that it has started. Without bubblewrap a `Sandbox` is refused, unless `allow_unprotected` says that the
machine itself is the sandbox: `unshare` still takes network and processes away, but files have their permissions only.

CPU time, address space (of a process), file size and number of processes are limited by rlimits, wall-clock time by a
kill of the whole tree. Run as root, scripts get a user of their own: root is exempt from the limit of processes.
"""

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sao.errors import ConfigError, EnvironmentFailure

_UIDS = range(20_000, 60_000)  # of nobody in particular; a sandbox that root has made takes one of them
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_INSIDE = "/workspace"
_START_S = 10.0  # that namespaces get to come up, and a killed tree to be gone
_PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one script: seconds, bytes and processes. output_bytes: kept of stdout and stderr together."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 24
    tmp_bytes: int = 1 << 26
    processes: int = 64
    output_bytes: int = 1 << 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a script. exit_code: negative for a signal. timed_out: killed at `wall_s`. cut: output is missing."""

    exit_code: int
    output: bytes
    timed_out: bool
    cut: bool


@lru_cache(maxsize=1)
def bubblewrap() -> tuple[str | None, str]:
    """(path of a `bwrap` that works here or None, its version or why there is none)."""
    with Path(os.devnull).open("wb") as info:
        trial = _bwrap_arguments(Limits(), Path("/usr"), False, "/usr", _trial(), info.fileno())
        return _probe("bwrap", "Debian, Ubuntu: apt install bubblewrap", *trial, keep=(info.fileno(),))


@lru_cache(maxsize=1)
def namespaces() -> tuple[str | None, str]:
    """(path of an `unshare` that works here or None, its version or why there is none)."""
    return _probe("unshare", "util-linux", *_unshare_flags(), *_trial(), "/")


def _trial() -> list[str]:
    """A script that does nothing, started as every script is: what works for less may refuse an option of that."""
    return _limited(Limits(), _UIDS[0] if _root() else None, "begun", "true")


def _probe(program: str, package: str, *trial: str, keep: Sequence[int] = ()) -> tuple[str | None, str]:
    path = shutil.which(program)
    if path is None:
        return None, f"{program} is not installed ({package})"
    try:
        for arguments in (trial, ("--version",)):
            done = subprocess.run(
                [path, *arguments], capture_output=True, encoding="utf-8", timeout=_PROBE_S, check=True, pass_fds=keep
            )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{path} does not work here: {getattr(error, 'stderr', None) or error}".strip()
    return path, done.stdout.strip()


def _root() -> bool:
    return os.geteuid() == 0


def _bwrap_flags() -> list[str]:
    # Root needs no user namespace, and in one it could not change to another user.
    separate = ("pid", "net", "ipc", "uts", *(() if _root() else ("user",)))
    kept = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP") if _root() else ()
    unshared = [f"--unshare-{name}" for name in separate]
    return [*unshared, "--die-with-parent", "--new-session", "--cap-drop", "ALL", *kept]


def _unshare_flags() -> list[str]:
    user = () if _root() else ("--user",)
    return [*user, "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Sandbox:
    """Runs scripts under one set of limits. Raises `ConfigError` when nothing that would protect works here."""

    def __init__(self, limits: Limits | None = None, *, allow_unprotected: bool = False) -> None:
        self.limits = limits or Limits()
        self._uid = random.SystemRandom().choice(_UIDS) if _root() else None
        self._bwrap, found = bubblewrap()
        self._unshare: str | None = None
        if self._bwrap is None:
            if not allow_unprotected:
                raise ConfigError(
                    f"env: scripts of the policy would run without a sandbox: {found}; install it, or set"
                    " env.args.allow_unprotected = true where the machine itself may be lost"
                )
            self._unshare, why = namespaces()
            if self._unshare is None:
                raise ConfigError(f"env: no sandbox: {found}; and {why}")

    def own(self, folder: Path) -> None:
        """Gives a folder and everything in it to the user under whom scripts run."""
        if self._uid is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self._uid, self._uid, follow_symlinks=False)

    async def run(
        self,
        script: str,
        folder: Path,
        *,
        writable: bool = False,
        inside: str = _INSIDE,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Outcome:
        """Runs `/bin/sh -c script` in a folder, which has the name `inside` there, where bubblewrap can give it one.

        Raises `EnvironmentFailure("sandbox_error")` if the sandbox did not come up: then the script has not run.
        """
        variables = {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        variables |= environment or {}
        mark = secrets.token_hex(8).encode() + b"\n"
        kept, timed_out, most = bytearray(), False, self.limits.output_bytes + len(mark)
        descriptor, info_end = os.pipe()  # bubblewrap writes into it which process is the first of the namespace
        with os.fdopen(descriptor, "rb", buffering=0) as info:
            command = self._command(folder, writable, inside, mark, script, info_end)
            try:
                process, cancelled = await _start(command, variables, () if self._bwrap is None else (info_end,))
            finally:
                os.close(info_end)
            try:
                if cancelled is not None:
                    raise cancelled
                async with asyncio.timeout(self.limits.wall_s):
                    _, cut = await asyncio.gather(_feed(process, stdin), _read(process, kept, most))
                    await process.wait()
            except TimeoutError:
                timed_out, cut = True, len(kept) >= most
            finally:
                await _end(process, info.fileno())
        if not kept.startswith(mark):
            raise EnvironmentFailure("sandbox_error", f"the sandbox did not start: {bytes(kept[:400])!r}")
        assert process.returncode is not None
        return Outcome(process.returncode, bytes(kept[len(mark) :]), timed_out, cut)

    def _command(self, folder: Path, writable: bool, inside: str, mark: bytes, script: str, info_end: int) -> list[str]:
        inner = _limited(self.limits, self._uid, mark.decode().strip(), script)
        if self._bwrap is not None:
            return [self._bwrap, *_bwrap_arguments(self.limits, folder, writable, inside, inner, info_end)]
        assert self._unshare is not None
        return [self._unshare, *_unshare_flags(), *inner, str(folder)]


def _limited(limits: Limits, uid: int | None, mark: str, script: str) -> list[str]:
    """The command inside the namespaces; the script's folder is to come behind it.

    The mark tells a script that has begun from a sandbox that has not; the script itself never sees it.
    """
    inner = [
        *("prlimit", f"--cpu={limits.cpu_s}", f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}"),
        *(f"--nproc={limits.processes}", "--core=0", "--nofile=256", "--"),
    ]
    if uid is not None:
        inner += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
        inner += ["--bounding-set=-all", "--inh-caps=-all", "--"]
    return [*inner, "/bin/sh", "-c", f'cd "$2" && echo {mark} && exec /bin/sh -c "$1"', "sh", script]


def _bwrap_arguments(
    limits: Limits, folder: Path, writable: bool, inside: str, inner: Sequence[str], info_end: int
) -> list[str]:
    system = [path for path in (*_SYSTEM, sys.base_prefix) if Path(path).exists()]
    places = (*system, inside)
    above = sorted({str(parent) for path in places for parent in Path(path).parents} - {"/", "/tmp"})  # else 0700
    return [
        *(*_bwrap_flags(), "--info-fd", str(info_end)),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777"),
        *("--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"),
        *(part for path in above for part in ("--perms", "0755", "--dir", path)),
        *(part for path in system for part in ("--ro-bind", path, path)),
        *("--bind" if writable else "--ro-bind", str(folder), inside),
        *("--chdir", "/", "--", *inner, inside),
    ]


async def _start(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
) -> tuple[asyncio.subprocess.Process, asyncio.CancelledError | None]:
    """Starts a sandbox, to the end even when it is cancelled meanwhile: asyncio would kill the process alone, not what
    it has forked by then, and wait without end for whoever has its pipes. Raises `EnvironmentFailure("sandbox_error")`.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env=environment,
            pass_fds=descriptors,
        )
    )
    cancelled = None
    while not starting.done():
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        return starting.result(), cancelled
    except (OSError, ValueError) as error:  # a value: a script with a NUL, or a lone surrogate
        raise cancelled or EnvironmentFailure("sandbox_error", f"{command[0]}: {error}") from error


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # the script does not read
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()


async def _read(process: asyncio.subprocess.Process, kept: bytearray, most: int) -> bool:
    """Reads to the end, since a script that writes into a full pipe waits; keeps `most` bytes. Whether it was more."""
    assert process.stdout is not None
    cut = False
    while part := await process.stdout.read(1 << 16):
        cut = cut or len(kept) + len(part) > most
        kept += part[: most - len(kept)]
    return cut


async def _end(process: asyncio.subprocess.Process, info: int) -> None:
    """Ends the whole tree, and waits until nothing of it is left: bubblewrap ends before what the script left in the
    background, which could go on writing while a grader reads.

    A process namespace's first process is gone only after all others (`zap_pid_ns_processes` in Linux). It is killed by
    itself as well: it leaves the group before it asks to die with its parent, which may be dead by then.
    """
    killed = process.returncode is None
    if killed:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    loop, gone, first = asyncio.get_running_loop(), asyncio.Event(), _first(info, killed)
    try:
        async with asyncio.timeout(_START_S):
            await process.wait()
            if first is not None:
                loop.add_reader(first, gone.set)
                await gone.wait()
    except TimeoutError:
        raise EnvironmentFailure(
            "timeout", f"process {process.pid}, or what it had started, did not end within {_START_S:g} s of SIGKILL"
        ) from None
    finally:
        if first is not None:
            loop.remove_reader(first)
            os.close(first)


def _first(info: int, kill: bool) -> int | None:
    """A descriptor of the first process of the namespace, which is killed if `kill`. None when it is gone, and when
    nothing whole was written: by unshare, which itself waits for that process, or by a bubblewrap that did not get far.
    """
    os.set_blocking(info, False)
    try:
        namespace = json.loads(os.read(info, 1 << 12))
        number = namespace["child-pid"]
        first = os.pidfd_open(number)
    except (BlockingIOError, ProcessLookupError, ValueError):
        return None
    with suppress(OSError):  # it has ended
        # Not another one that has got its number.
        if kill and Path(f"/proc/{number}/ns/pid").stat().st_ino == namespace["pid-namespace"]:
            signal.pidfd_send_signal(first, signal.SIGKILL)
    return first
