"""What the tests of the buffer share."""

from __future__ import annotations

from typing import Any

from sao import _core


def put(buffer: _core.Buffer, number: int, size: int = 8, version: int = 0, timeout_s: float | None = 0.0) -> Any:
    return buffer.put(b"%d" % number, bytes(size), min_version=version, timeout_s=timeout_s, task=number)


def numbers(leases: list[_core.Lease]) -> list[int]:
    return [int(bytes(lease.header)) for lease in leases]


def conserved(buffer: _core.Buffer) -> bool:
    s = buffer.stats()
    return s["received"] == s["trajectories"] + s["leased"] + s["committed"] + sum(s["dropped"].values())
