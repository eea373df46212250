"""Processes that cannot outlive the one that started them.

Run as a script, `parent_death.py PARENT_PID SIGNAL COMMAND...` arms the kernel's parent-death signal, which survives
`exec`, and becomes the command (Linux). The script imports nothing of the package and costs some milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1


def under_parent(argv: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """The command `argv` so that it gets signal `number` when this process ends; it is looked up in PATH.

    Start it from the main thread: the signal follows the thread. SIGTERM lets a launcher such as torchrun end its own
    workers, which a SIGKILL would orphan.
    """
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(int(number)), *argv]


def heeded(*numbers: int) -> list[int]:
    """Those of the signals that this process was not started to ignore: what `nohup` has set stays."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def watch(pid: int, on_death: Callable[[], None]) -> None:
    """Calls `on_death` on a thread of its own when process `pid` has ended, at once if it is gone already.

    For a process that something else starts; unlike the parent-death signal it does not depend on the starting thread.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        on_death()
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)

    def wait() -> None:
        poller.poll()
        on_death()

    threading.Thread(target=wait, name="parent-death", daemon=True).start()


def main() -> None:
    """Arms the parent-death signal and replaces this process by the command."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the signal was armed
        sys.exit(f"parent {parent} is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
