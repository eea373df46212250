"""What a person sees: one line a step without a terminal, a table with colours that mean something with one."""

import io
import math

import pytest
from rich.console import Console
from rich.text import Text
from tests.telemetry.records import config, evaluation, step

from sao.telemetry.live import View
from sao.telemetry.metrics import watched, wilson
from sao.telemetry.monitor import Monitor
from sao.telemetry.sinks import read, record


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60, force_terminal=False), out


def test_watched_numbers_are_taken_and_derived():
    now = watched(step(4, **{"tokens/masked": 500.0}))
    assert (now["step"], now["masked_share"], now["generator_idle"]) == (4, 0.25, pytest.approx(0.1))
    assert now["trained_per_s"] == pytest.approx(2000 / 1.5)


@pytest.mark.parametrize("value", [None, "text", float("nan")])
def test_what_a_step_lacks_is_nan_not_an_error(value):
    now = watched({"kind": "step", "step": 1, "tokens/action": 0, "tokens/masked": value})
    assert all(math.isnan(now[name]) for name in ("masked_share", "success", "trained_per_s"))


def test_without_a_terminal_each_step_is_one_line():
    console, out = plain()
    view = View(config(run={"steps": 20}), console)
    view.write(step(11))
    view.write(record("event", {"level": "warning", "text": "g1 ended [exit code 1]"}))
    view.write(evaluation(11, 0.5, failed=2))
    view.write(evaluation(12, None))
    view.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines.pop(0).startswith("starting: ")
    for part in ("step 11/20", "success 0.481", "lag 1.3/3", "sampled 1", "tok/s", "idle learner 20%", "eta 13s"):
        assert part in lines[0]
    assert lines[1] == "g1 ended [exit code 1]"
    assert lines[2] == "held-out success 0.500 (0.381 to 0.619) at step 11 (n = 64, 2 failed)"
    assert "none finished" in lines[3]


def test_on_a_terminal_the_table_shows_trend_and_alarm():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard")
    view = View(config(run={"steps": 20, "name": "demo"}, staleness={"max_lag": 2}), console)
    assert "starting" in out.getvalue()
    for number in range(1, 6):
        view.write(step(number, **{"time/idle_share": 0.9}))
    view.write(evaluation(5, 0.25))
    view.close()
    shown = out.getvalue()
    rows = Text.from_ansi(shown).plain.splitlines()
    assert any(row.startswith("success") for row in rows)  # below the bar, not beside it
    assert "demo" in shown and "step 5/20" in shown and "held-out 0.250" in shown and "▁" in shown and "█" in shown
    assert "\x1b[31m90%" in shown  # red: the learner waits nearly always
    assert "\x1b[33m1.3/3" in shown  # yellow: tokens beyond the bound


def test_a_step_without_numbers_can_be_shown():
    console, out = plain()
    view = View(config(run={"steps": 20}), console)
    view.write(record("step", {"step": 1}))
    assert "success -" in out.getvalue() and "eta -" in out.getvalue()


def test_the_monitor_writes_what_it_shows(tmp_path):
    console, out = plain()
    with Monitor(config(run={"steps": 20}), tmp_path, console) as monitor:
        monitor.report("step", {key: value for key, value in step(1).items() if key not in ("kind", "time_s")})
        monitor.report("event", {"level": "info", "text": "hello"})
        monitor.tick()
    assert [row["kind"] for row in read(tmp_path / "metrics.jsonl")] == ["step", "event"]
    assert list((tmp_path / "tensorboard").iterdir()) and "hello" in out.getvalue()


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)],
)
def test_the_interval_of_a_rate_is_wilsons(successes, n, low, high):
    assert wilson(successes, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text):
        raise OSError(5, "Input/output error")


def test_when_nobody_watches_any_more_the_records_are_written_all_the_same(tmp_path):
    console = Console(file=Gone(), force_terminal=False)
    with Monitor(config(run={"steps": 20}), tmp_path, console) as monitor:
        for number in (1, 2, 3):
            monitor.report("step", {"step": number})
            monitor.tick()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
