"""The sinks of records: one machine-readable file, TensorBoard, Weights & Biases.

A record is a flat dict with `kind` (`run`, `resume`, `step`, `eval`, `event`, `end`) and `time_s` (Unix time); numbers
are numbers, and what is not finite or not known is null. `docs/reference/metrics.md` lists the names.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class Sink(Protocol):
    """Takes records in the order in which they happened."""

    def write(self, record: Record) -> None:
        """Takes one record; never raises for what the record holds."""

    def close(self) -> None:
        """Writes what is still held back."""


def record(kind: str, fields: Mapping[str, Any]) -> Record:
    """A record of now. What JSON cannot hold (NaN, infinity) becomes null; nested maps are flattened with `/`."""
    flat: Record = {"kind": kind, "time_s": round(time.time(), 3)}
    _flatten(flat, "", fields)
    return flat


def _flatten(flat: Record, prefix: str, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            _flatten(flat, f"{prefix}{key}/", value)
        else:
            flat[f"{prefix}{key}"] = None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, on disk after each line, so that a killed run has all but the last."""

    def __init__(self, path: Path) -> None:
        """Opens the file to go on at its end; a last line that was cut off by a kill is removed."""
        if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        """Appends one line."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard, one scalar a number; the step is the optimizer step. Imports no torch."""

    def __init__(self, folder: Path) -> None:
        """Raises `ImportError` where tensorboard is not installed."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, record: Record) -> None:
        """Adds the numbers of step and eval records; others are left out."""
        if numbers := scalars(record):
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=record["time_s"], step=record["step"], summary=summary))

    def close(self) -> None:
        """Flushes the event file."""
        self._writer.close()


class WandB:
    """Weights & Biases, for those who ask for it (`telemetry.wandb = true`)."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        """Raises `ImportError` where wandb is not installed."""
        import wandb

        self._run = wandb.init(project="sao", name=name, config=dict(config), dir=str(folder))

    def write(self, record: Record) -> None:
        """Logs the numbers of step and eval records."""
        if numbers := scalars(record):
            self._run.log(numbers | {"step": record["step"]})

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a step or eval record as `KIND/NAME`; none of other records."""
    if record["kind"] not in ("step", "eval") or not isinstance(record.get("step"), int):
        return {}
    skipped = ("kind", "time_s", "step")
    return {
        f"{record['kind']}/{key}": float(value)
        for key, value in record.items()
        if key not in skipped and isinstance(value, int | float)
    }


def read(path: Path) -> list[Record]:
    """Reads `metrics.jsonl`; a last line that was cut off by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def surviving(records: Sequence[Record]) -> list[Record]:
    """The records without what was lost: a run that was resumed after step S has made the steps after S again."""
    kept: list[Record] = []
    for happened in records:
        if happened["kind"] == "resume":
            kept = [r for r in kept if r["kind"] not in ("step", "eval") or r["step"] <= happened["step"]]
        kept.append(happened)
    return kept
