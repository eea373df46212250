"""`sao bench`: rows that make sense, a file that can be read again, unknown topics refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sao.cli import app
from sao.errors import ConfigError
from sao.measure import report
from sao.measure.measure import Row
from sao.measure.report import TOPICS, show, shown_rate, shown_time


@pytest.mark.parametrize("topic", ["pack", "wire", pytest.param("transport", marks=pytest.mark.slow)])
def test_rows_are_positive_and_ordered(topic: str) -> None:
    rows = list(TOPICS[topic](True))
    assert len({(row.what, row.size, row.how) for row in rows}) == len(rows) >= 4
    assert all(0 < row.p50_us <= row.p99_us <= row.max_us for row in rows)
    assert all(row.per_s > 0 for row in rows)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "pack", "--quick", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "8192 agentic" in done.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"]["cores"] >= 1
    assert {row["what"] for row in written["topics"]["pack"]} == {"pack", "plan for 8 ranks"}


def test_unknown_topics_are_refused() -> None:
    with pytest.raises(ConfigError, match="'speed' is not one of buffer"):
        show(["pack", "speed"])
    assert CliRunner().invoke(app, ["bench", "speed"]).exit_code == 2


def test_a_topic_whose_package_is_missing_is_left_out_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(quick: bool) -> Iterator[Row]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(report, "TOPICS", {"pack": TOPICS["pack"], "weights": weights})
    show([], quick=True)
    shown = capsys.readouterr().out
    assert "pack" in shown
    assert "left out: weights needs torch, which is not installed: pip install 'sao[train]'" in shown
    with pytest.raises(ModuleNotFoundError):
        show(["weights"], quick=True)


def test_numbers_are_shown_with_the_unit_that_suits_them() -> None:
    assert [shown_time(us) for us in (0.512, 1234.0, 2.5e6)] == ["0.512 us", "1.23 ms", "2.5 s"]
    assert [shown_rate(rate, "B") for rate in (0, 12, 3.4e3, 5e6, 7e9)] == [
        "",
        "12 B/s",
        "3.4 kB/s",
        "5 MB/s",
        "7 GB/s",
    ]
    assert Row("w", "s", "h", 2.0, 3.0, 4.0, 10, "token").per_s == pytest.approx(5e6)
