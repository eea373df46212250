"""The view of a run that was started elsewhere, from its folder alone; it only reads."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from sao import config as configuration
from sao.errors import ConfigError
from sao.telemetry.live import View
from sao.telemetry.sinks import Record

LOOK_S = 0.5  # between two looks at the file of records


def watch(run: Path, console: Console, running: Callable[[], bool]) -> str:
    """Shows a run's records so far and then each new one, until it has ended; returns how.

    running: whether somebody owns the folder still. Raises `ConfigError` when the folder holds no run.
    """
    file = run / "config.json"
    if not file.is_file():
        raise ConfigError(f"{run}: holds no run (no config.json)")
    view, ended = View(configuration.load(file), console), ""
    try:
        for found in _followed(run / "metrics.jsonl", running):
            if found is None:
                view.tick()
            elif found["kind"] in ("run", "resume"):
                view.began(found["time_s"])
                ended = ""
            elif found["kind"] == "end":
                ended = str(found["reason"])
            else:
                view.write(found)
    finally:
        view.close()
    return ended or f"no process owns {run} any more, and nothing says how it ended: see {run / 'logs'}"


def _followed(path: Path, running: Callable[[], bool]) -> Iterator[Record | None]:
    """The records of a file that grows, None when there is no new one; until nobody writes any more."""
    rest, at = b"", 0
    while True:
        last = not running()  # looked at before the file, so that what was written at the end is read
        data = _read(path, at)
        at += len(data)
        *lines, rest = (rest + data).split(b"\n")
        yield from (json.loads(line) for line in lines if line.strip())
        if last:
            return
        yield None
        time.sleep(LOOK_S)


def _read(path: Path, at: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read()
    except FileNotFoundError:
        return b""
