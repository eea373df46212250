"""The view of a run while it goes on: a live table on a terminal, one line a step elsewhere.

Colours carry meaning: green is as hoped, yellow is worth a look, red is wrong.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sao.config import Config
from sao.telemetry.metrics import Watched, watched

# The number behind each cell of the table, in the same order.
TRENDS = (
    *("success", "reward", "lag_mean", "masked_share", "explained_variance"),
    *("sampled_per_s", "trained_per_s", "learner_idle", "generator_idle", "gap"),
)
RECENT = 32  # steps in the trend
BARS = "▁▂▃▄▅▆▇█"
STARTING = "starting: models load, first rollouts are sampled"
STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class SteadyConsole(Console):
    """A console whose reader may leave (`sao train run.toml | head`), and whose disk may be full: rich would end the
    program; here it goes on without output, and a line on standard error says so once.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._silence(f"the output cannot be written any more ({error.strerror})")

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        self._silence("nobody reads the output any more")

    def _silence(self, why: str) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in its buffer must not fail at exit
        os.close(nowhere)
        with suppress(OSError):
            print(f"{why}; the run goes on, see its folder", file=sys.stderr, flush=True)


class View:
    """Shows records. On a terminal the table stays at the bottom and events scroll by above it."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._console = config, console
        self._started_s = time.monotonic()
        self._recent: deque[Watched] = deque(maxlen=RECENT)
        self._held_out: float | None = None
        self._live: Live | None = None
        if config.telemetry.live and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=False)
            self._live.start()
        else:
            self._print(f"{STARTING}; logs: {config.folder / 'logs'}", "dim")
        self.tick()

    def show(self, record: dict[str, Any]) -> None:
        """Takes one record."""
        kind = record["kind"]
        if kind == "step":
            self._recent.append(watched(record))
            if self._live is None:
                self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)
        elif kind == "eval":
            self._held_out = record.get("success")
            self._print(self._eval_line(record), "bold")
        elif kind == "event":
            self._print(str(record["text"]), STYLES.get(str(record.get("level")), ""))
        self.tick()

    def tick(self) -> None:
        """Brings the clock of the live table up to date."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Leaves the last table on the terminal."""
        if self._live is not None:
            self._live.stop()

    def line(self) -> str:
        """The last step in one line, with units."""
        last = self._recent[-1]
        parts = [f"step {last.step}/{self._config.run.steps}"]
        parts += [f"{label} {text}" for label, text, _ in self._cells(last)]
        return "  ".join([*parts, f"eta {_duration(self._eta_s())}"])

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _eval_line(self, record: dict[str, Any]) -> str:
        success, n, failed = record.get("success"), record.get("n"), record.get("failed") or 0
        shown = "none finished" if success is None else f"{success:.3f}"
        more = f", {failed} failed" if failed else ""
        return f"held-out success {shown} at step {record.get('step')} (n = {n}{more})"

    def _cells(self, now: Watched) -> list[tuple[str, str, str]]:
        """Label, value and style of the watched numbers."""
        bound = self._config.staleness.max_lag
        limit = self._config.logprob_gap_limit
        gap_style = _style(now.gap, good=limit / 2, bad=limit)
        return [
            ("success", _number(now.success, "{:.3f}"), "bold"),
            ("reward", _number(now.reward, "{:.3f}"), ""),
            ("lag", f"{_number(now.lag_mean, '{:.1f}')}/{_number(now.lag_max, '{:.0f}')}", _over(now.lag_max, bound)),
            ("masked", _share(now.masked_share), _style(now.masked_share, good=0.1, bad=0.5)),
            (
                "expl.var",
                _number(now.explained_variance, "{:.2f}"),
                _style(-now.explained_variance, good=-0.1, bad=0.2),
            ),
            ("sampled", _rate(now.sampled_per_s), ""),
            ("trained", _rate(now.trained_per_s), ""),
            ("idle learner", _share(now.learner_idle), _style(now.learner_idle, good=0.3, bad=0.7)),
            ("idle generators", _share(now.generator_idle), _style(now.generator_idle, good=0.3, bad=0.7)),
            ("gap", _number(now.gap, "{:.1e}"), gap_style),
        ]

    def _table(self) -> Group:
        steps = self._config.run.steps
        done = self._recent[-1].step if self._recent else 0
        elapsed_s = time.monotonic() - self._started_s
        title = Text.assemble(
            (f"{self._config.run.name} ", "bold"),
            f"step {done}/{steps}  {_duration(elapsed_s)} elapsed  {_duration(self._eta_s())} to go",
        )
        if self._held_out is not None:
            title.append(f"  held-out {self._held_out:.3f}", "bold cyan")
        if not self._recent:
            return Group(title, Text(STARTING, "dim"))
        table = Table.grid(padding=(0, 2))
        for (label, text, style), name in zip(self._cells(self._recent[-1]), TRENDS, strict=True):
            table.add_row(
                Text(label, "dim"), Text(text, style), Text(_trend([getattr(w, name) for w in self._recent]), "cyan")
            )
        bar = Padding(ProgressBar(total=steps, completed=done, width=60), 0)  # a bar alone ends without a new line
        return Group(title, bar, table)

    def _eta_s(self) -> float:
        times = [w.step_s for w in self._recent if math.isfinite(w.step_s)]
        if not times:
            return math.nan
        return statistics.median(times) * (self._config.run.steps - self._recent[-1].step)


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def _share(value: float) -> str:
    return _number(100 * value, "{:.0f}%")


def _rate(value: float) -> str:
    return _number(value, "{:.0f} tok/s") if not value >= 10_000 else f"{value / 1000:.0f}k tok/s"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _style(value: float, *, good: float, bad: float) -> str:
    if not math.isfinite(value):
        return "dim"
    return "green" if value <= good else "yellow" if value <= bad else "red"


def _over(value: float, bound: float) -> str:
    return "dim" if not math.isfinite(value) else "green" if value <= bound else "yellow"


def _trend(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale)] if math.isfinite(value) else " " for value in values)
