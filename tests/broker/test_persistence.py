"""The journal of a broker: what a new segment must still list, and what becomes of a journal that nobody needs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.broker.broker_world import config

from sao._core import Ledger, ledger_history
from sao.broker.persistence import Persistence
from sao.broker.tasks import TaskBook
from sao.errors import LedgerError
from sao.transport.messages import KeptTurn


def steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        ordinals = [4 * step + n for n in range(4)]
        for ordinal in ordinals:
            ledger.generating(ordinal, ledger.issue(ordinal))
            ledger.ready(ordinal, 0, 10)
        ledger.lease(ordinals, step)
        ledger.trained(step, step, 40, 0)


def checkpoints(folder: Path, *numbers: int) -> None:
    for path in (folder / "checkpoints").glob("step-*"):
        path.rmdir()
    for number in numbers:
        (folder / "checkpoints" / f"step-{number}").mkdir(parents=True)


def opened(folder: Path, growth: int, durability: str = "process") -> Persistence:
    return Persistence.open(config(buffer={"ledger_growth_bytes": growth, "durability": durability}), folder)


def test_steps_before_the_oldest_checkpoint_are_summed_up_when_a_segment_begins(tmp_path):
    persistence = opened(tmp_path, 2048)
    ledger = persistence.ledger
    steps(ledger, 1, 10)
    checkpoints(tmp_path, 8, 10)
    persistence.commit({"line": 0})
    assert not ledger.full and len(ledger_history(tmp_path / "journal")[1]) == 10  # still short
    steps(ledger, 11, 60)
    persistence.commit({"line": 0})
    assert ledger_history(tmp_path / "journal", 7)[1][0]["step"] == 8
    with pytest.raises(LedgerError, match="steps up to 7 are no longer listed"):
        ledger_history(tmp_path / "journal", 6)
    checkpoints(tmp_path, 30, 60)
    steps(ledger, 61, 110)
    before = ledger.counts(), ledger.tokens()
    persistence.commit({"line": 0})
    assert (ledger.counts(), ledger.tokens()) == before
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["00000003.journal"]
    persistence.close()
    with Ledger(tmp_path / "journal") as again:
        assert (again.counts(), again.tokens()) == before
        again.rewind(30)  # as a resume from the oldest checkpoint does
        again.check()


@pytest.mark.parametrize(("growth", "saved"), [(1000, ()), (1000, (1,)), (0, (90,))])
def test_without_a_checkpoint_or_a_limit_everything_stays_listed(tmp_path, growth, saved):
    checkpoints(tmp_path, *saved)
    persistence = opened(tmp_path, growth)
    for step in range(1, 100):
        steps(persistence.ledger, step, step)
        persistence.commit({"line": 0})
    assert [step["step"] for step in ledger_history(tmp_path / "journal")[1]] == list(range(1, 100))
    persistence.close()


class Failing:
    """A ledger whose journal fails so often, as one on a full disk."""

    def __init__(self, ledger: Ledger, times: int) -> None:
        self._ledger, self.left, self.mended = ledger, times, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._ledger, name)

    def flush(self) -> None:
        if self.left:
            self.left -= 1
            raise LedgerError("journal: cannot be written: No space left on device (os error 28)")
        self._ledger.flush()

    def mend(self) -> None:
        self.mended += 1
        self._ledger.mend()


def test_a_turn_is_written_again_while_the_disk_is_full_and_for_so_long_only(tmp_path):
    with Ledger(tmp_path / "journal") as ledger:
        disk = Failing(ledger, 3)
        persistence = Persistence(disk, patience_s=10.0)
        steps(ledger, 1, 1)
        persistence.commit({})
        assert (disk.left, disk.mended) == (0, 4) and not ledger.due
        disk.left, persistence._patience_s = 1000, 0.4
        steps(ledger, 2, 2)
        began = time.monotonic()
        for _ in range(20):  # once it was waited for in vain, nothing is waited for again
            with pytest.raises(LedgerError, match="No space left"):
                persistence.commit({})
        assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("kept", [2, 5])
def test_a_run_can_go_on_after_every_checkpoint_that_is_kept(tmp_path, kept):
    """The rule that a resume agrees by: the checkpoint's step and all after it are listed."""
    persistence = opened(tmp_path, 1)
    for last in range(10, 100, 10):
        steps(persistence.ledger, last - 9, last)
        numbers = range(max(10, last - 10 * (kept - 1)), last + 1, 10)
        checkpoints(tmp_path, *numbers)
        persistence.commit({"line": 0})
        for number in numbers:
            runs, history = ledger_history(tmp_path / "journal", number - 1)
            assert history[0]["step"] == number and runs == ([(4, 4 * number)] if number > 1 else [])
    persistence.close()


