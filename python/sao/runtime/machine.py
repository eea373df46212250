"""The machine as this process may use it: CPUs and memory within the limits of its control groups.

A container sees the host's CPUs and memory; what it may use of them is said by control groups, of version 1 or 2,
each of them and all above it.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

PROCESS = Path("/proc/self")
_USUAL = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # control groups 1 say a huge number instead


def cpus() -> int:
    """CPUs that this process may use: those it may run on, no more than its quota of time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [usable]
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            if float(quota) > 0:  # `max` is no number, -1 no limit
                quotas.append(max(1, math.ceil(float(quota) / float(period))))
    return min(quotas)


def memory_limit() -> int | None:
    """Bytes that the processes of this container may have together; None where nothing limits them."""
    limits = []
    for folder in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int(_read(folder / name)))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def memory() -> tuple[int, int]:
    """Bytes that are free and bytes in all, within the limit."""
    host, limit = psutil.virtual_memory(), memory_limit()
    if limit is None or limit >= host.total:
        return host.available, host.total
    used = 0
    for folder in _groups("memory"):
        for name in ("memory.current", "memory.usage_in_bytes"):
            with suppress(OSError, ValueError):
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                used = used or int(_read(folder / name)) - int(stat.get("inactive_file", 0))  # files that may go
    return min(host.available, max(0, limit - used)), limit


def killed_for_memory() -> int:
    """How often the kernel has ended a process of this container because its memory was used up."""
    for folder in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                lines = dict(line.split() for line in _read(folder / name).splitlines())
                return int(lines.get("oom_kill", 0))
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process for a controller, from its own upwards, as far as they are seen."""
    try:
        mounts = _read_mounts()
        lines = [line.split(":", 2) for line in (PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        for root, mounted, named in mounts:
            if (
                named is None
                if controllers == ""
                else controller in controllers.split(",") and controller in (named or ())
            ):
                below = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/")) else ""
                folder = mounted / below.strip("/")
                if not folder.is_dir():  # a container that sees its own group as the root
                    folder = mounted
                yield folder
                while folder != mounted:
                    folder = folder.parent
                    yield folder


def _read_mounts() -> list[tuple[str, Path, tuple[str, ...] | None]]:
    """(group at its root, where, controllers or None for version 2) of every hierarchy that is mounted."""
    found: list[tuple[str, Path, tuple[str, ...] | None]] = []
    for line in (PROCESS / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            found.append((fields[3], Path(fields[4]), tuple(options.split(",")) if kind == "cgroup" else None))
    if not found and (_USUAL / "cgroup.controllers").exists():  # bound into a container, and no mount of that kind
        found.append(("/", _USUAL, None))
    return found
