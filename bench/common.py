"""What the benchmarks share: timing, the machine's description, tables and result files."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def seconds(call: Callable[[], Any], budget_s: float = 1.0, at_least: int = 3) -> list[float]:
    """Durations of repeated calls after one warm-up: at least `at_least`, then as many as fit into `budget_s`."""
    call()
    durations: list[float] = []
    gc.disable()
    try:
        end = time.perf_counter() + budget_s
        while len(durations) < at_least or (time.perf_counter() < end and len(durations) < 10_000):
            begin = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begin)
    finally:
        gc.enable()
    return sorted(durations)


def median(durations: list[float]) -> float:
    return durations[len(durations) // 2]


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions, so that a number can be read later."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    found = {}
    for name in ("numpy", "numba", "torch", "sao"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **found,
    }


def report(name: str, columns: list[str], rows: list[list[Any]], note: str = "") -> None:
    """Prints a table and writes it with the machine's description to results/<name>.json."""
    text = [[cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *text, strict=True)]
    for line in ([*columns], ["-" * width for width in widths], *text):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    described = machine()
    print("\n" + ", ".join(f"{key} {value}" for key, value in described.items()))
    if note:
        print(note)
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": described, "note": note, "columns": columns, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1, default=float) + "\n")


def agentic_lengths(n: int, seed: int, low: int = 10, high: int = 200_000) -> np.ndarray:
    """Heavy-tailed segment lengths: half around 800 tokens, a third around 6000, the rest around 40,000."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    mean = np.where(u < 0.50, np.log(800.0), np.where(u < 0.85, np.log(6000.0), np.log(40000.0)))
    spread = np.where(u < 0.85, 1.0, 0.8)
    return np.clip(np.exp(mean + spread * rng.standard_normal(n)), low, high).astype(np.int64)


def reasoning_lengths(n: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths around 8000 tokens, at most 32,768."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(np.log(8000.0) + 0.8 * rng.standard_normal(n)), 10, 32768).astype(np.int64)
