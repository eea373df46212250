"""The view of a run while it goes on: a live table on a terminal, one line a step elsewhere.

Colours carry meaning: green is as hoped, yellow is worth a look, red is wrong.
"""

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sao.config import Config
from sao.errors import printable
from sao.telemetry.metrics import watched, wilson

RECENT = 32  # steps in the trend
BARS = "▁▂▃▄▅▆▇█"
STARTING = "starting: models load, first rollouts are sampled"
STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class SteadyConsole(Console):
    """A console whose reader may leave (`sao train run.toml | head`), and whose disk may be full: rich would end the
    program; here it goes on without output, and a line on standard error says so once.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; texts hold what others said, and no control character of theirs reaches the terminal."""
        shown = [printable(one) if isinstance(one, str) else one for one in objects]
        try:
            super().print(*shown, **options)
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
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._held_out: float | None = None
        self._live: Live | None = None
        if config.telemetry.live and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        else:
            self._print(f"{STARTING}; logs: {config.folder / 'logs'}", "dim")
        self.tick()

    def began(self, time_s: float) -> None:
        """Counts what has elapsed from this Unix time on; steps before it took place in another start of the run."""
        self._started_s = time.monotonic() - max(0.0, time.time() - time_s)
        self._recent.clear()

    def write(self, record: Mapping[str, Any]) -> None:
        """Shows one record."""
        if record["kind"] == "step":
            self._recent.append(watched(record))
            if self._live is None:
                self._print(self._line())
        elif record["kind"] == "eval":
            self._held_out, failed = record["success"], record.get("failed")
            shown = "none finished" if self._held_out is None else f"{self._held_out:.3f}"
            if self._held_out is not None and (n := record.get("n")):
                low, high = wilson(round(self._held_out * n), n)
                shown += f" ({low:.3f} to {high:.3f})"
            more = f", {failed} failed" if failed else ""
            self._print(f"held-out success {shown} at step {record['step']} (n = {record.get('n')}{more})", "bold")
        elif record["kind"] == "event":
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

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        """The last step in one line, with units."""
        parts = [f"step {self._recent[-1]['step']}/{self._config.run.steps}"]
        parts += [f"{label} {text}" for _, label, text, _ in self._cells()]
        return "  ".join([*parts, f"eta {_duration(self._eta_s())}"])

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """The watched numbers of the last step: name, label, text and style of each."""
        now = self._recent[-1]
        gap_limit, masked, explained = self._config.logprob_gap_limit, now["masked_share"], now["explained_variance"]
        lag = f"{_number(now['lag_mean'], '{:.1f}')}/{_number(now['lag_max'], '{:.0f}')}"
        cells = [
            ("success", "success", _number(now["success"], "{:.3f}"), "bold"),
            ("reward", "reward", _number(now["reward"], "{:.3f}"), ""),
            ("lag_mean", "lag", lag, _style(now["lag_max"], self._config.staleness.max_lag, math.inf)),
            ("masked_share", "masked", _number(masked, "{:.0%}"), _style(masked, 0.1, 0.5)),
            ("explained_variance", "expl.var", _number(explained, "{:.2f}"), _style(-explained, -0.1, 0.2)),
            ("sampled_per_s", "sampled", _rate(now["sampled_per_s"]), ""),
            ("trained_per_s", "trained", _rate(now["trained_per_s"]), ""),
        ]
        for name, label in (("learner_idle", "idle learner"), ("generator_idle", "idle generators")):
            cells.append((name, label, _number(now[name], "{:.0%}"), _style(now[name], 0.3, 0.7)))
        return [*cells, ("gap", "gap", _number(now["gap"], "{:.1e}"), _style(now["gap"], gap_limit / 2, gap_limit))]

    def _table(self) -> Group:
        steps = self._config.run.steps
        done = self._recent[-1]["step"] if self._recent else 0
        elapsed, to_go = _duration(time.monotonic() - self._started_s), _duration(self._eta_s())
        title = Text(f"{self._config.run.name} ", "bold")
        title.append(f"step {done}/{steps}  {elapsed} elapsed  {to_go} to go", "not bold")
        if self._held_out is not None:
            title.append(f"  held-out {self._held_out:.3f}", "bold cyan")
        if not self._recent:
            return Group(title, Text(STARTING, "dim"))
        table = Table.grid(padding=(0, 2))
        for name, label, text, style in self._cells():
            trend = _trend([numbers[name] for numbers in self._recent])
            table.add_row(Text(label, "dim"), Text(text, style), Text(trend, "cyan"))
        bar = Padding(ProgressBar(total=steps, completed=done, width=60), 0)  # a bar alone ends without a new line
        return Group(title, bar, table)

    def _eta_s(self) -> float:
        times = [numbers["step_s"] for numbers in self._recent if math.isfinite(numbers["step_s"])]
        if not times:
            return math.nan
        return statistics.median(times) * (self._config.run.steps - self._recent[-1]["step"])


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def _rate(value: float) -> str:
    return _number(value, "{:.0f} tok/s") if not value >= 10_000 else f"{value / 1000:.0f}k tok/s"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _style(value: float, good: float, fair: float) -> str:
    if not math.isfinite(value):
        return "dim"
    return "green" if value <= good else "yellow" if value <= fair else "red"


def _trend(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale)] if math.isfinite(value) else " " for value in values)
