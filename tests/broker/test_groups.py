"""The group barrier: a group has one task, is handed out whole and in order of completion, or ends as a whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from broker.broker_world import World, config
from msgspec.structs import replace

from sao import _core
from sao.broker.persistence import Persistence
from sao.broker.tasks import MAX_ATTEMPTS, TaskBook
from sao.errors import ValidationError
from sao.transport import messages as m

GRPO = {"estimator": "grpo", "group_size": 2}


def grouped(**sections: dict[str, Any]) -> World:
    """Batches of four: two groups of two; lag 1."""
    return World(config(algorithm=GRPO, **sections))


def test_a_group_gets_one_task_and_the_next_group_another() -> None:
    world = grouped()
    world.join("g0", 100)
    seeds = [task.seed for task in world.tasks["g0"]]
    assert len(seeds) == 8 and len(set(seeds)) == 4
    assert seeds[::2] == seeds[1::2]


def test_tasks_come_again_when_their_number_is_given() -> None:
    world = World(config(env={"train_tasks": 3}))
    world.join("g0", 100)
    seeds = [task.seed for task in world.tasks["g0"]]
    assert len(set(seeds)) == 3 and seeds[:3] * 2 == seeds[:6]
    both = grouped(env={"train_tasks": 3})
    both.join("g0", 100)
    assert [task.seed for task in both.tasks["g0"]] == [seeds[i] for i in (0, 0, 1, 1, 2, 2, 0, 0)]


def test_groups_wait_for_their_last_member_and_leave_in_order_of_completion() -> None:
    world = grouped()
    world.join("g0", 100)
    tasks = {task.ordinal: task for task in world.tasks["g0"]}
    world.take()
    for now, ordinal in enumerate((0, 2, 4, 6, 7)):
        world.now = float(now)
        world.answer("g0", tasks[ordinal])
    assert not world.batches and world.ledger.counts()["ready"] == 5  # one group is whole, a batch needs two
    world.now = 9.0
    world.answer("g0", tasks[3])
    assert world.batches[-1].ordinals == (6, 7, 2, 3)
    world.commit()
    world.take()
    world.answer("g0", tasks[5])
    world.now = 10.0
    world.answer("g0", tasks[1])
    assert world.batches[-1].ordinals == (4, 5, 0, 1)


def test_a_request_must_be_whole_groups() -> None:
    world = grouped()
    with pytest.raises(ValidationError, match=r"take\.n: 3 .*multiple of algorithm\.group_size = 2"):
        world.take(3)


def test_a_failed_member_is_played_again_with_the_same_task() -> None:
    world = grouped()
    world.join("g0", 2)
    task = world.pop("g0")
    assert world.fail("g0", task, "grader", tokens=3) == ""
    other = world.pop("g0")
    world.slots("g0", 2)
    again = world.pop("g0")
    assert (again.ordinal, again.attempt, again.seed) == (task.ordinal, 1, task.seed)
    assert world.ledger.tokens()["dropped"] == {"failed_grader": 3}
    world.answer("g0", other)
    world.answer("g0", again)
    world.slots("g0", 8)
    world.take()
    world.answer_all("g0")
    assert world.batches[-1].ordinals[:2] == (0, 1)
    world.ledger.check()


def test_a_member_that_fails_for_good_ends_its_group_in_every_state() -> None:
    """The other members are ready, running and waiting to be started again."""
    world = World(
        config(
            algorithm={"estimator": "grpo", "group_size": 4},
            learner={"batch_trajectories": 4},
            run={"max_failures_in_a_row": 100},
        )
    )
    world.join("g0", 4)
    ready, running, bad, queued = (world.pop("g0") for _ in range(4))
    world.answer("g0", ready, n_sampled=7)
    for attempt in range(MAX_ATTEMPTS):
        if attempt == MAX_ATTEMPTS - 1:
            world.broker.book.again(world.broker.book.live[queued.ordinal], "lost")
        world.fail("g0", replace(bad, attempt=attempt), "grader", tokens=2)
        if attempt < MAX_ATTEMPTS - 1:
            world.slots("g0", 1)
            assert world.pop("g0") == replace(bad, attempt=attempt + 1)
    tokens, counts = world.ledger.tokens(), world.ledger.counts()
    assert tokens["dropped"] == {"failed_grader": 2 * MAX_ATTEMPTS, "group_incomplete": 7, "lost": 0}
    assert tokens["held"] == 0 and world.broker.book.dropped["group_incomplete"] == 3
    assert world.pushed(m.CancelTask, "g0") == [m.CancelTask(running.ordinal, 0)]
    assert world.answer("g0", running) == "late"
    assert counts["dropped"] == 4 and world.broker.store.buffer.stats()["trajectories"] == 0
    world.ledger.check()
    world.slots("g0", 4)
    world.take()
    world.answer_all("g0")
    assert world.batches[-1].ordinals == (4, 5, 6, 7)


def test_a_trajectory_that_cannot_be_trained_on_ends_its_group() -> None:
    world = grouped()
    world.join("g0", 2)
    first, second = world.pop("g0"), world.pop("g0")
    world.answer("g0", first)
    assert world.answer("g0", second, version=1) == "future_version"
    assert world.ledger.tokens()["dropped"] == {"future_version": 5, "group_incomplete": 5}


def test_a_group_that_a_killed_broker_has_torn_is_ended_at_the_start(tmp_path: Any) -> None:
    ledger = _core.Ledger(str(tmp_path / "ledger"))
    for ordinal in range(5):
        ledger.generating(ordinal, ledger.issue(ordinal))
    ledger.drop(1, 0, "group_incomplete", 0)  # and 0 would have been next
    ledger.close()
    world = World(config(algorithm=GRPO), tmp_path / "ledger")
    assert sorted(world.broker.book.live) == [2, 3, 4]
    world.join("g0", 8)
    assert [task.ordinal for task in world.tasks["g0"]] == [2, 3, 4, 5, 6, 7, 8, 9]
    world.ledger.check()


def test_a_whole_group_may_be_overdue_at_once() -> None:
    """All members run out of time in one look at the clock: the first is given up, and the others end with it."""
    world = grouped()
    world.join("g0", 2)
    first, second = world.pop("g0"), world.pop("g0")
    world.now = 101.0
    world.broker.tick(world.now)  # both are started again
    world.slots("g0", 2)
    assert [(t.ordinal, t.attempt) for t in world.tasks["g0"]] == [(0, 1), (1, 1)]
    world.now = 202.0
    world.broker.tick(world.now)  # both have had their second chance
    assert world.broker.run.done is None
    assert world.broker.book.dropped == {"deadline": 1, "group_incomplete": 1}
    assert [world.ledger.state(task.ordinal) for task in (first, second)] == ["finished", "finished"]
    world.ledger.check()


def test_single_rollouts_are_groups_of_their_own() -> None:
    book = TaskBook(Persistence(_core.Ledger(None)))
    assert book.broken_groups() == []


@pytest.mark.parametrize("order", ["completion", "window"])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_whole_groups_is_ever_trained(seed: int, order: str) -> None:
    """Random lengths, failures, deadlines and deaths of generators."""
    rng = random.Random(seed)
    size = rng.choice([2, 4])
    world = World(
        config(
            run={"steps": 40, "max_failures_in_a_row": 10_000},
            algorithm={"estimator": "grpo", "group_size": size},
            staleness={"max_lag": rng.choice([0, 2]), "order": order},
            transport={"rollout_timeout_s": 60.0},
        )
    )
    running: list[tuple[int, str, m.TaskEntry]] = []
    names, trained = ["g0", "g1"], []
    for name in names:
        world.join(name, 5)
    for tick in range(50_000):
        world.now = float(tick)
        if world.broker.run.done:
            break
        for name in names:
            running += [
                (tick + rng.choice([1, 2, 9, 80 if rng.random() < 0.1 else 3]), name, t)
                for t in world.tasks.get(name, [])
            ]
            world.tasks[name] = []
        if rng.random() < 0.02:
            dead = rng.choice(names)
            world.broker.generator_left(dead, "killed", world.now)
            running = [entry for entry in running if entry[1] != dead]
            world.tasks[dead] = []
            world.join(dead, 5)
        for entry in [r for r in running if r[0] <= tick]:
            running.remove(entry)
            _, name, task = entry
            if rng.random() < 0.3:
                world.fail(name, task)
            else:
                world.answer(name, task)
            world.slots(name, 5 - sum(r[1] == name for r in running))
        if tick % 10 == 0:
            world.broker.tick(world.now)
        if world.broker.leases.open:
            trained += world.batches[-1].ordinals
            world.commit()
        elif not world.broker.leases.takes:
            world.take()
    done = world.broker.run.done
    assert done and (done.failed, done.step) == (False, 40)
    assert len(trained) == len(set(trained)) == 160
    groups = [ordinal // size for ordinal in trained]
    assert all(groups.count(group) == size for group in groups)
    assert world.broker.store.buffer.stats()["trajectories"] == 0 and not world.broker.book.live
    world.ledger.check()
