"""Records reach the files whole, a broken tracker ends nothing, and numbers that JSON lacks become null."""

import io
import json
import math
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from types import SimpleNamespace
from typing import ClassVar

import pytest
from prometheus_client import parser
from rich.console import Console
from tests.telemetry.records import config, evaluation, step

from sao.errors import ConfigError
from sao.telemetry import sinks
from sao.telemetry.monitor import Monitor


def test_a_record_is_flat_and_valid_json():
    made = sinks.record("step", {"a": {"b": {"c": 1}}, "x": math.nan, "y": math.inf, "t": "text", "n": None})
    assert {key: made[key] for key in ("kind", "a/b/c", "x", "y", "t", "n")} == {
        "kind": "step",
        "a/b/c": 1,
        "x": None,
        "y": None,
        "t": "text",
        "n": None,
    }
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_every_line_is_on_disk_before_close(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = sinks.JsonLines(path)
    for number in (1, 2):
        lines.write(step(number))
        assert [row["step"] for row in sinks.read(path)] == list(range(1, number + 1))
    lines.close()


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1)) + "\n" + json.dumps(step(2))[:40])
    assert [row["step"] for row in sinks.read(path)] == [1]


def test_tensorboard_files_hold_the_scalars(tmp_path):
    board = sinks.TensorBoard(tmp_path)
    for row in (
        step(3),
        evaluation(3, 0.75),
        evaluation(4, None),
        sinks.record("event", {"level": "info", "text": "x"}),
    ):
        board.write(row)
    board.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path)).Reload()
    (point,) = read.Scalars("step/reward/mean")
    assert (point.step, point.value) == (3, 0.5)
    assert read.Scalars("eval/success")[0].value == 0.75 and len(read.Scalars("eval/success")) == 1


def test_tensorboard_brings_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from sao.telemetry.sinks import TensorBoard;"
        f"TensorBoard(Path({str(tmp_path)!r})).close(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_prometheus_gets_the_newest_numbers_only():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = sinks.Prometheus(port)

    def scraped() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = parser.text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}

    try:
        with pytest.raises(ConfigError, match=f"telemetry.prometheus_port: {port} on 127.0.0.1 cannot be had"):
            sinks.Prometheus(port)
        assert scraped() == {}
        server.write(step(1) | {"odd/name-9": 2})
        server.write(evaluation(1, 0.75))
        server.write(sinks.record("event", {"level": "info", "text": "x"}))
        first = scraped()
        assert (first["sao_step"], first["sao_step_odd_name_9"], first["sao_step_reward_mean"]) == (1, 2, 0.5)
        assert (first["sao_eval_step"], first["sao_eval_success"]) == (1, 0.75)
        server.write(step(2))
        second = scraped()
        assert (second["sao_step"], second["sao_eval_step"]) == (2, 1) and "sao_step_odd_name_9" not in second
    finally:
        server.close()
    socket.create_server(("127.0.0.1", port)).close()  # given back


