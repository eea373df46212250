"""The parts of the core and the weights' files, each at several sizes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.algorithms.advantage import advantages
from sao.embed.buffer import TrajectoryBuffer
from sao.measure import workloads
from sao.measure.measure import Row, row, times_us
from sao.trajectory import decode, encode

RANKS = 8  # of a plan
LENGTHS = (("agentic", workloads.agentic_lengths, 200_000), ("reasoning", workloads.reasoning_lengths, 32_768))


def buffer(quick: bool) -> Iterator[Row]:
    """What a put and a take cost, a new version over thousands held, and a take by task."""
    for n in (1_000, 10_000, 32_768) if quick else (1_000, 10_000, 32_768, 200_000):
        trajectory, budget_s = workloads.trajectory(n), 0.3 if quick else 1.0
        header, payload = encode(trajectory)
        raw, whole = _core.Buffer(64, 1 << 30), TrajectoryBuffer(64, 1 << 30)
        copied = times_us(lambda p=payload: bytearray(p), budget_s / 2)  # type: ignore[misc]
        size, n_bytes = f"{n} tokens", len(header) + len(payload)
        yield row("copy of the payload", size, "bytearray", copied, n_bytes, "B")
        put_us, take_us = _put_and_take(lambda b=raw, h=header, p=payload: b.put(h, p, min_version=0), raw, budget_s)  # type: ignore[misc]
        yield row("put, encoded", size, "sao", put_us, n_bytes, "B", "one copy")
        yield row("take, encoded", size, "sao", take_us, 1, "take", "no copy")
        put_us, take_us = _put_and_take(lambda b=whole, t=trajectory: b.put(t), whole, budget_s)  # type: ignore[misc]
        beyond = float(np.median(put_us) - np.median(copied))
        yield row(
            "put a Trajectory", size, "sao", put_us, 1, "trajectory", f"{beyond:.1f} us beyond 1 copy; checks all"
        )
        yield row("take a Trajectory", size, "sao", take_us, 1, "trajectory")
    for held, versions in ((256, 2), (2_048, 16), (16_384, 128), (16_384, 8)):
        yield _retire_and_take(held, versions, 20 if quick else 200)
    for held in (2_048, 16_384, 50_000):
        yield from _take_by_task(held, 20 if quick else 200)


def _put_and_take(put: Callable[[], Any], buffer: Any, budget_s: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Durations of both, microseconds."""
    put_us, take_us = [], []

    def once() -> None:
        begin = time.perf_counter_ns()
        put()
        middle = time.perf_counter_ns()
        [held] = buffer.take(1)
        take_us.append((time.perf_counter_ns() - middle) / 1e3)
        put_us.append((middle - begin) / 1e3)
        held.commit()

    times_us(once, budget_s)
    return np.array(put_us[2:]), np.array(take_us[2:])


