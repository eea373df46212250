"""Runs that nobody watches for long: their ledger stays short through kills, and their output may lose its reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter

import pytest
from tests.e2e.kills import PROGRAMS, RUN, Story, Wish, python_path
from tests.e2e.test_resume import sao

from sao._core import Ledger, ledger_history
from sao.errors import LedgerError
from sao.storage.checkpoints import newest
from sao.telemetry import sinks

pytestmark = pytest.mark.timeout(300)
STEPS = 80


@pytest.mark.parametrize(
    ("restarts", "wishes", "kills"),
    [("false", ["broker.commit:35", "learner.committed:18"], {"broker": 1, "learner": 1}), ("true", [], {"broker": 2})],
    ids=["resumed", "restarted inside the run"],
)
def test_a_short_ledger_is_enough_to_go_on(tmp_path, tiny_model, monkeypatch, restarts, wishes, kills):
    monkeypatch.setenv("STEP_S", "0.06")
    story = Story(tmp_path, tiny_model, "plain", 5, steps=STEPS, order="window")
    values = {"folder": str(tmp_path), "model": str(tiny_model), "seed": 5, "steps": STEPS, "every": 4}
    run_file = RUN.format(**values, order="window") + "[buffer]\nledger_growth_bytes = 1500\n"
    (tmp_path / "run.toml").write_text(run_file.replace("restart_killed = false", f"restart_killed = {restarts}"))
    for wish in wishes:
        assert story.start(Wish(point=wish)) == 1
    last = None if wishes else Wish(point="broker.commit:35")  # of every broker of that start
    assert story.start(last) == 0, (tmp_path / "output.txt").read_text()
    assert story.kills == Counter(kills)
    folder = tmp_path / "r"
    folds = re.findall(r"steps up to (\d+) are summed up", (folder / "logs" / "broker.log").read_text())
    assert len(set(folds)) >= 3, folds
    last, ignored = newest(folder / "checkpoints")
    assert last is not None and last.step == STEPS and not ignored
    seen = [ordinal for step in json.loads((last.state / "seen.json").read_text()) for ordinal, _ in step]
    assert Counter(seen) == Counter(range(4 * STEPS))  # each task once, although the ledger has forgotten the steps
    with Ledger(folder / "journal") as ledger:
        ledger.check()
        assert (ledger.counts()["trained"], ledger.unfinished(), ledger.last_step) == (4 * STEPS, [], STEPS)
    with pytest.raises(LedgerError, match="no longer listed one by one"):
        ledger_history(folder / "journal")
    assert sum(path.stat().st_size for path in (folder / "journal").iterdir()) < 30_000
    for path in (folder / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    gone = sao(tmp_path, "train", "run.toml", "--resume")
    assert gone.returncode == 1 and "no checkpoint is left to resume from" in gone.stdout + gone.stderr


def test_a_run_whose_output_nobody_reads_any_more_goes_on(tmp_path, tiny_model):
    """`sao train run.toml | head -1`."""
    values = {"folder": str(tmp_path), "model": str(tiny_model), "seed": 5, "steps": 8, "every": 4}
    (tmp_path / "run.toml").write_text(RUN.format(**values, order="window"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    command = [*PROGRAMS["plain"], "train", str(tmp_path / "run.toml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        said, code = process.stderr.read(), process.wait(120)
    assert code == 0 and "nobody reads the output any more; the run goes on" in said, said
    assert said.count("nobody reads") == 1 and "Traceback" not in said
    last, _ = newest(tmp_path / "r" / "checkpoints")
    assert last is not None and last.step == 8
    (end,) = [row for row in sinks.read(tmp_path / "r" / "metrics.jsonl") if row["kind"] == "end"]
    assert end["exit_code"] == 0
