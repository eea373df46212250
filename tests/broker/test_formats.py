"""Formats of trajectories: who joins with what, and sidecars from a generator to the learner."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from broker.broker_world import BATCH, World, batches_of, config
from broker.peers import Generator, Learner, Process, Watcher, broker
from broker.test_process import until
from broker.test_recovery import Lives

from sao import _core
from sao.broker import formats, wal
from sao.errors import WireError
from sao.trajectory import decode, split_frames

BOTH = list(_core.WIRE_FORMATS)
SIDECARS = {
    "experts": np.arange(40, dtype=np.uint8).reshape(5, 8),
    "image": np.linspace(0, 1, 30_000, dtype=np.float32).reshape(100, 100, 3),
    "none": np.zeros((0, 3), np.int64),
}


def unharmed(frames) -> None:
    """Every trajectory has all of `SIDECARS`, bit by bit."""
    for header, payload, *sidecars in split_frames(frames):
        found = decode(header, payload, sidecars=sidecars).sidecars
        assert list(found) == list(SIDECARS)
        for name, array in SIDECARS.items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name


@pytest.mark.parametrize(
    ("offered", "agreed"), [([1], (1,)), ([1, 2], (1, 2)), ([2, 99], (2,)), (None, (1,)), ([2, 1, 1], (1, 2))]
)
def test_what_both_know_is_agreed_on(offered, agreed):
    assert formats.of({} if offered is None else {"formats": offered}) == agreed


@pytest.mark.parametrize("offered", [[99], [], ["2"], [[1]], [True], [{}]])
def test_what_cannot_be_agreed_on_is_refused_by_name(offered):
    with pytest.raises(WireError, match="formats: "):
        formats.of({"formats": offered})


def test_sidecars_are_handed_to_a_learner_that_reads_them_and_count_as_bytes():
    world = World(config())
    world.join("g0", 8)
    world.answer_all("g0", sidecars=SIDECARS)
    size = sum(array.nbytes for array in SIDECARS.values())
    assert world.state.store.stats()["bytes"] > 8 * size and world.state.store.largest_bytes > size
    world.take()
    unharmed(world.frames[-1])
    world.ledger.check()


def test_one_that_is_too_large_with_its_sidecars_is_dropped_by_name():
    world = World(config(buffer={"max_bytes": 1 << 16}))
    world.join("g0", 1)
    assert world.answer("g0", world.pop("g0"), sidecars=SIDECARS) == {"accepted": False, "reason": "larger_than_buffer"}
    assert world.ledger.tokens()["dropped"] == {"larger_than_buffer": 5}


def test_so_is_one_that_is_too_large_for_a_record_of_the_log(monkeypatch):
    monkeypatch.setattr(wal, "MAX_BODY_BYTES", 1 << 16)
    world = World(config())
    world.join("g0", 1)
    assert world.answer("g0", world.pop("g0"), sidecars=SIDECARS) == {"accepted": False, "reason": "larger_than_buffer"}


def test_a_damaged_sidecar_is_refused():
    world = World(config())
    world.join("g0", 1)
    header, payload, *more = map(bytes, world.encoded(world.pop("g0"), sidecars=SIDECARS))
    for frames in ([more[0][:-1] + b"\xff", *more[1:]], more[:2], [*more, b""], []):
        answer = world.state.trajectory("g0", (header, payload, *frames), 0.0)
        assert not answer["accepted"] and answer["reason"].startswith("corrupt: sidecars"), answer
    assert world.state.trajectory("g0", (header, payload, *more), 0.0)["accepted"]


def test_a_learner_that_reads_format_1_gets_nothing_else():
    world = World(config())
    world.join("g0", 8)
    world.state.generator_joined("old", 0.0, (1,))
    world.state.learner_joined({"session": "a"}, (1,))
    assert world.pushed("formats", "g0") == [{"formats": [1]}]
    assert not world.pushed("formats", "old")  # it writes nothing else, and does not know the message
    answer = world.answer("g0", world.pop("g0"), sidecars=SIDECARS)  # it was on its way
    assert answer == {"accepted": False, "reason": "unreadable_format"}
    assert "format 2, the learner reads [1]" in world.pushed("event")[-1]["text"]
    batches_of(world, 1)
    world.state.learner_joined({"session": "b", "step": 1}, (1, 2))
    assert world.pushed("formats", "g0")[-1] == {"formats": [1, 2]}
    assert world.answer("g0", world.pop("g0"), sidecars=SIDECARS)["accepted"]


def test_a_learner_that_cannot_read_what_waits_is_refused_and_nothing_is_lost():
    world = World(config())
    world.join("g0", 8)
    world.answer_all("g0", sidecars=SIDECARS)
    with pytest.raises(
        WireError, match=r"hello.formats: the learner reads \[1\], trajectories of format 2 wait for it"
    ):
        world.state.learner_joined({"session": "a"}, (1,))
    assert not world.pushed("formats", "g0") and world.state.formats == formats.OURS
    world.state.learner_joined({"session": "b"}, (1, 2))
    world.take()
    unharmed(world.frames[-1])


def test_what_the_learner_reads_and_sidecars_outlive_the_broker(tmp_path):
    lives = Lives(tmp_path)
    lives.join("g0", 8)
    for task in lives.tasks["g0"]:
        assert lives.give("g0", task["ordinal"], sidecars=SIDECARS)["accepted"]
    lives.commit_turn()
    lives.again()
    assert lives.state.formats == formats.OURS
    lives.state.take("t", BATCH, 0.0)
    unharmed(lives.frames[-1])
    lives.ledger.check()
    lives.state.formats = (1,)
    lives.commit_turn()
    lives.again()
    assert lives.state.formats == (1,)


def test_sidecars_go_from_a_generator_through_a_killed_broker_to_the_learner(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 100}) as process:
        cfg, endpoint = process.config, process.endpoint
        newer = Generator(endpoint, cfg, "g9")
        with pytest.raises(WireError, match=r"formats: the peer reads \[99\], this build \[1, 2\]"):
            newer.join(formats=[99])
        newer.client.close()
        old = Generator(endpoint, cfg, "g1").join()
        assert old.welcome["formats"] == [1]
        old.client.close()
        watcher = Watcher(endpoint, cfg).join()
        generator = Generator(endpoint, cfg)
        generator.facts = {"sidecars": SIDECARS}
        generator.start(formats=[*BOTH, 99])
        assert generator.welcome["formats"] == BOTH
        until(lambda: watcher.snapshot()["ready"] == 8)
        assert watcher.snapshot()["buffer"]["bytes"] > 8 * 120_000
        older = Learner(endpoint, cfg, name="old")
        with pytest.raises(WireError, match="trajectories of format 2 wait for it"):
            older.join(formats=[1])
        older.client.close()
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(5)
        generator.close()
        watcher.client.close()
        again = Process(cfg, process.folder, endpoint)
        try:
            learner = Learner(endpoint, cfg, incarnation=1).join(formats=BOTH)
            batch = learner.take()
            unharmed(batch.frames)
            learner.commit(batch, 1)
            learner.client.close()
        finally:
            again.child.kill()
            again.child.wait(5)


def test_an_old_learner_trains_with_new_generators(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 2}) as process:
        cfg, endpoint = process.config, process.endpoint
        learner = Learner(endpoint, cfg).join()
        generator = Generator(endpoint, cfg).start(formats=BOTH)
        assert learner.welcome["formats"] == generator.welcome["formats"] == [1]
        learner.train(2)
        generator.close()
        learner.client.close()
        assert process.wait(10) == 0
