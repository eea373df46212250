"""Child processes of a run: started in their own session, watched, and ended with everything that they started."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil

from sao.runtime import machine
from sao.storage.parent_death import heeded, under_parent

PR_SET_CHILD_SUBREAPER = 36
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Command:
    """The command of one actor: its role, its name, the argument vector and the variables set on top of ours."""

    role: str
    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    handles: tuple[int, ...] = ()  # open files that it inherits
    orphaned: signal.Signals = signal.SIGTERM  # what it gets when we end


class Child(subprocess.Popen[bytes]):
    """A running process; started by `Family.start`. Its id is also that of its session and process group."""

    def __init__(self, command: Command, log: Path | None, on_exit: Callable[[Self], None]) -> None:
        self.command, self._log, self._log_start_bytes, self._unwritten = command, log, 0, ""
        self._killed_before = machine.killed_for_memory()
        with self._output() as output:
            if output and not isinstance(output, int):
                self._log_start_bytes = output.tell()
            super().__init__(
                under_parent(command.argv, command.orphaned),
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                pass_fds=command.handles,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only, which ends all in order
            )
        threading.Thread(target=self._watch, args=(on_exit,), daemon=True).start()

    def _output(self) -> AbstractContextManager[Any]:
        """Where the process writes: its log, ours without one, and nowhere where its log cannot be opened."""
        try:
            return self._log.open("ab") if self._log else nullcontext()
        except OSError as error:
            self._log, self._unwritten = None, f"({self._log} cannot be written: {error.strerror})"
            return nullcontext(subprocess.DEVNULL)

    def _watch(self, on_exit: Callable[[Self], None]) -> None:
        self.wait()
        on_exit(self)

    @property
    def how_it_ended(self) -> str:
        """`exit code 3` or `killed by SIGKILL`, with the reason where the kernel had one."""
        code: int = self.returncode
        if code >= 0:
            return f"exit code {code}"
        killed = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and machine.killed_for_memory() > self._killed_before:
            return f"{killed}: the memory of this container, {(machine.memory_limit() or 0) / 1e6:.0f} MB, was used up"
        return killed

    @property
    def cpu_s(self) -> float:
        """CPU time of it and of what it started, seconds; 0 when it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
        return 0.0

    def last_lines(self, count: int = 15, at_most_bytes: int = 16384) -> str:
        """The last lines that this process wrote (not an earlier one with the same log)."""
        if self._log is None:
            return self._unwritten
        with self._log.open("rb") as file:
            end_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start_bytes, end_bytes - at_most_bytes))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-count:])

    def kill_session(self) -> None:
        """SIGKILL to all processes in its session, also after it has ended itself."""
        _kill(lambda: [process for process in _descendants() if self._leads(process)])

    def _leads(self, process: psutil.Process) -> bool:
        with suppress(ProcessLookupError):
            return os.getsid(process.pid) == self.pid
        return False


class Family:
    """Every process that comes to be within this context: at its end all that are left are killed, orphans too.

    Use it from the main thread only: the parent-death signal follows the thread.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        if sys.platform == "linux":  # orphans of our descendants become our own children: none can slip away
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = set(_descendants())
        return self

    def start(
        self, command: Command, log: Path | None = None, on_exit: Callable[[Child], None] = lambda child: None
    ) -> Child:
        """Starts a command; its output is appended to `log`, or goes where ours does. `on_exit` is called once, on
        another thread. It dies with this process.
        """
        self._children.append(Child(command, log, on_exit))
        return self._children[-1]

    def reap(self) -> None:
        """Collects orphans of our descendants that have ended; children are collected by their watchers. They come to
        us, as they would to process 1 of a container, and would stay as zombies.
        """
        watched = {child.pid for child in self._children}
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in watched:
                    return  # its watcher is about to; the next time
                os.waitpid(found.si_pid, os.WNOHANG)

    def terminate(self) -> None:
        """SIGTERM to the children that still run."""
        for child in self._children:
            child.terminate()

    def __exit__(self, *_: object) -> None:
        _kill(lambda: [process for process in _descendants() if process not in self._others])
        watched = {child.pid for child in self._children}
        for process in psutil.Process().children():  # orphans that became ours; children are collected by watchers
            with suppress(ChildProcessError, psutil.NoSuchProcess):
                if process.pid not in watched and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], *more: int) -> Iterator[None]:
    """Within it the signals that end a process, and `more`, go to `handler`; before and after, where they went before.

    One that this process was started to ignore stays ignored. Use it from the main thread only.
    """
    before = {number: signal.signal(number, handler) for number in heeded(*ENDINGS, *more)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _descendants() -> list[psutil.Process]:
    """All living descendants of this process, zombies left out."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _kill(members: Callable[[], Sequence[psutil.Process]], wait_s: float = 5.0) -> None:
    """SIGKILL to the members that there are now, and waits until they are gone.

    Twice: a process that was just being made while the first list was taken is in the second.
    """
    for _ in range(2):
        family = members()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=wait_s)
