"""A broker's state that was killed goes on from its log and ledger: nothing lost, nothing twice, the books exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.broker.broker_world import BATCH, World, config, trajectory

from sao.broker import scheduler
from sao.broker.broker import Broker
from sao.broker.persistence import Persistence
from sao.trajectory import encode_frames
from sao.transport import messages as m


class Lives(World):
    """A world whose broker is killed and started again; every turn ends with a commit."""

    def __init__(self, folder: Path, **sections) -> None:
        super().__init__(config(**sections))
        self.folder = folder
        self.again()

    def again(self) -> None:
        """SIGKILL and a new broker: what was not committed is gone."""
        if hasattr(self, "persistence"):
            killed, journal = self.folder / "killed", self.folder / "journal"
            shutil.copytree(journal, killed)
            self.persistence.close()
            shutil.rmtree(journal)
            killed.rename(journal)
        self.persistence = Persistence.open(self.config, self.folder)
        self.ledger = self.persistence.ledger
        self.broker = Broker(self.config, self.persistence, self.outbox, self.now)
        self.tasks.clear()

    def commit_turn(self) -> None:
        self.persistence.commit({**self.broker.note(), "line": 0})

    def give(self, name: str, ordinal: int, attempt: int = 0, **facts) -> str:
        return self.deliver(name, encode_frames(trajectory(ordinal, attempt, **facts)))

    def step(self, lease: int, step: int, tokens: int) -> None:
        weights = m.WeightsRef(step, f"/w/{step}", f"{step:032x}")
        self.broker.commit(m.Commit(lease, step, step, tokens, 0, {}, weights), self.now)


@pytest.fixture
def lives(tmp_path):
    return Lives(tmp_path)


def test_ready_leased_and_running_outlive_the_broker(lives):
    lives.join("g0", 8)
    started = [task.ordinal for task in lives.tasks["g0"]]
    for ordinal in started[:5]:
        assert lives.give("g0", ordinal) == ""
    lives.broker.take("t", BATCH, 0.0)
    lease = lives.batches[-1].lease
    lives.commit_turn()
    lives.again()
    book = lives.broker.book
    counts = book.ledger.counts()
    assert (counts["ready"], counts["leased"], len(book.running)) == (1, 4, 3)
    assert lives.give("g0", started[0]) == "duplicate"  # its answer was lost, the generator asks again
    lives.broker.scheduler.joined("g0")
    held = (*((ordinal, 0) for ordinal in started[5:7]), (99, 0))
    lives.broker.generator_joined("g0", m.Hello("generator", "g0", 1, "", tasks=held), 1.0)
    assert lives.pushed(m.CancelTask, "g0") == [m.CancelTask(99, 0)]
    assert (
        sorted(book.running) == started[5:7] and len(book.queue) == 1
    )  # the push of the last one was lost with the broker
    lives.step(lease, 1, 4 * 5)
    lives.commit_turn()
    lives.again()
    assert (lives.broker.run.step, lives.broker.versions.current, lives.broker.run.shown.step) == (1, 1, 1)
    lives.step(lease, 1, 4 * 5)  # the learner asks again
    assert (lives.broker.run.step, lives.broker.versions.current) == (1, 1)
    lives.ledger.check()
    assert lives.ledger.tokens()["sampled"] == 25 and not any(lives.ledger.tokens()["dropped"].values())


def test_a_batch_whose_answer_was_lost_goes_out_again(lives):
    lives.join("g0", 8)
    for task in lives.tasks["g0"][:4]:
        lives.give("g0", task.ordinal)
    lives.broker.take("t", BATCH, 0.0)
    lives.commit_turn()
    lives.again()
    lives.broker.take("t", BATCH, 1.0)
    first, second = lives.batches
    assert first.ordinals == second.ordinals and first.lease != second.lease


def test_a_damaged_record_is_named_and_its_task_is_played_again(lives, tmp_path):
    lives.join("g0", 8)
    ordinals = [task.ordinal for task in lives.tasks["g0"]]
    for ordinal in ordinals[:3]:
        lives.give("g0", ordinal)
    lives.commit_turn()
    path = min((tmp_path / "journal").iterdir())
    data = bytearray(path.read_bytes())
    second = data.find(b"SAO\3", data.find(b"SAO\3") + 1)
    data[second + 100] ^= 1
    path.write_bytes(data)
    lives.again()
    texts = [body.text for body in lives.pushed(m.Event)]
    assert any(f"{path} byte" in text and "is damaged" in text for text in texts)
    assert lives.ledger.counts()["ready"] == 2 and len(lives.broker.book.queue) == 1
    lives.ledger.check()
    assert lives.ledger.tokens()["dropped"] == {"log_damaged": 5}


def test_a_turn_of_the_loop_that_was_not_committed_is_gone_as_a_whole(lives):
    lives.join("g0", 8)
    lives.commit_turn()
    ordinal = lives.tasks["g0"][0].ordinal
    lives.give("g0", ordinal)
    lives.again()  # its frames are in the journal, what made them count is not
    assert lives.ledger.state(ordinal) == "generating"
    assert lives.give("g0", ordinal) == ""  # nothing was acknowledged, the generator sends it again
    lives.commit_turn()
    lives.again()
    assert lives.ledger.state(ordinal) == "ready" and lives.give("g0", ordinal) == "duplicate"
    assert lives.ledger.tokens()["sampled"] == 5


def test_answers_stay_known_after_two_kills(lives):
    lives.join("g0", 8)
    ordinals = [task.ordinal for task in lives.tasks["g0"]][:BATCH]
    for ordinal in ordinals:
        assert lives.give("g0", ordinal) == ""
    lives.broker.take("t", BATCH, 0.0)
    lives.step(lives.batches[-1].lease, 1, 5 * BATCH)
    lives.commit_turn()
    for _ in range(2):  # after the first one nothing lives in the segment that holds the answers
        lives.again()
        lives.commit_turn()
    assert lives.give("g0", ordinals[0]) == "duplicate"
    assert lives.ledger.tokens()["sampled"] == 5 * BATCH


def turn(lives: Lives, task: m.TaskEntry, part: int) -> None:
    lives.broker.book.turn(m.KeptTurn(task.ordinal, task.attempt, part, 4, 0, frames=(b"h%d" % part, b"p" * 10)))


def test_a_lost_rollout_goes_on_after_its_turns_also_when_the_broker_dies_too(lives):
    lives.join("g0", 1)
    (task,) = lives.tasks["g0"]
    for part in (0, 1, 3):  # one that does not follow is left out
        turn(lives, task, part)
    lives.commit_turn()
    lives.again()
    lives.join("g1", 0)
    lives.broker.generator_left("g0", "killed", 1.0)
    lives.slots("g1", 1)
    (again,) = lives.tasks["g1"]
    assert again == replace(task, attempt=1, turns=2) and lives.frames_sent[-1] == (b"h0", b"p" * 10, b"h1", b"p" * 10)
    turn(lives, again, 2)
    assert lives.broker.book.live[task.ordinal].turn_tokens == 12
    lives.broker.book.diverged(again.ordinal, again.attempt)
    assert lives.ledger.tokens()["dropped"] == {"generator_lost": 0, "diverged": 12}
    lives.commit_turn()
    lives.again()
    assert not lives.broker.book.turn_bytes
    lives.ledger.check()


def test_turns_whose_tokens_were_dropped_stay_dropped_when_the_broker_dies(lives):
    lives.join("g0", 1)
    (task,) = lives.tasks["g0"]
    for part in (0, 1):
        turn(lives, task, part)
    lives.commit_turn()
    assert lives.broker.book.again(lives.broker.book.live[task.ordinal], "deadline")
    lives.commit_turn()
    lives.again()
    assert not lives.broker.book.turn_bytes and lives.ledger.tokens()["dropped"] == {"deadline": 8}
    lives.join("g1", 1)
    (again,) = lives.tasks["g1"]
    assert again == replace(task, attempt=1)
    turn(lives, again, 0)
    lives.give("g1", task.ordinal, attempt=1)
    lives.broker.book.requeue(lives.broker.book.live[task.ordinal], "rewound")  # as when steps are lost
    lives.commit_turn()
    lives.again()
    assert not lives.broker.book.turn_bytes
    lives.ledger.check()


def test_many_turns_go_out_in_several_messages(lives, monkeypatch):
    monkeypatch.setattr(scheduler, "FRAMES", 6)
    lives.join("g0", 5)
    for task in lives.tasks["g0"]:
        for part in range(2):
            turn(lives, task, part)
    lives.broker.generator_left("g0", "killed", 1.0)
    lives.join("g1", 5)
    assert [len(frames) for frames in lives.frames_sent] == [8, 8, 4]
    assert [task.turns for task in lives.tasks["g1"]] == [2] * 5


def test_turns_are_bounded_in_bytes(lives):
    lives.persistence.prefix_bytes = 30
    lives.join("g0", 3)
    first, second, _ = lives.tasks["g0"]
    book = lives.broker.book
    turn(lives, first, 0)
    turn(lives, second, 0)
    turn(lives, first, 1)  # no room: this rollout would begin anew
    assert not book.live[first.ordinal].turns and book.live[second.ordinal].turns and book.turn_bytes == 12
    lives.give("g0", second.ordinal)
    assert book.turn_bytes == 0


def test_the_journal_of_a_long_run_stays_small_and_answers_stay_known(tmp_path):
    lives = Lives(tmp_path, run={"steps": 1000}, buffer={"ledger_growth_bytes": 20_000})
    lives.join("g0", 4)
    largest = 0
    for step in range(1, 400):
        for task in list(lives.tasks["g0"])[-4:]:
            lives.give("g0", task.ordinal, version=step - 1)
        lives.broker.take(step, BATCH, 0.0)
        lives.step(lives.batches[-1].lease, step, 20)
        lives.slots("g0", 4)
        lives.commit_turn()
        largest = max(largest, lives.ledger.n_bytes)
    assert largest < 100_000 and len(list((tmp_path / "journal").iterdir())) < 6
    lives.again()
    assert (lives.broker.run.step, lives.broker.versions.current) == (399, 399)
    assert lives.give("g0", 4 * 390) == "duplicate"


def test_turns_of_a_rollout_that_was_begun_anew_do_not_come_back_behind_new_ones(lives):
    lives.join("g0", 2)
    task, other = lives.tasks["g0"]
    for part in (0, 1, 2):
        turn(lives, task, part)
    turn(lives, other, 0)  # lives in the same segment, which therefore stays
    lost = lives.broker.book.live[task.ordinal].turn_tokens
    lives.broker.book.diverged(task.ordinal, task.attempt)
    lives.broker.book.turn(m.KeptTurn(task.ordinal, task.attempt, 0, 5, 0, frames=(b"other", b"q" * 10)))
    lives.commit_turn()
    lives.again()
    kept = lives.broker.book.live[task.ordinal]
    assert (kept.turns, kept.turn_tokens) == ([(b"other", b"q" * 10)], 5)
    assert lives.ledger.tokens()["sampled"] == lives.ledger.tokens()["dropped"]["diverged"] == lost
