"""Bytes: encoding and decoding of trajectories, and the ledger's durable records and recovery."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sao import _core
from sao.measure import workloads
from sao.measure.measure import Row, row, times_us
from sao.trajectory import decode, encode

GROUPS = (64, 256, 1024)


def wire(quick: bool) -> Iterator[Row]:
    """`sao.encode` and `sao.decode`, checksums and all rules checked."""
    for n in (1_000, 32_768) if quick else (1_000, 32_768, 200_000):
        trajectory = workloads.trajectory(n)
        header, payload = encode(trajectory)
        bytes_, size = len(header) + len(payload), f"{n} tokens"
        budget_s = 0.2 if quick else 1.0
        note = f"{bytes_ / n:.2f} bytes a token"
        encode_us = times_us(lambda t=trajectory: encode(t), budget_s)  # type: ignore[misc]
        decode_us = times_us(lambda h=header, p=payload: decode(h, p), budget_s)  # type: ignore[misc]
        yield row("encode", size, "sao", encode_us, bytes_, "B", note)
        yield row("decode", size, "sao", decode_us, bytes_, "B", "checksums and every rule")


def ledger(quick: bool) -> Iterator[Row]:
    """Records on disk, one `sync` for a group of them, and the recovery of a long file."""
    with tempfile.TemporaryDirectory(prefix="sao-bench-", dir=Path.cwd()) as folder:
        path = Path(folder) / "ledger.log"
        book, ordinal = _core.Ledger(str(path)), 0

        for group in GROUPS:

            def append(group: int = group) -> None:
                nonlocal ordinal
                for _ in range(group):
                    book.issue(ordinal)
                    ordinal += 1
                book.sync()

            durations = times_us(append, 0.3 if quick else 2.0)
            yield row("append, then sync", f"groups of {group}", "sao", durations, group, "record", "on this disk")
        book.close()
        path.unlink()
        records = 0
        book = _core.Ledger(str(path))
        step = 0
        for size in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
            while records < size:
                ordinals = list(range(step * 8, step * 8 + 8))
                for one in ordinals:
                    attempt = book.issue(one)
                    book.generating(one, attempt)
                    book.ready(one, attempt, 100)
                book.lease(ordinals, step)
                step += 1
                book.trained(step - 1, step, 800, 0)
                records += 26
            book.close()
            durations = times_us(lambda: _core.Ledger(str(path)).close(), 0.1, at_least=3, warm=0)
            yield row("recover", f"{records} records", "sao", np.array(durations), records, "record")
            book = _core.Ledger(str(path))
        book.close()
