"""Sidecars on their way from a generator through the broker to the learner."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from broker.broker_world import BATCH, World, config
from broker.peers import Generator, Learner, Process, Watcher, broker
from broker.test_recovery import Lives
from waiting import until

from sao.trajectory import decode, split_frames

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


def test_sidecars_are_handed_to_the_learner_and_count_as_bytes():
    world = World(config())
    world.join("g0", 8)
    world.answer_all("g0", sidecars=SIDECARS)
    size = sum(array.nbytes for array in SIDECARS.values())
    assert world.broker.store.buffer.stats()["bytes"] > 8 * size and world.broker.store.largest_bytes > size
    world.take()
    unharmed(world.frames[-1])
    world.ledger.check()


def test_one_that_is_too_large_with_its_sidecars_is_dropped_by_name():
    world = World(config(buffer={"max_bytes": 1 << 16}))
    world.join("g0", 1)
    assert world.answer("g0", world.pop("g0"), sidecars=SIDECARS) == "larger_than_buffer"
    assert world.ledger.tokens()["dropped"] == {"larger_than_buffer": 5}


def test_a_damaged_sidecar_is_refused():
    world = World(config())
    world.join("g0", 1)
    header, payload, *more = map(bytes, world.encoded(world.pop("g0"), sidecars=SIDECARS))
    for frames in ([more[0][:-1] + b"\xff", *more[1:]], more[:2], [*more, b""], []):
        answer = world.deliver("g0", (header, payload, *frames))
        assert answer.startswith("corrupt: sidecars"), answer
    assert world.deliver("g0", (header, payload, *more)) == ""


def test_sidecars_outlive_the_broker(tmp_path):
    lives = Lives(tmp_path)
    lives.join("g0", 8)
    for task in lives.tasks["g0"]:
        assert lives.give("g0", task.ordinal, sidecars=SIDECARS) == ""
    lives.commit_turn()
    lives.again()
    lives.broker.take("t", BATCH, 0.0)
    unharmed(lives.frames[-1])
    lives.ledger.check()


def test_sidecars_go_from_a_generator_through_a_killed_broker_to_the_learner(tmp_path: Path) -> None:
    with broker(tmp_path, run={"steps": 100}) as process:
        cfg, endpoint = process.config, process.endpoint
        watcher = Watcher(endpoint, cfg).join()
        generator = Generator(endpoint, cfg)
        generator.facts = {"sidecars": SIDECARS}
        generator.start()
        until(lambda: watcher.snapshot()["ready"] == 8)
        assert watcher.snapshot()["buffer"]["bytes"] > 8 * 120_000
        process.child.send_signal(signal.SIGKILL)
        process.child.wait(5)
        generator.close()
        watcher.client.close()
        again = Process(cfg, process.folder, endpoint)
        try:
            learner = Learner(endpoint, cfg, incarnation=1).join()
            batch = learner.take()
            unharmed(batch.frames)
            learner.commit(batch, 1)
            learner.client.close()
        finally:
            again.child.kill()
            again.child.wait(5)
