"""Steps that are taken back, and what a ledger's journal says was trained, from Python."""

import re
import resource
from pathlib import Path

import pytest

from sao._core import Ledger, ledger_history
from sao.errors import LedgerError


def train(ledger, step, ordinals, tokens=6):
    for ordinal in ordinals:
        attempt = ledger.issue(ordinal)
        ledger.generating(ordinal, attempt)
        assert ledger.ready(ordinal, attempt, tokens)
    ledger.lease(ordinals, 1)
    ledger.trained(1, step, [tokens - 1] * len(ordinals), [1] * len(ordinals))


def test_lost_steps_are_played_again_and_tokens_are_conserved(tmp_path):
    path = tmp_path / "journal"
    with Ledger(path) as ledger:
        for step in (1, 2, 3):
            train(ledger, step, [2 * step, 2 * step + 1])
        taken_back = ledger.rewind(1)
        assert [(step["step"], step["tasks"]) for step in taken_back] == [(3, [(6, 0), (7, 0)]), (2, [(4, 0), (5, 0)])]
        assert (taken_back[0]["lease"], taken_back[0]["trained_tokens"], taken_back[0]["masked_tokens"]) == (1, 10, 2)
        assert ledger.tokens() == {"sampled": 36, "trained": 10, "masked": 2, "held": 0, "dropped": {"rewound": 24}}
        assert ledger.counts()["requeued"] == 4 and ledger.last_step == 1
        ledger.check()
        train(ledger, 2, [5, 4])
    runs, steps = ledger_history(path, 1)
    assert runs == [(2, 4)] and [step["tasks"] for step in steps] == [[(5, 1), (4, 1)]]
    assert ledger_history(path) == ([], ledger_history(path)[1]) and len(ledger_history(path)[1]) == 2
    with Ledger(path) as again:
        assert [ordinal for ordinal, *_ in again.unfinished()] == [6, 7]


def test_a_ledger_that_cannot_go_back_says_why(tmp_path):
    with Ledger(tmp_path / "journal") as ledger:
        train(ledger, 4, [0])
        with pytest.raises(LedgerError, match="cannot go back to step 5: the last committed step is 4"):
            ledger.rewind(5)
        assert ledger.rewind(4) == []
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger_history(tmp_path / "none")
    with pytest.raises(LedgerError, match=r"^after_step: -1 is not an integer from 0 to"):
        ledger_history(tmp_path / "journal", -1)


def test_a_new_segment_tells_what_is_left_and_refuses_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Ledger(path, segment_bytes=400) as ledger:
        for step in range(1, 31):
            train(ledger, step, [2 * step, 2 * step + 1])
        assert ledger.due
        ledger.sync()
        assert not ledger.due and ledger.full
        before = (ledger.counts(), ledger.tokens(), ledger_history(path, 25))
        old = ledger.n_bytes
        ledger.roll(25)
        assert not ledger.full
        assert ledger.n_bytes < old / 3 and ledger.n_bytes == sum(found.stat().st_size for found in path.iterdir())
        assert (ledger.counts(), ledger.tokens(), ledger_history(path, 25)) == before
        with pytest.raises(
            LedgerError,
            match=rf"^{re.escape(str(path))}: steps up to 25 are no longer listed one by one; asked for those after 24",
        ):
            ledger_history(path, 24)
        ledger.issue(62)
        assert [step["step"] for step in ledger.rewind(28)] == [30, 29]
        after = ledger.tokens()
    with Ledger(path) as again:
        assert again.tokens() == after and again.last_step == 28 and again.state(62) == "issued"
        again.check()


def test_a_full_disk_leaves_the_old_segment_and_ends_it_when_that_is_full_too(tmp_path):
    path = tmp_path / "journal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path) as ledger:
        for step in range(1, 31):
            train(ledger, step, [2 * step, 2 * step + 1])
        ledger.sync()
        size, before = ledger.n_bytes, ledger.tokens()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may become longer
        try:
            with pytest.raises(LedgerError, match=r"00000002.journal: cannot be written: File too large"):
                ledger.roll(5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [found.name for found in path.iterdir()] == ["00000001.journal"] and ledger.n_bytes == size
        train(ledger, 31, [100])
        ledger.roll(30)
        assert ledger.n_bytes < size and ledger.tokens()["trained"] == before["trained"] + 5
        ledger.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            ledger.issue(200)
            with pytest.raises(LedgerError, match=r"00000002.journal: cannot be written: File too large"):
                ledger.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for call in (ledger.flush, ledger.sync, lambda: ledger.issue(201), lambda: ledger.roll(0), ledger.close):
            with pytest.raises(LedgerError, match=r"00000002.journal: cannot be written: File too large"):
                call()
    with Ledger(path) as again:
        assert (again.last_step, again.state(200)) == (31, "unknown")


def test_frames_come_back_as_long_as_their_task_needs_them(tmp_path):
    path = tmp_path / "journal"
    with Ledger(path) as ledger:
        for ordinal in range(3):
            ledger.generating(ordinal, ledger.issue(ordinal))
            ledger.turn(ordinal, 0, [b"numbers", bytearray(b"turn"), memoryview(b"0123")[1:]])
        ledger.turn(1, 1, [b"one more"])
        ledger.begin_anew(2)
        assert ledger.ready(0, 0, 5)
        ledger.trajectory(0, [b"header", b"", bytes(100)])
        ledger.note = b"noted"
        assert ledger.answered(0, 0) and not ledger.answered(0, 0)
        for call, text in (
            (lambda: ledger.turn(9, 0, [b""]), "task 9 is unknown; wanted: unfinished, to keep frames"),
            (lambda: ledger.trajectory(1, [memoryview(b"0123")[::2]]), "frames: expected contiguous bytes"),
        ):
            with pytest.raises(LedgerError, match=f"^{text}"):
                call()
    turn = (b"numbers", b"turn", b"123")
    for life in range(2):
        with Ledger(path) as ledger:
            assert ledger.frames(0) == [(b"header", b"", bytes(100))]
            assert ledger.frames(1) == [turn, (b"one more",)] and ledger.frames(2) == [] == ledger.frames(9)
            assert ledger.note == b"noted" and not ledger.answered(0, 0) and not ledger.damage
            ledger.requeue(1)
            assert ledger.issue(1) == life + 1
            ledger.generating(1, life + 1)
            ledger.roll(0)
    with Ledger(path) as ledger:
        ledger.requeue(0)
        assert ledger.frames(0) == []
    assert Ledger().frames(0) == []
