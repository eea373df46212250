"""The parts of the core and the weights' files, each at several sizes."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao import _core
from sao.algorithms.advantage import advantages
from sao.embed.buffer import TrajectoryBuffer
from sao.measure import workloads
from sao.measure.measure import Row, row, times_us
from sao.storage.ownership import own
from sao.trajectory import decode, encode

RANKS, CAPACITY = 8, 200_000  # of a plan; of a bin or row, in tokens


def buffer(quick: bool) -> Iterator[Row]:
    """A put and a take, of encoded trajectories and of whole ones."""
    for n in (1_000, 10_000, 32_768) if quick else (1_000, 10_000, 32_768, 200_000):
        trajectory, budget_s, size = workloads.trajectory(n), 0.3 if quick else 1.0, f"{n} tokens"
        header, payload = encode(trajectory)
        n_bytes = len(header) + len(payload)
        copied = times_us(partial(bytearray, payload), budget_s / 2)
        yield row("copy of the payload", size, "bytearray", copied, n_bytes, "B")
        raw, whole = _core.Buffer(64, 1 << 30), TrajectoryBuffer(64, 1 << 30)
        put_us, take_us = _put_and_take(partial(raw.put, header, payload, min_version=0), raw, budget_s)
        yield row("put, encoded", size, "sao", put_us, n_bytes, "B", "one copy")
        yield row("take, encoded", size, "sao", take_us, 1, "take", "no copy")
        put_us, take_us = _put_and_take(partial(whole.put, trajectory), whole, budget_s)
        note = f"{np.median(put_us) - np.median(copied):.1f} us beyond 1 copy; checks all"
        yield row("put a Trajectory", size, "sao", put_us, 1, "trajectory", note)
        yield row("take a Trajectory", size, "sao", take_us, 1, "trajectory")


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


def wire(quick: bool) -> Iterator[Row]:
    """`sao.encode` and `sao.decode`, checksums and all rules checked."""
    for n in (1_000, 32_768) if quick else (1_000, 32_768, 200_000):
        trajectory, size, budget_s = workloads.trajectory(n), f"{n} tokens", 0.2 if quick else 1.0
        header, payload = encode(trajectory)
        n_bytes = len(header) + len(payload)
        encode_us = times_us(partial(encode, trajectory), budget_s)
        decode_us = times_us(partial(decode, header, payload), budget_s)
        yield row("encode", size, "sao", encode_us, n_bytes, "B", f"{n_bytes / n:.2f} bytes a token")
        yield row("decode", size, "sao", decode_us, n_bytes, "B", "checksums and every rule")


def pack(quick: bool) -> Iterator[Row]:
    """`sao.pack` and `sao.plan`."""
    for n in (512, 8_192) if quick else (512, 8_192, 131_072):
        lengths, size, budget_s = workloads.agentic_lengths(n), f"{n} agentic", 0.2 if quick else 1.0
        durations = times_us(partial(_core.pack, lengths, CAPACITY), budget_s)
        note = f"{len(_core.pack(lengths, CAPACITY)[1]) - 1} bins, at least {-(-int(lengths.sum()) // CAPACITY)}"
        yield row("pack", size, "sao", durations, n, "segment", note)
        durations = times_us(partial(_core.plan, lengths, RANKS, CAPACITY, 1), budget_s)
        yield row(f"plan for {RANKS} ranks", size, "sao", durations, n, "segment")


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
            durations = times_us(partial(advantages, *batch, **settings), 0.2 if quick else 1.0)
            yield row("advantages", size, f"sao, {segments} segments", durations, len(mask), "token")


def weights(quick: bool) -> Iterator[Row]:
    """Weights on their way to the generators: `publish` (hash, write, rename), `load` (map, verify every byte)."""
    import torch

    from sao.transport.weights import load, publish

    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for mebibytes in (4, 64) if quick else (4, 64, 512):
        tensors = {f"layer{i}": torch.randn(mebibytes << 14, dtype=torch.float32) for i in range(16)}
        n_bytes, size = mebibytes << 20, f"{mebibytes} MiB in 16 tensors"
        with tempfile.TemporaryDirectory(prefix="sao-bench-", dir=shared) as folder:
            own(Path(folder))  # so that it goes with the next start when this process is killed
            published = times_us(partial(publish, tensors, folder, 1), 1.0, 3)
            yield row("publish", size, "sao", published, n_bytes, "B")
            loaded = times_us(partial(load, publish(tensors, folder, 1)), 1.0, 3)
            yield row("load", size, "sao", loaded, n_bytes, "B", "verified")
