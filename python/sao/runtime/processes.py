"""Child processes of a run: started in their own session, watched, and ended with everything that they started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from sao.storage.parent_death import under_parent

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Command:
    """What is run for one actor: its role, its name, the argument vector and the variables set on top of ours."""

    role: str
    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    handles: tuple[int, ...] = ()  # open files that it inherits


class Child:
    """One running actor. Start children from the main thread only: the parent-death signal follows the thread."""

    def __init__(
        self, command: Command, log: Path | None = None, on_exit: Callable[[Child], None] = lambda child: None
    ) -> None:
        """Starts the command; its output is appended to `log`, or goes where ours does. `on_exit` is called once, on
        another thread.
        """
        self.command = command
        self._log, self._log_start_bytes = log, 0
        with log.open("ab") if log else nullcontext() as output:
            if output:
                self._log_start_bytes = output.tell()
            self._process = subprocess.Popen(
                under_parent(command.argv),
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                pass_fds=command.handles,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only, which ends all in order
            )
        threading.Thread(target=self._watch, args=(on_exit,), daemon=True).start()

    def _watch(self, on_exit: Callable[[Child], None]) -> None:
        self._process.wait()
        on_exit(self)

    def wait(self) -> int:
        """Waits for the end without a deadline, that is the caller's signal; returns `exit_code`."""
        return self._process.wait()

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    @property
    def how_it_ended(self) -> str:
        """`exit code 3` or `killed by SIGKILL`."""
        code = self._process.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        return f"killed by {signal.Signals(-code).name}"

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: minus the signal), None while it runs."""
        return self._process.poll()

    def last_lines(self, count: int = 15, at_most_bytes: int = 16384) -> str:
        """The last lines that this process wrote (not an earlier one with the same log)."""
        if self._log is None:
            return ""
        with self._log.open("rb") as file:
            end_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start_bytes, end_bytes - at_most_bytes))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-count:])


def become_subreaper() -> None:
    """Makes orphans of our descendants our own children, so that none can slip away (Linux; a no-op elsewhere)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All living descendants of this process, zombies left out."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def terminate(children: Sequence[Child]) -> None:
    """SIGTERM to those that still run."""
    for child in children:
        child.send(signal.SIGTERM)


def kill(members: Callable[[], Sequence[psutil.Process]], wait_s: float = 5.0) -> None:
    """SIGKILL to the members that there are now, and waits until they are gone.

    Twice: a process that was just being made while the first list was taken is in the second.
    """
    for _ in range(2):
        family = members()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=wait_s)


def session(child: Child) -> list[psutil.Process]:
    """Living processes in the session of a child, also after the child itself has ended."""
    found = []
    for process in descendants():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == child.pid:
                found.append(process)
    return found


def reap(children: Sequence[Child]) -> None:
    """Collects orphans that became ours; the children themselves are collected by their watchers."""
    watched = {child.pid for child in children}
    for process in psutil.Process().children():
        if process.pid in watched:
            continue
        with suppress(ChildProcessError, psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
