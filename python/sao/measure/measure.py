"""Repeated calls, their percentiles, and the machine they ran on."""

import gc
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

PACKAGES = ["sao", "numpy", "torch", "numba", "pyzmq", "msgspec", "seqpacker", "lightbinpack", "faster-fifo", "ray"]


@dataclass(frozen=True)
class Row:
    """One line of a table: how long a call takes, and how much of `unit` it does.

    `amount` is in units a call (tokens, bytes, records); times are in microseconds.
    """

    what: str
    size: str
    how: str
    p50_us: float
    p99_us: float
    max_us: float
    amount: float = 0.0
    unit: str = ""
    note: str = ""

    @property
    def per_s(self) -> float:
        """Units a second at the median."""
        return self.amount / self.p50_us * 1e6 if self.amount else 0.0


def times_us(call: Callable[[], Any], budget_s: float = 1.0, at_least: int = 5, at_most: int = 5000) -> np.ndarray:
    """Durations of repeated calls in microseconds, float64[n]; without garbage collection between them.

    Two calls more are made first, and not counted.
    """
    for _ in range(2):
        call()
    durations: list[int] = []
    gc.disable()
    try:
        end = time.perf_counter() + budget_s
        while len(durations) < at_least or (len(durations) < at_most and time.perf_counter() < end):
            begin = time.perf_counter_ns()
            result = call()
            durations.append(time.perf_counter_ns() - begin)
            del result
    finally:
        gc.enable()
    return np.array(durations) / 1e3


def row(
    what: str, size: str, how: str, durations_us: np.ndarray, amount: float = 0.0, unit: str = "", note: str = ""
) -> Row:
    """The row of these durations."""
    p50, p99 = np.percentile(durations_us, [50, 99])
    return Row(what, size, how, float(p50), float(p99), float(durations_us.max()), amount, unit, note)


def machine() -> dict[str, Any]:
    """Processor, cores, memory, load and versions, so that a number can be read later."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **found,
    }
