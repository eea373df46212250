"""Runs a command that cannot outlive the process that started it: `under_parent.py PARENT_PID COMMAND...` (Linux).

The kernel's parent-death signal survives `exec`, so this file sets it and becomes the command. It is run as a plain
script (`python -IS`), imports nothing of the package and costs some milliseconds. The signal is SIGTERM: a launcher
such as torchrun then ends its own workers too, which a SIGKILL would orphan.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arms the parent-death signal and replaces this process by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the signal was armed
        sys.exit(f"parent {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
