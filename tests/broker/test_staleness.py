"""Masking, dropping and the window order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from broker.broker_world import World, batches_of, config

from sao import _core
from sao.transport import messages as m


def test_mask_leaves_old_rollouts_to_the_learner() -> None:
    world = World(config(run={"steps": 8}))
    world.join("g0", 8)
    old = world.pop("g0")
    batches_of(world, 3, slots=8)
    assert world.answer("g0", old) == ""
    assert world.broker.book.dropped == {}


def test_drop_drops_old_rollouts_by_reason_at_arrival_and_in_the_buffer() -> None:
    world = World(
        config(run={"steps": 8}, staleness={"max_lag": 1, "stale": "drop"}, learner={"batch_trajectories": 2})
    )
    world.join("g0", 4)  # ordinals 0..3
    straggler = world.pop("g0")
    waiting = world.pop("g0")
    for _ in range(2):
        world.take(2)
        while not world.broker.leases.open:
            world.answer("g0", world.tasks["g0"].pop(0), version=world.broker.versions.current)
        world.commit()
        world.slots("g0", 2)
    # version 2: tokens of version 0 have lag 2
    assert world.answer("g0", straggler, n_sampled=6) == ""
    assert world.ledger.tokens()["dropped"]["stale"] == 6
    ready = world.ledger.counts()["ready"]
    world.answer("g0", waiting, version=1)  # lag 1 is fine now, not after the next version
    assert world.ledger.counts()["ready"] == ready + 1
    world.broker._publish(m.WeightsRef(3, "/w/3", "f3"))
    assert world.ledger.state(waiting.ordinal) == "finished"
    assert world.ledger.tokens()["dropped"]["stale"] == 11
    world.ledger.check()


@pytest.mark.parametrize("seed", range(6))
def test_window_never_exceeds_the_lag_bound(seed: int) -> None:
    """Random rollout lengths, failures and deaths: in issue order, and no token older than max_lag at its update."""
    rng = random.Random(seed)
    lag, batch = rng.choice([(0, 3), (1, 4), (3, 2)])
    world = World(
        config(
            run={"steps": 60, "max_failures_in_a_row": 1000},
            staleness={"max_lag": lag, "order": "window"},
            learner={"batch_trajectories": batch},
        )
    )
    running: list[tuple[int, str, dict[str, Any], int]] = []
    names = ["g0", "g1"]
    for name in names:
        world.join(name, 8)
    worst, order = 0, []
    for tick in range(20_000):
        if world.broker.run.done:
            break
        for name in names:
            for task in world.tasks.get(name, []):
                length = rng.choice([1, 2, 3, 40])
                running.append((tick + length, name, task, world.broker.versions.current))
            world.tasks[name] = []
        if rng.random() < 0.01:
            dead = rng.choice(names)
            world.broker.generator_left(dead, "killed", float(tick))
            running = [r for r in running if r[1] != dead]
            world.join(dead, 8)
        for entry in [r for r in running if r[0] <= tick]:
            running.remove(entry)
            _, name, task, version = entry
            if rng.random() < 0.1:
                world.fail(name, task)
            else:
                world.answer(name, task, version=version)
            world.slots(name, 8 - sum(r[1] == name for r in running))
        if world.broker.leases.open:
            if rng.random() < 0.5:
                versions = [_core.summary(h)["min_version"] for h in world.frames[-1][::2]]
                worst = max(worst, world.broker.versions.current - min(versions))
                order += world.batches[-1].ordinals
                world.commit()
        elif not world.broker.leases.takes:
            world.take(batch)
    assert world.broker.run.done and not world.broker.run.done.failed
    assert worst <= lag
    assert order == sorted(order)
    assert len(order) == 60 * batch


def test_slow_tasks_are_trained_as_often_as_they_are_started() -> None:
    """Half of the tasks take 1 tick, half 6, at lag 3: admission paces, nothing is dropped, the mix stays."""
    world = World(config(run={"steps": 75}, staleness={"max_lag": 3}))
    world.join("g0", 16)
    running: list[tuple[int, dict[str, Any]]] = []
    trained: list[int] = []
    for tick in range(5000):
        if world.broker.run.done:
            break
        running += [(tick + (6 if t.ordinal % 2 else 1), t) for t in world.tasks["g0"]]
        world.tasks["g0"] = []
        for entry in [r for r in running if r[0] <= tick]:
            running.remove(entry)
            world.answer("g0", entry[1])
        if world.broker.leases.open:
            trained += world.batches[-1].ordinals
            world.commit()
        elif not world.broker.leases.takes:
            world.take()
        world.slots("g0", 16 - len(running))
    assert len(trained) == 300
    assert abs(sum(o % 2 for o in trained) / 300 - 0.5) < 0.05
