"""Steps that are taken back, and what a ledger's file says was trained, from Python."""

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
    path = tmp_path / "ledger.log"
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
    with Ledger(tmp_path / "ledger.log") as ledger:
        train(ledger, 4, [0])
        with pytest.raises(LedgerError, match="cannot go back to step 5: the last committed step is 4"):
            ledger.rewind(5)
        assert ledger.rewind(4) == []
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger_history(tmp_path / "none")
    with pytest.raises(LedgerError, match=r"^after_step: -1 is not an integer from 0 to"):
        ledger_history(tmp_path / "ledger.log", -1)


def test_a_compacted_file_tells_what_is_left_and_refuses_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "ledger.log"
    with Ledger(path) as ledger:
        for step in range(1, 31):
            ordinals = [2 * step, 2 * step + 1]
            for ordinal in ordinals:
                ledger.generating(ordinal, ledger.issue(ordinal))
                ledger.ready(ordinal, 0, 10)
            ledger.lease(ordinals, 0)
            ledger.trained(0, step, 15, 5)
        ledger.sync()
        before = (ledger.counts(), ledger.tokens(), ledger_history(path, 25))
        old, new = ledger.compact(25)
        assert new < old / 3 and path.stat().st_size == new
        assert (ledger.counts(), ledger.tokens(), ledger_history(path, 25)) == before
        with pytest.raises(
            LedgerError,
            match=rf"^{re.escape(str(path))}: was compacted: steps up to 25 are no longer listed one by one; "
            "asked for those after 24$",
        ):
            ledger_history(path, 24)
        ledger.issue(62)
        assert [step["step"] for step in ledger.rewind(28)] == [30, 29]
        after = ledger.tokens()
    with Ledger(path) as again:
        assert again.tokens() == after and again.last_step == 28 and again.state(62) == "issued"
        again.check()


def test_a_file_that_could_not_be_made_short_leaves_nothing_on_a_full_disk(tmp_path):
    path = tmp_path / "ledger.log"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path) as ledger:
        for step in range(1, 31):
            train(ledger, step, [2 * step, 2 * step + 1])
        ledger.sync()
        size, before = path.stat().st_size, ledger.tokens()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file may become longer
        try:
            with pytest.raises(LedgerError, match=r"ledger.log: cannot be compacted: File too large"):
                ledger.compact(5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [found.name for found in tmp_path.iterdir()] == ["ledger.log"] and path.stat().st_size == size
        train(ledger, 31, [100])
        assert ledger.compact(30)[1] < size and ledger.tokens()["trained"] == before["trained"] + 5
