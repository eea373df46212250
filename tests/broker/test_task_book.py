"""The task book alone: every way through the life of a task, and the ledger that says the same."""

from __future__ import annotations

import pytest

from sao import _core
from sao.broker.persistence import Persistence
from sao.broker.tasks import MAX_ATTEMPTS, TaskBook, TrainingTask
from sao.errors import LedgerError
from sao.transport.messages import KeptTurn


def metadata(tokens: int = 5, version: int = 0) -> dict[str, int]:
    return {"n_tokens": 2 * tokens, "n_actions": tokens, "min_version": version, "max_version": version}


def book(group_size: int = 1) -> TaskBook:
    return TaskBook(Persistence(_core.Ledger()), group_size)


def finish(book: TaskBook, task: TrainingTask, now: float = 0.0, **more: int) -> None:
    book.ready(task, metadata(**more), (), now)


def where(book: TaskBook) -> tuple[int, int, int, int]:
    """Queued, running, ready, leased; always all that live."""
    counts = book.ledger.counts()
    found = len(book.queue), len(book.running), counts["ready"], counts["leased"]
    assert sum(found) == len(book.live)
    return found


def test_from_issue_to_training() -> None:
    b = book()
    task = b.start("g0", 1.0)
    assert (task.ordinal, task.attempt, where(b)) == (0, 0, (0, 1, 0, 0))
    assert b.current(0, 0, 5) is task
    finish(b, task, 2.0)
    assert where(b) == (0, 0, 1, 0) and b.head(1) == [0]
    assert b.lease(1, [0]) == [task] and where(b) == (0, 0, 0, 1)
    b.give_back(1, [0])
    assert where(b) == (0, 0, 1, 0)
    b.lease(2, [0])
    assert b.trained(2, [0], 1, 3, 2) == [task] and not b.live
    assert (b.commits, b.trained_before) == (1, 0)
    b.settle()
    assert b.ledger.tokens()["trained"] == 3 and b.ledger.tokens()["masked"] == 2


def test_a_task_that_is_started_again_comes_first_and_is_another_attempt() -> None:
    b = book()
    first = b.start("g0", 0.0)
    b.start("g0", 0.0)
    assert b.again(first, "deadline", 3) and where(b) == (1, 1, 0, 0)
    assert b.current(0, 0, 4) == "late" and b.current(0, 2, 0) == "unknown task"
    assert b.current(0, 0, 4) == "duplicate"  # what is heard twice is counted once
    again = b.start("g1", 1.0)
    assert (again.ordinal, again.attempt, again.generator) == (0, 1, "g1")
    assert b.ledger.tokens()["dropped"] == {"deadline": 3, "late": 4}


def test_the_last_attempt_is_not_started_again() -> None:
    b = book()
    for _ in range(MAX_ATTEMPTS - 1):
        assert b.again(b.start("g0", 0.0), "lost")
    task = b.start("g0", 0.0)
    assert not b.again(task, "lost") and where(b) == (0, 1, 0, 0)
    b.drop(task, "lost", 7)
    assert not b.live and b.dropped == {"lost": 1} and b.ledger.tokens()["dropped"]["lost"] == 7


def test_turns_go_on_with_the_next_attempt_unless_it_begins_anew() -> None:
    b = book()
    task = b.start("g0", 0.0)
    b.turn(KeptTurn(0, 0, 0, 4, 1, frames=(b"h", b"p")))
    b.turn(KeptTurn(0, 1, 1, 4, 1, frames=(b"late", b"")))  # of another attempt
    assert task.turns == [(b"h", b"p")]
    assert b.again(task, "generator_lost", goes_on=True) and task.turns == [(b"h", b"p")]
    b.start("g1", 0.0)
    b.diverged(0, 1)
    assert (
        task.turns == [] and b.turn_bytes == 0 and b.ledger.tokens()["dropped"] == {"generator_lost": 0, "diverged": 4}
    )
    b.ledger.check()


def test_a_task_that_was_ready_once_does_not_count_its_tokens_twice() -> None:
    b = book()
    task = b.start("g0", 0.0)
    finish(b, task)
    b.requeue(task, "rewound")
    b.drop(task, "run_ended")
    assert b.ledger.tokens() == {**b.ledger.tokens(), "sampled": 5, "dropped": {"rewound": 5, "run_ended": 0}}


def test_rewind_takes_back_what_is_newer_or_too_far_ahead() -> None:
    b = book()
    tasks = [b.start("g0", 0.0) for _ in range(4)]
    finish(b, tasks[0])
    finish(b, tasks[1], version=2)
    finish(b, tasks[3])
    b.turn(KeptTurn(2, 0, 0, 6, 2, frames=(b"h", b"p")))
    assert b.rewind(version=1, capacity=3) == [1, 3]
    assert where(b) == (2, 1, 1, 0) and tasks[2].turns == []
    assert b.ledger.tokens()["dropped"] == {"rewound": 5 + 5 + 6}


def test_groups_are_complete_in_order_and_broken_ones_are_found() -> None:
    b = book(group_size=2)
    tasks = [b.start("g0", 0.0) for _ in range(6)]
    for now, ordinal in enumerate((3, 2, 0, 1, 4)):
        finish(b, tasks[ordinal], float(now))
    assert b.whole_groups(4) == [2, 3, 0, 1] and b.whole_groups(6) == []
    assert [task.ordinal for task in b.group(5)] == [4, 5]
    b.drop(tasks[5], "failed")
    assert [task.ordinal for task in b.broken_groups()] == [4]


def test_what_an_earlier_broker_has_left_is_claimed_by_its_generators(tmp_path) -> None:
    b = book()
    for _ in range(2):
        b.start("", 0.0)
    assert b.claim(0, 0, "g0") and not b.claim(0, 0, "g1") and not b.claim(1, 1, "g0") and not b.claim(9, 0, "g0")
    assert [task.ordinal for task in b.running_on("g0")] == [0]
    assert [task.ordinal for task in b.running_on("")] == [1]


def test_books_that_do_not_close_are_refused_and_change_nothing() -> None:
    b = book()
    finish(b, b.start("g0", 0.0))
    b.lease(1, [0])
    with pytest.raises(LedgerError, match="holds 5"):
        b.trained(1, [0], 1, 4, 2)
    assert where(b) == (0, 0, 0, 1) and b.commits == 0
