"""What `sao bench` prints: one table a topic, and the same as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sao import measure as bench
from sao.errors import ConfigError
from sao.measure.measure import Row, machine, shown_rate, shown_time


def show(topics: Sequence[str], *, quick: bool = False, json_file: Path | None = None) -> None:
    """Measures and prints; all topics if none is named. Raises `ConfigError` for an unknown one, before it measures."""
    for topic in topics:
        if topic not in bench.TOPICS:
            raise ConfigError(f"topic: {topic!r} is not one of {', '.join(bench.TOPICS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    described, found = machine(), {}
    for topic in topics or bench.TOPICS:
        with console.status(f"measuring {topic}"):
            rows = list(bench.run(topic, quick=quick))
        found[topic] = [asdict(row) | {"per_s": row.per_s} for row in rows]
        console.print(_table(topic, rows))
    console.print(", ".join(f"{name} {value}" for name, value in described.items()), style="dim", highlight=False)
    if json_file:
        json_file.write_text(json.dumps({"machine": described, "topics": found}, indent=1) + "\n")


def _table(topic: str, rows: Sequence[Row]) -> Table:
    table = Table(title=topic, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("what", "size", "how"):
        table.add_column(name)
    for name in ("p50", "p99", "max", "throughput"):
        table.add_column(name, justify="right", no_wrap=True)  # a number that is cut is none
    table.add_column("note")
    for row in rows:
        times = [shown_time(us) for us in (row.p50_us, row.p99_us, row.max_us)]
        table.add_row(row.what, row.size, row.how, *times, shown_rate(row.per_s, row.unit), row.note)
    return table
