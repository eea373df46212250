"""The topics of `sao bench`, and what it prints: one table a topic, and the same as a file."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sao.errors import ConfigError, missing_package
from sao.measure import parts
from sao.measure.measure import Row, machine
from sao.measure.transport import transport

TOPICS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "buffer": parts.buffer,
    "pack": parts.pack,
    "advantage": parts.advantage,
    "wire": parts.wire,
    "transport": transport,
    "weights": parts.weights,
}
"""Each gives its rows as they are measured; true: fewer repetitions, smaller largest sizes."""
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def show(topics: Sequence[str], *, quick: bool = False, json_file: Path | None = None) -> None:
    """Measures and prints; all topics if none is named, but for those whose package is not installed.

    Raises `ConfigError` for an unknown topic, before it measures.
    """
    if unknown := next((topic for topic in topics if topic not in TOPICS), None):
        raise ConfigError(f"topic: {unknown!r} is not one of {', '.join(TOPICS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    described, found = machine(), {}
    for topic in topics or TOPICS:
        try:
            with console.status(f"measuring {topic}"):
                rows = list(TOPICS[topic](quick))
        except ModuleNotFoundError as error:
            if topics or (missing := missing_package(error, topic)) is None:
                raise
            console.print(f"left out: {missing}", style="dim", markup=False)
            continue
        found[topic] = [asdict(row) | {"per_s": row.per_s} for row in rows]
        console.print(_table(topic, rows))
    console.print(", ".join(f"{name} {value}" for name, value in described.items()), style="dim", highlight=False)
    if json_file:
        json_file.write_text(json.dumps({"machine": described, "topics": found}, indent=1) + "\n", encoding="utf-8")


def shown_time(us: float) -> str:
    """A duration with the unit that suits it."""
    factor, unit = (1.0, "us") if us < 1e3 else (1e3, "ms") if us < 1e6 else (1e6, "s")
    return f"{us / factor:.3g} {unit}"


def shown_rate(rate: float, unit: str) -> str:
    """A rate with the prefix that suits it; empty for none."""
    limit, prefix = next(((limit, prefix) for limit, prefix in PREFIXES if rate >= limit), (1.0, ""))
    return f"{rate / limit:.3g} {prefix}{unit}/s" if rate else ""


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
