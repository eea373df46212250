"""The sinks of records: one machine-readable file, TensorBoard, Weights & Biases, Trackio, Prometheus.

Each takes records in the order in which they happened (`write`) and writes at last what it still holds back (`close`).

A record is a flat dict with `kind` (`run`, `resume`, `step`, `eval`, `event`, `end`) and `time_s` (Unix time); numbers
are numbers, and what is not finite or not known is null. `docs/reference/metrics.md` lists the names.
"""

import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from sao.errors import ConfigError

Record = dict[str, Any]
PROMETHEUS_HOST = "127.0.0.1"


def record(kind: str, fields: Mapping[str, Any]) -> Record:
    """A record of now. What JSON cannot hold (NaN, infinity) becomes null; nested maps are flattened with `/`."""
    return {"kind": kind, "time_s": round(time.time(), 3), **dict(_flat(fields))}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", None if isinstance(value, float) and not math.isfinite(value) else value


class Appended:
    """A file that grows by whole pieces: each is in it when `write` returns, or nothing of it and the fault is told."""

    def __init__(self, path: Path, whole: Callable[[bytes], int] = len) -> None:
        """Opens the file when there is something to write, to go on at its end: what is there already counts as far as
        `whole` says, in bytes.
        """
        self._path, self._whole = path, whole
        self._file: io.FileIO | None = None
        self._size = 0  # of whole pieces

    def write(self, piece: bytes) -> None:
        """Raises `OSError` with the path; what there may be of the piece is gone by the next one at the latest."""
        try:
            file = self._file or self._open()
            self._cut(file)
            try:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left) :]
            except OSError:
                self._cut(file)
                raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._size += len(piece)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _cut(self, file: io.FileIO) -> None:
        if file.seek(0, os.SEEK_END) > self._size:  # what a kill or a failed write has left
            file.truncate(self._size)

    def _open(self) -> io.FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(self._path, "ab+")
        file.seek(0)
        self._size = self._whole(file.readall())
        self._file = file
        return file


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, on disk after each line, so that a killed run has all but the last."""

    def __init__(self, path: Path) -> None:
        """A last line that was cut off by a kill is overwritten."""
        self._file = Appended(path, lambda data: data.rfind(b"\n") + 1)
        self.close = self._file.close

    def write(self, record: Record) -> None:
        """Appends one line. Raises `OSError`."""
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


class TensorBoard:
    """Event files for TensorBoard, one scalar a number; the step is the optimizer step. Imports no torch."""

    def __init__(self, folder: Path) -> None:
        """Raises `ImportError` where tensorboard is not installed."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # Its own writer of files buffers for minutes in a thread, and cannot be told to try again.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(folder / name)
        self._records, self._begun = RecordWriter(self._file), False
        self.close = self._file.close

    def write(self, record: Record) -> None:
        """Adds the numbers of step and eval records; others are left out. Raises `OSError`."""
        if numbers := scalars(record):
            if not self._begun:
                begins = self._event(wall_time=record["time_s"], file_version="brain.Event:2")
                self._records.write(begins.SerializeToString())
                self._begun = True
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            summary = self._summary(value=values)
            event = self._event(wall_time=record["time_s"], step=record["step"], summary=summary)
            self._records.write(event.SerializeToString())


class WandB:
    """Weights & Biases, for those who ask for it (`telemetry.wandb = true`)."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        """Goes on with the W&B run whose id lies in the folder. Raises what wandb raises when it cannot start."""
        import wandb

        known = folder / "wandb-id"
        before = {"id": known.read_text(encoding="utf-8"), "resume": "allow"} if known.exists() else {}
        self._run = wandb.init(project="sao", name=name, config=dict(config), dir=str(folder), **before)
        known.write_text(str(self._run.id), encoding="utf-8")
        self.close = self._run.finish

    def write(self, record: Record) -> None:
        """Logs the numbers of step and eval records."""
        if numbers := scalars(record):
            self._run.log(numbers | {"step": record["step"]})


class Trackio:
    """Hugging Face's Trackio, which keeps its data on this machine, for those who ask for it (`telemetry.trackio`)."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        """Goes on with the Trackio run whose name lies in the folder. Raises what trackio raises."""
        import trackio

        known = folder / "trackio-name"
        again = known.exists()
        with redirect_stdout(io.StringIO()):  # it prints where the live view is
            self._run = trackio.init(
                project="sao",
                name=known.read_text(encoding="utf-8") if again else f"{name}-{time.time():.0f}",
                config=dict(config),
                resume="must" if again else "never",
                embed=False,
            )
        known.write_text(str(self._run.name), encoding="utf-8")

    def write(self, record: Record) -> None:
        """Logs the numbers of step and eval records."""
        if numbers := scalars(record):
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Waits until all is written."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class Prometheus:
    """Serves the newest numbers at `http://127.0.0.1:PORT/metrics` while the run lasts.

    Every number of the newest step and of the newest evaluation is a gauge: `step/lag/mean` is `sao_step_lag_mean`; the
    steps themselves are `sao_step` and `sao_eval_step`. A number that the newest record lacks is not served.
    """

    def __init__(self, port: int) -> None:
        """Raises `ImportError` where prometheus_client is not installed, `ConfigError` when the port is taken."""
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily

        self._gauge = GaugeMetricFamily
        self._newest: dict[str, dict[str, float]] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=PROMETHEUS_HOST, registry=registry)
        except OSError as error:
            raise ConfigError(taken(port, error)) from None

    def write(self, record: Record) -> None:
        """Keeps the numbers of step and eval records in place of the last ones of their kind."""
        if numbers := scalars(record):
            kind = record["kind"]
            own_step = "sao_step" if kind == "step" else f"sao_{kind}_step"
            named = {f"sao_{re.sub('[^a-zA-Z0-9_]', '_', key)}": value for key, value in numbers.items()}
            self._newest = {**self._newest, kind: {own_step: float(record["step"]), **named}}

    def collect(self) -> Iterable[Any]:
        """The gauges of now, for prometheus_client; called from the server's threads."""
        for kind, numbers in self._newest.items():
            for name, value in numbers.items():
                yield self._gauge(name, f"of the newest {kind}; docs/reference/metrics.md", value=value)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


Sink = JsonLines | TensorBoard | WandB | Trackio | Prometheus


def taken(port: int, error: OSError) -> str:
    """The message for a port at which the numbers cannot be served."""
    return f"telemetry.prometheus_port: {port} on {PROMETHEUS_HOST} cannot be had: {error.strerror}"


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a step or eval record as `KIND/NAME`; none of other records."""
    kind = record["kind"]
    if kind not in ("step", "eval") or not isinstance(record.get("step"), int):
        return {}
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
    return {f"{kind}/{key}": float(value) for key, value in numbers.items() if key not in ("time_s", "step")}


def read(path: Path) -> list[Record]:
    """Reads `metrics.jsonl`; a line that is no record (cut off by a kill, by a full disk) is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "kind" in found and isinstance(found.get("time_s"), int | float):
                records.append(found)
    return records


def surviving(records: Sequence[Record]) -> list[Record]:
    """The records without what was lost: a run that was resumed after step S has made the steps after S again."""
    kept: list[Record] = []
    for happened in records:
        if happened["kind"] == "resume":
            kept = [r for r in kept if r["kind"] not in ("step", "eval") or r["step"] <= happened["step"]]
        kept.append(happened)
    return kept
