"""`sao watch`: a run's records from its folder, those that come while it is watched, and how it ended."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from tests.telemetry.records import config, evaluation, step

from sao.config import save
from sao.errors import ConfigError
from sao.telemetry import watch as watching
from sao.telemetry.live import SteadyConsole
from sao.telemetry.sinks import record


def folder(path: Path) -> Path:
    save(config(run={"steps": 40, "dir": str(path), "name": "r"}), path / "config.json")
    return path


def written(path: Path, *records: dict) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in records))


def watched(path: Path, running: bool = False) -> tuple[str, list[str]]:
    out = io.StringIO()
    ended = watching.watch(path, SteadyConsole(file=out, width=300, force_terminal=False), lambda: running)
    return ended, out.getvalue().splitlines()


def test_a_run_that_has_ended_is_shown_whole(tmp_path: Path) -> None:
    end = record("end", {"exit_code": 0, "reason": "all steps done"})
    written(folder(tmp_path), record("run", {}), step(1), evaluation(1, 0.5), step(2), end)
    ended, lines = watched(tmp_path)
    assert ended == "all steps done" and len(lines) == 4
    assert lines[1].startswith("step 1/40") and lines[3].startswith("step 2/4") and "0.500 (" in lines[2]


def test_what_ends_without_a_word_is_said(tmp_path: Path) -> None:
    assert "no process owns" in watched(folder(tmp_path))[0]  # nor has it begun to write
    resumed = [record("end", {"exit_code": 3, "reason": "killed"}), record("resume", {}), step(3)]
    written(tmp_path, record("run", {}), step(1), *resumed)
    ended, lines = watched(tmp_path)
    assert "no process owns" in ended and lines[-1].startswith("step 3/40")


def test_records_are_followed_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    written(folder(tmp_path), record("run", {}))
    going, out = threading.Event(), io.StringIO()
    going.set()
    found: list[str] = []
    console = SteadyConsole(file=out, width=300, force_terminal=False)
    thread = threading.Thread(target=lambda: found.append(watching.watch(tmp_path, console, going.is_set)))
    thread.start()

    def shown(text: str) -> bool:
        deadline = time.monotonic() + 20
        while text not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in out.getvalue()

    whole = json.dumps(step(1)) + "\n"
    with (tmp_path / "metrics.jsonl").open("a", buffering=1) as file:
        file.write(whole[:30])
        file.flush()
        time.sleep(0.05)
        file.write(whole[30:])
    assert shown("step 1/40")
    hostile = record("event", {"level": "error", "text": "[bold]x[/bold] \x1b]0;title\x07"})
    written(tmp_path, hostile, record("end", {"exit_code": 0, "reason": "done"}))
    assert shown("[bold]x[/bold]") and "\x1b" not in out.getvalue() and not found
    going.clear()
    thread.join(20)
    assert found == ["done"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(no config.json\)"):
        watched(tmp_path)
