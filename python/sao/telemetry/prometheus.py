"""The newest numbers of a run for Prometheus to scrape, on the loopback interface."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sao.errors import ConfigError
from sao.telemetry.sinks import Record, scalars

ADDRESS = "127.0.0.1"


def taken(port: int, error: OSError) -> str:
    """The message for a port at which the numbers cannot be served."""
    return f"telemetry.prometheus_port: {port} on {ADDRESS} cannot be had: {error.strerror}"


class Prometheus:
    """A sink (`sao.telemetry.sinks.Sink`) that serves `http://127.0.0.1:PORT/metrics` while the run lasts.

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
            self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=registry)
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
