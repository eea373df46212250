"""When the ledger's file is made short, and what it must still know then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.broker.broker_world import config, trajectory

from sao._core import Ledger, ledger_history
from sao.broker.ledger_file import LedgerFile
from sao.broker.server import Server
from sao.errors import LedgerError
from sao.trajectory import encode_frames
from sao.transport import messages as m
from sao.transport import private_folder


def steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ordinals = [4 * step + n for n in range(4)]
        for ordinal in ordinals:
            ledger.generating(ordinal, ledger.issue(ordinal))
            ledger.ready(ordinal, 0, 10)
        ledger.lease(ordinals, step)
        ledger.trained(step, step, 40, 0)
    ledger.sync()


def checkpoints(folder: Path, *numbers: int) -> None:
    for path in (folder / "checkpoints").glob("step-*"):
        path.rmdir()
    for number in numbers:
        (folder / "checkpoints" / f"step-{number}").mkdir(parents=True)


def test_steps_before_the_oldest_checkpoint_are_folded_once(tmp_path):
    with Ledger(tmp_path / "ledger.log") as ledger:
        file = LedgerFile(ledger, tmp_path, 4096)
        steps(ledger, 1, 10)
        checkpoints(tmp_path, 8, 10)
        assert file.due() == 0  # still short
        steps(ledger, 11, 40)
        assert file.due() == 7
        file.fold(7)
        assert ledger_history(tmp_path / "ledger.log", 7)[1][0]["step"] == 8
        assert file.due() == 0  # no other checkpoint is the oldest
        checkpoints(tmp_path, 30, 40)
        size = (tmp_path / "ledger.log").stat().st_size
        assert file.due() == (29 if size >= file._limit else 0)
        steps(ledger, 41, 70)
        assert file.due() == 29
        before = ledger.counts(), ledger.tokens()
        file.fold(29)
        assert (ledger.counts(), ledger.tokens()) == before
        assert (tmp_path / "ledger.log").stat().st_size < 4096 + 4 * 41 * 40
    with Ledger(tmp_path / "ledger.log") as again:
        assert (again.counts(), again.tokens()) == before
        again.rewind(30)  # as a resume from the oldest checkpoint does
        again.check()


def test_without_a_checkpoint_or_a_limit_everything_stays(tmp_path):
    with Ledger(tmp_path / "ledger.log") as ledger:
        steps(ledger, 1, 20)
        assert LedgerFile(ledger, tmp_path, 1).due() == 0  # it would have to begin at the start
        checkpoints(tmp_path, 1)
        assert LedgerFile(ledger, tmp_path, 1).due() == 0
        checkpoints(tmp_path, 20)
        assert LedgerFile(ledger, tmp_path, 1).due() == 19
        assert LedgerFile(ledger, tmp_path, 0).due() == 0


def test_a_file_that_cannot_be_made_short_does_not_end_the_run(tmp_path, caplog):
    class Full:
        def compact(self, upto: int) -> None:
            raise LedgerError("ledger.log: cannot be compacted: no space left on device")

    (tmp_path / "ledger.log").write_bytes(b"0" * 100)
    (tmp_path / "ledger.log.compacting").write_bytes(b"0" * 10)
    checkpoints(tmp_path, 20)
    file = LedgerFile(Full(), tmp_path, 10)
    assert not (tmp_path / "ledger.log.compacting").exists()  # what a killed broker left of a new file
    file.fold(file.due())
    assert "no space left" in caplog.text and file.due() == 0  # tried again with the next checkpoint
    checkpoints(tmp_path, 40)
    assert file.due() == 39


@pytest.mark.parametrize("kept", [2, 5])
def test_a_run_can_go_on_after_every_checkpoint_that_is_kept(tmp_path, kept):
    """The rule that a resume agrees by: the checkpoint's step and all after it are listed."""
    with Ledger(tmp_path / "ledger.log") as ledger:
        file = LedgerFile(ledger, tmp_path, 1)
        for last in range(10, 100, 10):
            steps(ledger, last - 9, last)
            numbers = range(max(10, last - 10 * (kept - 1)), last + 1, 10)
            checkpoints(tmp_path, *numbers)
            if upto := file.due():
                file.fold(upto)
            for number in numbers:
                runs, history = ledger_history(tmp_path / "ledger.log", number - 1)
                assert history[0]["step"] == number and runs == ([(4, 4 * number)] if number > 1 else [])


def test_the_log_is_on_disk_before_the_ledger_is_folded(tmp_path, monkeypatch):
    """Folding writes the ledger, and what it calls ready must be in the log."""
    checkpoints(tmp_path, 2)
    sockets = private_folder()
    server = Server(config(buffer={"ledger_growth_bytes": 1}), tmp_path, f"ipc://{sockets}/broker")
    try:
        server.broker.scheduler.joined("g0")
        server.broker.slots("g0", m.Slots(4), 0.0)
        server.broker.trajectory("g0", m.FinishedRollout(frames=encode_frames(trajectory(0))), 0.0)
        assert server.memory is not None and server.memory.log is not None and server.memory.log.due
        waiting = []
        monkeypatch.setattr(LedgerFile, "fold", lambda self, upto: waiting.append((upto, server.memory.log.due)))
        server._tick()
        assert waiting == [(1, False)]
    finally:
        server.actor.close(0)
        server.memory.close()
        shutil.rmtree(sockets)