def _retire_and_take(held: int, versions: int, repetitions: int) -> Row:
    """A step of a learner: the oldest of `versions` goes, 64 are taken; then the buffer is filled again."""
    core = _core.Buffer(held, 1 << 30)
    header, payload = b"h" * 300, b"p" * 700
    durations, retired = [], []
    for i in range(held):
        core.put(header, payload, min_version=i * versions // held)
    for version in range(1, repetitions + 1):
        begin = time.perf_counter_ns()
        retired.append(len(core.advance(version + versions - 1, version)))
        leases = core.take(64)
        durations.append((time.perf_counter_ns() - begin) / 1e3)
        for lease in leases:
            lease.commit()
        for _ in range(held - len(core)):
            core.put(header, payload, min_version=version + versions - 1)
    note = f"{int(np.median(retired))} retired"
    return row(
        "retire a version + take 64", f"{held} held, {versions} versions", "sao", np.array(durations), 1, "step", note
    )


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
        leases = core.take(64 if asked is None else asked)
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


def wire(quick: bool) -> Iterator[Row]:
    """`sao.encode` and `sao.decode`, checksums and all rules checked."""
    for n in (1_000, 32_768) if quick else (1_000, 32_768, 200_000):
        trajectory, size, budget_s = workloads.trajectory(n), f"{n} tokens", 0.2 if quick else 1.0
        header, payload = encode(trajectory)
        n_bytes = len(header) + len(payload)
        encode_us = times_us(lambda t=trajectory: encode(t), budget_s)  # type: ignore[misc]
        decode_us = times_us(lambda h=header, p=payload: decode(h, p), budget_s)  # type: ignore[misc]
        yield row("encode", size, "sao", encode_us, n_bytes, "B", f"{n_bytes / n:.2f} bytes a token")
        yield row("decode", size, "sao", decode_us, n_bytes, "B", "checksums and every rule")


def pack(quick: bool) -> Iterator[Row]:
    """`sao.pack` and `sao.plan`."""
    budget_s = 0.2 if quick else 1.0
    for name, lengths_of, capacity in LENGTHS:
        for n in (512, 8_192) if quick else (512, 8_192, 131_072):
            lengths = lengths_of(n)
            durations = times_us(lambda x=lengths, c=capacity: _core.pack(x, c), budget_s)  # type: ignore[misc]
            bins = len(_core.pack(lengths, capacity)[1]) - 1
            note = f"{bins} bins, at least {-(-int(lengths.sum()) // capacity)}"
            yield row("pack", f"{n} {name}", "sao", durations, n, "segment", note)
    for name, lengths_of, capacity in LENGTHS:
        for n in (512, 8_192):
            lengths = lengths_of(n)
            durations = times_us(lambda x=lengths, c=capacity: _core.plan(x, RANKS, c, 1), budget_s)  # type: ignore[misc]
            heaviest, lock_step = evenness(_core.plan(lengths, RANKS, capacity, 1).costs)
            note = f"heaviest rank {heaviest:.4f} of the mean, lock-step {lock_step:.4f}"
            yield row(f"plan for {RANKS} ranks", f"{n} {name}", "sao", durations, n, "segment", note)


def evenness(costs: NDArray[np.float64]) -> tuple[float, float]:
    """Of a plan's costs [ranks, micro-batches]: the heaviest rank as a multiple of the mean, and the time in lock step
    (each micro-batch takes as long as its slowest rank) as a multiple of a perfect split.
    """
    total = costs.sum(axis=1)
    return float(total.max() / total.mean()), float(len(costs) * costs.max(axis=0).sum() / costs.sum())


def advantage(quick: bool) -> Iterator[Row]:
    """`sao.advantages`: small, dense and ragged multi-turn batches; one segment and four."""
    rng = np.random.default_rng(0)
    shapes = {
        "16 x 1024, multi-turn": (np.full(16, 1024), True),
        "64 x 4096, all actions": (np.full(64, 4096), False),
        "64 ragged to 64k, multi-turn": (np.clip(workloads.agentic_lengths(64, 2000), 256, 65_536), True),
        "512 ragged to 64k, multi-turn": (np.clip(workloads.agentic_lengths(512, 2000), 256, 65_536), True),
    }
    settings: dict[str, Any] = {"gamma": 0.999, "lambda_policy": 0.95, "cross_segment": "chained"}
    for size, (lengths, multi_turn) in shapes.items():
        masks = [workloads.turns(int(n), rng) if multi_turn else np.ones(int(n), np.bool_) for n in lengths]
        mask, cuts = np.concatenate(masks), np.concatenate([[0], np.cumsum(lengths)])
        values, rewards = rng.standard_normal(len(mask)).astype(np.float32), rng.standard_normal(len(lengths))
        for segments in (1, 4):
            inner = cuts[:-1, None] + np.diff(cuts)[:, None] * np.arange(segments) // segments
            batch = values, mask, np.append(inner.ravel(), cuts[-1]), np.arange(len(cuts)) * segments, rewards
            durations = times_us(lambda b=batch: advantages(*b, **settings), 0.2 if quick else 1.0)  # type: ignore[misc]
            yield row("advantages", size, f"sao, {segments} segments", durations, len(mask), "token")


def ledger(quick: bool) -> Iterator[Row]:
    """Records on disk, one `sync` for a group of them, and the recovery of a long file."""
    with tempfile.TemporaryDirectory(prefix="sao-bench-", dir=Path.cwd()) as folder:
        path, ordinal = str(Path(folder) / "appended"), 0
        with _core.Ledger(path) as book:
            for group in (64, 256, 1024):

                def append(group: int = group, book: _core.Ledger = book) -> None:
                    nonlocal ordinal
                    for _ in range(group):
                        book.issue(ordinal)
                        ordinal += 1
                    book.sync()

                durations = times_us(append, 0.3 if quick else 2.0)
                yield row("append, then sync", f"groups of {group}", "sao", durations, group, "record", "on this disk")
        path, records, step = str(Path(folder) / "long"), 0, 0
        for size in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
            with _core.Ledger(path) as book:
                while records < size:
                    ordinals = list(range(step * 8, step * 8 + 8))
                    for one in ordinals:
                        book.generating(one, book.issue(one))
                        book.ready(one, 0, 100)
                    book.lease(ordinals, step)
                    book.trained(step, step + 1, 800, 0)
                    step, records = step + 1, records + 26
            durations = times_us(lambda: _core.Ledger(path).close(), 0.1, at_least=3, warm=0)
            yield row("recover", f"{records} records", "sao", durations, records, "record")


def weights(quick: bool) -> Iterator[Row]:
    """Weights on their way to the generators: `publish` (hash, write, rename), `load` (map, verify every byte)."""
    import torch

    from sao.transport.weights import load, publish

    shared = Path("/dev/shm")
    for mebibytes in (4, 64) if quick else (4, 64, 512):
        tensors = {f"layer{i}": torch.randn(mebibytes << 14, dtype=torch.float32) for i in range(16)}
        folder = Path(tempfile.mkdtemp(prefix="sao-bench-", dir=shared if shared.is_dir() else None))
        try:
            version = iter(range(1, 1 << 20))
            n_bytes, size = mebibytes << 20, f"{mebibytes} MiB in 16 tensors"
            out = times_us(lambda t=tensors, f=folder, v=version: publish(t, f, next(v), keep=1), 1.0, 3)  # type: ignore[misc]
            yield row("publish", size, "sao", out, n_bytes, "B")
            ref = publish(tensors, folder, next(version))
            yield row("load", size, "sao", times_us(lambda r=ref: load(r), 1.0, 3), n_bytes, "B", "verified")  # type: ignore[misc]
        finally:
            shutil.rmtree(folder)
