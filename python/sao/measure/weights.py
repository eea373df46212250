"""Weights on their way to the generators: published as a file in shared memory, loaded and verified."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from sao.measure.measure import Row, row, times_us
from sao.transport.weights import load, publish


def weights(quick: bool) -> Iterator[Row]:
    """`publish` (hash, write, rename) and `load` (map, verify every byte)."""
    shared = Path("/dev/shm")
    for mebibytes in (4, 64) if quick else (4, 64, 512):
        tensors = {f"layer{i}": torch.randn(mebibytes << 14, dtype=torch.float32) for i in range(16)}
        folder = Path(tempfile.mkdtemp(prefix="sao-bench-", dir=shared if shared.is_dir() else None))
        try:
            version = iter(range(1, 1 << 20))
            bytes_, size = mebibytes << 20, f"{mebibytes} MiB in 16 tensors"
            out = times_us(lambda t=tensors, f=folder, v=version: publish(t, f, next(v), keep=1), 1.0, 3)  # type: ignore[misc]
            yield row("publish", size, "sao", out, bytes_, "B")
            ref = publish(tensors, folder, next(version))
            yield row("load", size, "sao", times_us(lambda r=ref: load(r), 1.0, 3), bytes_, "B", "verified")  # type: ignore[misc]
        finally:
            shutil.rmtree(folder)
