"""A process that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from sao.errors import TransportError

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send `signal_number` to this process when its parent ends (Linux; elsewhere the broker's
    silence ends an actor). `parent_pid` is the parent that the caller knows: `TransportError` when it is gone
    already.

    The kernel watches the parent's *thread* that made this process: start actors from a thread that lives as long as
    they.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise TransportError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise TransportError(f"parent process {parent_pid} is gone, this process has parent {os.getppid()}")
