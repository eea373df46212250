"""The buffer's bounds, the end of a run and the restart after any end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from broker.broker_world import BATCH, World, config

from sao import _core
from sao.transport import messages as m


def test_full_buffer_stops_permits_and_never_blocks() -> None:
    world = World(config(buffer={"max_trajectories": 6, "max_bytes": 1 << 20}, staleness={"max_lag": 3}))
    world.join("g0", 100)
    assert len(world.tasks["g0"]) == 6  # lag alone would permit 16
    world.answer_all("g0")
    assert world.broker.scheduler.permits() == 0
    world.take()
    assert world.broker.scheduler.permits() == 0  # leased ones take room
    world.commit()
    world.slots("g0", 100)
    assert len(world.tasks["g0"]) == 4


def test_larger_rollouts_than_ever_seen_wait_and_are_not_lost() -> None:
    world = World(config(buffer={"max_trajectories": 64, "max_bytes": 65536}, staleness={"max_lag": 7}))
    world.join("g0", 100)
    n = len(world.tasks["g0"])
    assert 8 < n < 32  # room in bytes for the expected size
    for _ in range(n):
        assert world.answer("g0", world.pop("g0"), n_sampled=800) == ""  # 7 KB each
    snapshot_waiting = len(world.broker.store.waiting)
    assert snapshot_waiting > 0
    assert world.broker.scheduler.permits() == 0
    seen: list[int] = []
    while world.ledger.counts()["ready"]:
        world.take()
        seen += world.batches[-1].ordinals
        world.commit()
        if len(seen) == n // BATCH * BATCH:
            break
    assert seen == list(range(len(seen)))
    world.ledger.check()


def test_what_waits_for_room_grows_old_like_the_rest() -> None:
    """A rollout outside the full buffer that has become too old meanwhile is dropped for its age, not trained."""
    world = World(
        config(
            buffer={"max_trajectories": 64, "max_bytes": 65536},
            staleness={"max_lag": 2, "stale": "drop"},
            learner={"batch_trajectories": 2},
        )
    )
    world.join("g0", 6)
    for _ in range(6):
        assert world.answer("g0", world.pop("g0"), n_sampled=1500) == ""  # 13.6 KB each: four fit
    assert len(world.broker.store.waiting) == 2
    for version in range(1, 4):  # none of it is taken
        world.broker._publish(m.WeightsRef(version, f"/w/{version}", f"f{version}"))
    world.broker.tick(world.now)
    assert len(world.broker.store.waiting) == world.ledger.counts()["ready"] == 0
    assert world.ledger.tokens()["dropped"] == {"stale": 9000}
    world.ledger.check()


def test_a_buffer_too_small_for_a_batch_is_named() -> None:
    world = World(config(buffer={"max_trajectories": 64, "max_bytes": 65536}))
    world.join("g0", 8)
    for _ in range(8):
        world.answer("g0", world.pop("g0"), n_sampled=3000)
    world.slots("g0", 8)
    world.take()
    assert world.broker.run.done is not None and world.broker.run.done.failed
    assert "buffer.max_bytes = 65536" in world.broker.run.done.reason


def test_one_that_can_never_fit_is_refused_by_name() -> None:
    world = World(config(buffer={"max_trajectories": 64, "max_bytes": 65536}))
    world.join("g0", 8)
    assert world.answer("g0", world.pop("g0"), n_sampled=8000) == "larger_than_buffer"


def test_end_of_the_run_closes_the_ledger() -> None:
    world = World(config(run={"steps": 2}))
    world.join("g0", 8)
    world.take()
    world.answer_all("g0")
    world.commit()
    world.take()
    world.commit()
    assert world.broker.run.done is not None
    assert world.broker.run.done.reason == "all steps done"
    assert not world.broker.run.done.failed
    assert world.ledger.unfinished() == []
    tokens = world.ledger.tokens()
    assert tokens["held"] == 0
    assert tokens["sampled"] == tokens["trained"] == 40
    world.take()
    assert world.stopped_takes[-1] == "all steps done"
    assert world.pushed(m.Stop, "g0")


def test_the_first_reason_ends_the_run() -> None:
    world = World()
    world.broker.finish("one", ok=False)
    world.broker.finish("two", ok=True)
    (done,) = world.pushed(m.Done)
    assert (done.reason, done.failed, world.broker.run.ending) == ("one", True, "one")


def test_interrupted_tasks_stay_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    world = World(ledger=path)
    world.join("g0", 6)
    world.answer("g0", world.pop("g0"))
    world.broker.finish("interrupted", ok=False)
    world.ledger.close()
    again = World(ledger=path)
    again.join("g0", 8)
    assert [(t.ordinal, t.attempt) for t in again.tasks["g0"]] == [(o, 1) for o in range(6)] + [(6, 0), (7, 0)]
    assert again.ledger.tokens()["dropped"] == {"restart": 5}


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment_every_task_is_somewhere_once(seed: int, tmp_path: Path) -> None:
    """No task is lost or trained twice, whatever the moment at which the broker dies."""
    path, rng = tmp_path / "journal", random.Random(seed)
    trained: list[int] = []
    for _ in range(3):
        world = World(config(run={"steps": 1000, "max_failures_in_a_row": 10**6}), ledger=path)
        world.broker.run.step = len(trained) // BATCH
        world.join("g0", 6)
        for _ in range(rng.randrange(5, 60)):
            tasks = world.tasks.get("g0", [])
            if tasks and rng.random() < 0.8:
                task = tasks.pop(rng.randrange(len(tasks)))
                world.fail("g0", task) if rng.random() < 0.2 else world.answer("g0", task)
            elif world.broker.leases.open:
                trained += world.batches[-1].ordinals
                world.commit(weights=rng.random() < 0.5)
            elif not world.broker.leases.takes:
                world.take()
            world.slots("g0", 6 - len(world.tasks["g0"]))
        world.ledger.sync()  # what a killed process leaves: all that was written, nothing more
        counts, issued = world.ledger.counts(), world.ledger.next_ordinal
        assert sum(counts.values()) == issued
        world.ledger.close()
    final = _core.Ledger(str(path))
    unfinished = {ordinal for ordinal, _, _ in final.unfinished()}
    assert len(trained) == len(set(trained)) == final.counts()["trained"]
    assert unfinished.isdisjoint(trained)
    assert len(unfinished) + len(trained) + final.counts()["dropped"] == final.next_ordinal
    final.check()
    final.close()


def test_a_new_buffer_size_wins_over_the_old_one_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    world = World(config(buffer={"max_trajectories": 4}), ledger=path)
    world.join("g0", 4)
    world.answer_all("g0")
    assert world.broker.scheduler.permits() == 0
    world.ledger.close()
    again = World(config(buffer={"max_trajectories": 16}), ledger=path)
    again.join("g0", 16)
    assert again.answer("g0", again.pop("g0")) == ""


def test_maps_shrink_back_to_what_is_in_flight() -> None:
    world = World(config(run={"steps": 500}, transport={"rollout_timeout_s": 1e6}))
    sizes = []
    for i in range(400):
        name = f"g{i}"
        world.join(name, 8)
        world.take()
        world.answer_all(name)
        world.commit()
        world.broker.generator_left(name, "left in order", float(i))
        world.tasks.pop(name, None)
        if i in (99, 399):
            snap = world.broker.report.snapshot()
            keys = ("live", "running", "queued", "leases", "takes", "waiting_for_room", "fingerprints")
            sizes.append(
                {k: snap[k] for k in keys} | {"generators": len(snap["generators"]), "book": world.ledger.entries}
            )
    assert sizes[0] == sizes[1]
    assert sizes[1]["generators"] == 0
    assert sizes[1]["live"] <= 8
