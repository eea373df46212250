"""The monitor of a run: every record goes to the files, to the trackers and to the person who watches."""

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from sao.config import Config
from sao.errors import ConfigError
from sao.telemetry.live import View
from sao.telemetry.sinks import JsonLines, Prometheus, Record, Sink, TensorBoard, Trackio, WandB, record


class Monitor:
    """Used as a context; `report(kind, fields)` and `tick()` are what a supervisor needs."""

    def __init__(self, config: Config, run_folder: Path, console: Console) -> None:
        """Opens `metrics.jsonl` in the run folder and what `telemetry` asks for and is installed."""
        self.sinks: list[Sink] = [JsonLines(run_folder / "metrics.jsonl")]
        self.warnings: list[str] = []  # for the user, once the run has begun
        self._missed = Counter[Sink]()  # records since a sink's first failure, until it takes one again
        telemetry = config.telemetry
        if telemetry.tensorboard and importlib.util.find_spec("tensorboard") is not None:
            self._add("telemetry.tensorboard", lambda: TensorBoard(run_folder / "tensorboard"))
        if telemetry.wandb:
            values = config.model_dump(mode="json")
            self._add("telemetry.wandb", lambda: WandB(config.run.name, values, run_folder))
        if telemetry.trackio:
            values = config.model_dump(mode="json")
            self._add("telemetry.trackio", lambda: Trackio(config.run.name, values, run_folder))
        if (port := telemetry.prometheus_port) is not None:
            self._add("telemetry.prometheus_port", lambda: Prometheus(port))
        self._view: View | None = None
        with suppress(OSError):  # nobody watches from the beginning
            self._view = View(config, console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:  # of a tracker, which had held back what it was given
                self._tell(f"{type(sink).__name__}: {error}; its last records may be missing there")
        self._with_view(lambda view: view.close())

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes what happened: `run`, `step`, `eval`, `event` or `end`."""
        happened = record(kind, fields)
        for sink in self.sinks:
            self._write(sink, happened)
        self._with_view(lambda view: view.write(happened))

    def tick(self) -> None:
        """Brings the live view's clock up to date."""
        self._with_view(lambda view: view.tick())

    def _add(self, key: str, make: Callable[[], Sink]) -> None:
        """Adds a sink; one that cannot start must not end a run."""
        try:
            self.sinks.append(make())
        except ConfigError as error:  # it names the key
            self.warnings.append(f"{error}; left out")
        except Exception as error:
            self.warnings.append(f"{key}: left out: {type(error).__name__}: {error}")

    def _write(self, sink: Sink, happened: Record) -> None:
        """A sink's fault must not end a run, nor a passing one the sink: the gap is reported when it is over."""
        name = type(sink).__name__
        try:
            if missed := self._missed[sink]:
                sink.write(record("event", {"level": "warning", "text": f"{name}: {missed} records are missing here"}))
                del self._missed[sink]
            sink.write(happened)
        except Exception as error:
            self._missed[sink] += 1
            if self._missed[sink] == 1:
                self._tell(f"{name}: {error}; records are missing there until this is over")

    def _tell(self, text: str) -> None:
        """A warning for the person who watches."""
        self._with_view(partial(View.write, record=record("event", {"level": "warning", "text": text})))

    def _with_view(self, act: Callable[[View], None]) -> None:
        """The terminal may be closed, or the reader of a pipe gone: then nobody watches, and the run goes on."""
        if self._view is not None:
            try:
                act(self._view)
            except OSError:
                self._view = None
