"""The monitor of a run: every record goes to the files, to the trackers and to the person who watches."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from sao.config import Config
from sao.errors import ConfigError
from sao.telemetry.live import View
from sao.telemetry.sinks import JsonLines, Prometheus, Sink, TensorBoard, WandB, record


class Monitor:
    """Used as a context; `report(kind, fields)` and `tick()` are what a supervisor needs."""

    def __init__(self, config: Config, run_folder: Path, console: Console) -> None:
        """Opens `metrics.jsonl` in the run folder and what `telemetry` asks for and is installed."""
        self.sinks: list[Sink] = [JsonLines(run_folder / "metrics.jsonl")]
        if config.telemetry.tensorboard and importlib.util.find_spec("tensorboard") is not None:
            self.sinks.append(TensorBoard(run_folder / "tensorboard"))
        if config.telemetry.wandb:
            self.sinks.append(WandB(config.run.name, config.model_dump(mode="json"), run_folder))
        self.warnings: list[str] = []  # for the user, once the run has begun
        if config.telemetry.prometheus_port is not None:
            try:
                self.sinks.append(Prometheus(config.telemetry.prometheus_port))
            except ConfigError as error:  # somebody was faster since it was tried
                self.warnings.append(f"{error}; not served")
        self._view: View | None = None
        with suppress(OSError):  # nobody watches from the beginning
            self._view = View(config, console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._with_view(lambda view: view.close())
        self._with_sinks(lambda sink: sink.close())

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes what happened: `run`, `step`, `eval`, `event` or `end`."""
        happened = record(kind, fields)
        self._with_sinks(lambda sink: sink.write(happened))
        self._with_view(lambda view: view.write(happened))

    def tick(self) -> None:
        """Brings the live view's clock up to date."""
        self._with_view(lambda view: view.tick())

    def _with_sinks(self, act: Callable[[Sink], None]) -> None:
        """A tracker's fault must not end a run: it is shown once, and that sink left out."""
        for sink in list(self.sinks):
            try:
                act(sink)
            except Exception as error:
                self.sinks.remove(sink)
                text = f"{type(sink).__name__}: {error}; it gets no more records"
                failed = record("event", {"level": "warning", "text": text})
                self._with_view(partial(View.write, record=failed))

    def _with_view(self, act: Callable[[View], None]) -> None:
        """The terminal may be closed, or the reader of a pipe gone: then nobody watches, and the run goes on."""
        if self._view is not None:
            try:
                act(self._view)
            except OSError:
                self._view = None
