"""The buffer: what a put and a take cost, a new version over thousands held, and a take by task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from sao import _core
from sao.embed.buffer import TrajectoryBuffer
from sao.measure import workloads
from sao.measure.measure import Row, row, times_us
from sao.trajectory import encode


def buffer(quick: bool) -> Iterator[Row]:
    """Rows of all measurements of this module."""
    for n in (1_000, 10_000, 32_768) if quick else (1_000, 10_000, 32_768, 200_000):
        yield from _put_and_take(n, 0.3 if quick else 1.0)
    for held in (256, 2_048, 16_384):
        yield from _retire_and_take(held, held // 128, 20 if quick else 200)
    yield from _retire_and_take(16_384, 8, 20 if quick else 100)
    for held in (2_048, 16_384, 50_000):
        yield from _take_by_task(held, 20 if quick else 200)


def _put_and_take(n: int, budget_s: float) -> Iterator[Row]:
    trajectory = workloads.trajectory(n)
    header, payload = encode(trajectory)
    bytes_, size = len(header) + len(payload), f"{n} tokens"
    raw = _core.Buffer(64, 1 << 30)
    put_us, take_us = [], []

    def once() -> None:
        begin = time.perf_counter_ns()
        raw.put(header, payload, min_version=0)
        middle = time.perf_counter_ns()
        [lease] = raw.take(1)
        end = time.perf_counter_ns()
        put_us.append((middle - begin) / 1e3)
        take_us.append((end - middle) / 1e3)
        lease.commit()

    times_us(once, budget_s)
    copy = times_us(lambda: bytearray(payload), budget_s / 2)
    yield row("copy of the payload", size, "bytearray", copy, bytes_, "B")
    yield row("put, encoded", size, "sao", np.array(put_us[2:]), bytes_, "B", "one copy")
    yield row("take, encoded", size, "sao", np.array(take_us[2:]), 1, "take", "no copy")
    whole = TrajectoryBuffer(64, 1 << 30)
    put_us.clear()
    take_us.clear()

    def both() -> None:
        begin = time.perf_counter_ns()
        whole.put(trajectory)
        middle = time.perf_counter_ns()
        [held] = whole.take(1)
        end = time.perf_counter_ns()
        put_us.append((middle - begin) / 1e3)
        take_us.append((end - middle) / 1e3)
        held.commit()

    times_us(both, budget_s)
    copy_us = float(np.median(copy))
    for what, times, copies in (("put a Trajectory", put_us, 1), ("take a Trajectory", take_us, 0)):
        durations = np.array(times[2:])
        beyond = float(np.median(durations)) - copies * copy_us
        yield row(what, size, "sao", durations, 1, "trajectory", f"{beyond:.1f} us beyond {copies} copy; checks all")


def _retire_and_take(held: int, versions: int, repetitions: int) -> Iterator[Row]:
    """A step of a learner: the oldest of `versions` goes, 64 are taken; then the buffer is filled again."""
    core = _core.Buffer(held, 1 << 30)
    header, payload = b"h" * 300, b"p" * 700
    durations, retired, puts = [], [], []
    for i in range(held):
        core.put(header, payload, min_version=i * versions // held)
    for version in range(1, repetitions + 1):
        begin = time.perf_counter_ns()
        retired.append(core.retire(version + versions - 1, version))
        leases = core.take(64)
        durations.append((time.perf_counter_ns() - begin) / 1e3)
        for lease in leases:
            lease.commit()
        for _ in range(held - len(core)):
            begin = time.perf_counter_ns()
            core.put(header, payload, min_version=version + versions - 1)
            puts.append((time.perf_counter_ns() - begin) / 1e3)
    size, count = f"{held} held, {versions} versions", int(np.median(retired))
    note = f"{count} retired, {min(count, 64)} of them freed"
    yield row("retire a version + take 64", size, "sao", np.array(durations), 1, "step", note)
    if count > 64:
        note = "the first half of them frees 2 of what was retired each"
        yield row("the puts after it", size, "sao", np.array(puts), 1, "put", note)


def _take_by_task(held: int, repetitions: int) -> Iterator[Row]:
    """64 of all that is held: the first in order, those of the oldest tasks (a windowed FIFO), those of any tasks.

    They finish in another order than their tasks were started, over 8 versions. What was taken is replaced, outside of
    what is measured.
    """
    chance = np.random.default_rng(0)
    core = _core.Buffer(held + 64, 1 << 30)
    header, payload = b"h" * 300, b"p" * 700
    live: list[int] = chance.permutation(held).tolist()
    for task in live:
        core.put(header, payload, min_version=task * 8 // held, task=task)
    live.sort()

    def measured(asked: list[int] | None) -> float:
        begin = time.perf_counter_ns()
        leases = core.take(64) if asked is None else core.take_tasks(asked)
        took = (time.perf_counter_ns() - begin) / 1e3
        gone = {lease.task for lease in leases}
        for lease in leases:
            lease.commit()
        live[:] = [task for task in live if task not in gone] + [live[-1] + 1 + i for i in range(64)]
        for task in live[-64:]:
            core.put(header, payload, min_version=task * 8 // held, task=task)
        return took

    takes: dict[str, Callable[[], list[int] | None]] = {
        "take 64": lambda: None,
        "take 64 of the oldest tasks": lambda: live[:64],
        "take 64 of any tasks": lambda: chance.choice(live, 64, replace=False).tolist(),
    }
    for what, choose in takes.items():
        durations = np.array([measured(choose()) for _ in range(repetitions)])
        yield row(what, f"{held} held", "sao", durations, 1, "take", "" if what == "take 64" else "looks at every key")