def test_a_port_that_was_taken_since_it_was_tried_is_a_warning_and_the_run_goes_on(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = config(telemetry={"prometheus_port": port, "tensorboard": False})
        with Monitor(settings, tmp_path, Console(file=io.StringIO())) as monitor:
            assert monitor.warnings == [
                f"telemetry.prometheus_port: {port} on 127.0.0.1 cannot be had: Address already in use; left out"
            ]
            monitor.report("step", step(1))
    assert [row["step"] for row in sinks.read(tmp_path / "metrics.jsonl")] == [1]


class Broken:
    """A tracker whose server is gone."""

    def write(self, record):
        raise ConnectionError("no route")

    def close(self):
        raise ConnectionError("no route")


def test_a_failing_sink_is_reported_once_and_the_others_go_on(tmp_path):
    out = io.StringIO()
    with Monitor(config(telemetry={"tensorboard": False}), tmp_path, Console(file=out, width=200)) as monitor:
        monitor.sinks.insert(0, Broken())
        for number in range(5):
            monitor.report("step", {"step": number})
    assert len(sinks.read(tmp_path / "metrics.jsonl")) == 5
    assert out.getvalue().count("Broken: no route; records are missing there until this is over") == 1


def test_a_sink_that_works_again_gets_the_records_again_and_is_told_of_the_gap(tmp_path):
    class Passing(Broken):
        taken: ClassVar[list] = []
        broken = True

        def write(self, record):
            if self.broken:
                super().write(record)
            self.taken.append(record)

    with Monitor(config(telemetry={"tensorboard": False}), tmp_path, Console(file=io.StringIO())) as monitor:
        sink = Passing()
        monitor.sinks.append(sink)
        for number in range(6):
            sink.broken = number in (1, 2)
            monitor.report("step", {"step": number})
    assert [row.get("step", row.get("text")) for row in sink.taken] == [
        *(0, "Passing: 2 records are missing here"),
        *(3, 4, 5),
    ]


def test_after_a_full_disk_there_are_whole_lines_only_and_the_gap_is_told(tmp_path):
    """A limit on the size of files stands for the full disk: the write that crosses it is short, the next one fails."""
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    out = io.StringIO()
    with Monitor(config(telemetry={"tensorboard": False}), tmp_path, Console(file=out, width=200)) as monitor:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
            for number in range(100):
                monitor.report("step", {"step": number, "text": "x" * 50})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        for number in range(100, 105):
            monitor.report("step", {"step": number})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = [row["kind"] for row in rows].index("event")
    assert 0 < first < 100
    assert rows[first]["text"] == f"JsonLines: {100 - first} records are missing here"
    assert [row["step"] for row in rows[:first] + rows[first + 1 :]] == [*range(first), *range(100, 105)]
    assert out.getvalue().count("records are missing there until this is over") == 1


def test_a_torn_line_in_the_middle_does_not_hide_what_follows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1)) + "\n" + json.dumps(step(2))[:40] + "\n" + json.dumps(step(3)) + "\n")
    assert [row["step"] for row in sinks.read(path)] == [1, 3]


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, monkeypatch):
    def init(**_):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    settings = config(telemetry={"tensorboard": False, "wandb": True})
    with Monitor(settings, tmp_path, Console(file=io.StringIO())) as monitor:
        (warning,) = monitor.warnings
        assert warning == "telemetry.wandb: left out: RuntimeError: api_key not configured (no-tty)"
        monitor.report("step", {"step": 1})
    assert len(sinks.read(tmp_path / "metrics.jsonl")) == 1


def test_a_run_that_goes_on_is_the_same_run_in_wandb(tmp_path, monkeypatch):
    calls = []

    def init(**given):
        calls.append({key: value for key, value in given.items() if key in ("id", "resume")})
        return SimpleNamespace(id="abc123", finish=lambda: None, log=lambda row: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for _ in range(2):
        sinks.WandB("r", {}, tmp_path).close()
    assert calls == [{}, {"id": "abc123", "resume": "allow"}]


def test_wandb_gets_the_numbers(tmp_path, monkeypatch):
    logged = []

    class Run:
        id = "abc123"

        def log(self, row):
            logged.append(row)

        def finish(self):
            logged.append("finished")

    class Module:
        @staticmethod
        def init(**arguments):
            assert arguments["name"] == "r" and arguments["config"] == {"a": 1}
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    sink = sinks.WandB("r", {"a": 1}, tmp_path)
    sink.write(step(7))
    sink.write(sinks.record("event", {"level": "info", "text": "x"}))
    sink.close()
    assert logged[0]["step"] == 7 and logged[0]["step/reward/mean"] == 0.5 and logged[1:] == ["finished"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError):
        sinks.WandB("r", {}, tmp_path)


def test_a_run_that_goes_on_is_the_same_run_in_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "data"))  # read when it is imported
    pytest.importorskip("trackio", reason="needs pip install trackio")
    for number in (7, 8):
        sink = sinks.Trackio("r", {"a": {"b": 1}}, tmp_path)
        sink.write(step(number))
        sink.write(sinks.record("event", {"level": "info", "text": "x"}))
        sink.close()
    other = tmp_path / "other"
    other.mkdir()
    sinks.Trackio("r2", {}, other).close()
    with sqlite3.connect(tmp_path / "data" / "sao.db") as data:
        rows = data.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [at for _, at, _ in rows] == [7, 8] and len({name for name, _, _ in rows}) == 1
    assert json.loads(rows[0][2])["step/reward/mean"] == 0.5
