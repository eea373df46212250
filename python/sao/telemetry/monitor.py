"""The telemetry of a run in one object: every record goes to the files, to the trackers and to the person watching."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from sao.config import Config
from sao.errors import ConfigError
from sao.telemetry.live import View
from sao.telemetry.prometheus import Prometheus
from sao.telemetry.sinks import Fan, JsonLines, Record, Sink, TensorBoard, WandB, record


class Monitor:
    """Used as a context; `report(kind, fields)` and `tick()` are what a supervisor needs."""

    def __init__(self, config: Config, run_folder: Path, console: Console) -> None:
        """Opens `metrics.jsonl` in the run folder and what `telemetry` asks for and is installed."""
        sinks: list[Sink] = [JsonLines(run_folder / "metrics.jsonl")]
        if config.telemetry.tensorboard and importlib.util.find_spec("tensorboard") is not None:
            sinks.append(TensorBoard(run_folder / "tensorboard"))
        if config.telemetry.wandb:
            sinks.append(WandB(config.run.name, config.model_dump(mode="json"), run_folder))
        self.warnings: list[str] = []  # what a user should be told once the run has begun
        port = config.telemetry.prometheus_port
        if port is not None:
            try:
                sinks.append(Prometheus(port))
            except ConfigError as error:  # somebody was faster since it was tried
                self.warnings.append(f"{error}; not served")
        self._sinks = Fan(sinks, self._sink_failed)
        self._view: View | None = None
        with suppress(OSError):  # nobody watches from the beginning
            self._view = View(config, console)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._with_view(lambda view: view.close())
        self._sinks.close()

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes what happened: `run`, `step`, `eval`, `event` or `end`."""
        happened: Record = record(kind, fields)
        self._sinks.write(happened)
        self._with_view(lambda view: view.show(happened))

    def tick(self) -> None:
        """Brings the live view's clock up to date."""
        self._with_view(lambda view: view.tick())

    def _sink_failed(self, text: str) -> None:
        happened = record("event", {"level": "warning", "text": text})
        self._with_view(lambda view: view.show(happened))

    def _with_view(self, act: Callable[[View], None]) -> None:
        """The terminal may be closed, or the reader of a pipe gone: then nobody watches, and the run goes on."""
        if self._view is not None:
            try:
                act(self._view)
            except OSError:
                self._view = None