def test_a_segment_that_cannot_be_begun_does_not_end_the_run(tmp_path, caplog):
    persistence = opened(tmp_path, 2000)
    steps(persistence.ledger, 1, 50)
    (tmp_path / "journal" / "00000002.new").mkdir()  # in its way
    persistence.commit({"line": 0})
    assert "the journal stays long" in caplog.text and not persistence.ledger.full
    (tmp_path / "journal" / "00000002.new").rmdir()
    steps(persistence.ledger, 51, 100)
    persistence.commit({"line": 0})
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["00000002.journal"]
    persistence.close()


def test_a_journal_that_nobody_goes_on_from_is_one_short_segment(tmp_path):
    persistence = opened(tmp_path, 0)
    ledger = persistence.ledger
    ledger.generating(0, ledger.issue(0))
    ledger.ready(0, 0, 3)
    ledger.trajectory(0, [b"header", bytes(100_000)])
    persistence.commit({"line": 0})
    ledger.drop(0, 0, "run_ended")
    persistence.commit({"line": 0})
    persistence.close(ended=True)
    (segment,) = (tmp_path / "journal").iterdir()
    assert segment.stat().st_size < 1000


def test_without_durability_only_the_ledger_is_written(tmp_path):
    persistence = opened(tmp_path, 0, "off")
    book, frames = TaskBook(persistence), (b"header", bytes(100_000))
    task = book.start("g0", 0.0)
    book.turn(KeptTurn(0, 0, 0, 4, 0, frames=frames))
    assert task.turn_tokens == 4  # the broker itself can still hand them out
    book.ready(task, {"n_tokens": 9, "n_actions": 8, "min_version": 0, "max_version": 0}, frames, 0.0)
    persistence.commit({"line": 0})
    persistence.close()
    assert sum(path.stat().st_size for path in (tmp_path / "journal").iterdir()) < 1000
    again = opened(tmp_path, 0, "off")
    assert not again.note and again.ledger.state(0) == "ready" and not TaskBook(again).restored
    again.close()


def test_a_step_is_taken_back_once_in_a_line(tmp_path):
    persistence = opened(tmp_path, 0)
    steps(persistence.ledger, 1, 4)
    persistence.commit({"line": 0})
    persistence.close()
    settings = config()
    for line, taken_back, goes_on in ((1, [4, 3], False), (1, [], True), (2, [5], False)):
        persistence = Persistence.open(settings, tmp_path, 2, line)
        assert [step["step"] for step in persistence.taken_back] == taken_back
        assert bool(persistence.note) is goes_on
        if goes_on:
            _again(persistence.ledger, 5)
        persistence.commit({"line": line})
        persistence.close()


def _again(ledger: Ledger, step: int) -> None:
    """Trains the tasks that were taken back."""
    ordinals = [ordinal for ordinal, _, _ in ledger.unfinished()]
    for ordinal in ordinals:
        attempt = ledger.issue(ordinal)
        ledger.generating(ordinal, attempt)
        ledger.ready(ordinal, attempt, 10)
    ledger.lease(ordinals, 99)
    ledger.trained(99, step, 10 * len(ordinals), 0)
