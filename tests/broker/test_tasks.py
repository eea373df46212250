"""Tasks, permits and free slots; answers that come twice or late; failures."""

from __future__ import annotations

import pytest
from broker.broker_world import BATCH, World, config, trajectory
from msgspec.structs import replace

from sao.broker.tasks import reason_code, task_seed
from sao.errors import TransportError
from sao.trajectory import encode
from sao.transport import messages as m


def test_seeds_depend_on_run_split_and_index_only() -> None:
    seeds = {task_seed(seed, split, i) for seed in (0, 1) for split in ("train", "eval") for i in range(500)}
    assert len(seeds) == 2000
    assert all(0 <= s < 2**53 for s in seeds)
    assert task_seed(3, "train", 7) == 200052262041506  # the same in every process and on every machine


def test_permits_bound_the_work_in_flight() -> None:
    world = World()  # batch 4, lag 1: (1 + 0 + 1) * 4 = 8 at the start
    world.join("g0", 100)
    assert len(world.tasks["g0"]) == 8
    assert [t.ordinal for t in world.tasks["g0"]] == list(range(8))
    assert world.broker.scheduler.permits() == 0
    world.take()
    world.answer_all("g0")
    assert world.in_flight() == 8
    world.commit()
    world.slots("g0", 100)
    assert world.in_flight() == 8
    assert len(world.tasks["g0"]) == 4


@pytest.mark.parametrize(("lag", "batch"), [(0, 1), (0, 2), (1, 1), (3, 2)])
def test_two_generators_never_starve(lag: int, batch: int) -> None:
    world = World(config(staleness={"max_lag": lag}, learner={"batch_trajectories": batch}, run={"steps": 20}))
    for name in ("g0", "g1"):
        world.join(name, 1)
    for _ in range(20):
        world.take(batch)
        for _ in range(100):
            if world.batches and world.broker.leases.open:
                break
            for name in ("g0", "g1"):
                if world.tasks.get(name):
                    world.answer(name, world.pop(name))
                world.slots(name, 1)
        assert world.in_flight() <= (lag + 1) * batch
        world.commit()
    done = world.broker.run.done
    assert done and (done.failed, done.step) == (False, 20)


def test_free_slots_are_absolute_and_count_what_is_on_the_way() -> None:
    world = World()
    world.join("g0", 3)
    assert len(world.tasks["g0"]) == 3
    world.broker.slots("g0", m.Slots(3, 0), world.now)  # stated before the three tasks arrived
    assert len(world.tasks["g0"]) == 3
    world.broker.slots("g0", m.Slots(2, 3), world.now)
    assert len(world.tasks["g0"]) == 5


def test_slots_refill_at_once_after_a_pause() -> None:
    world = World(config(staleness={"max_lag": 0}, learner={"batch_trajectories": 8}))
    world.join("g0", 8)
    world.take(8)
    world.answer_all("g0")
    world.slots("g0", 8)
    assert world.tasks["g0"] == []  # paused: the batch is with the learner
    world.commit()
    assert len(world.tasks["g0"]) == 8


def test_tasks_go_to_the_generator_with_most_free_slots() -> None:
    world = World()
    world.broker.scheduler.joined("g0")
    world.broker.scheduler.joined("g1")
    world.broker.scheduler.generators["g0"].free = 6
    world.received["g1"] = 0
    world.slots("g1", 2)
    assert (len(world.tasks["g0"]), len(world.tasks["g1"])) == (6, 2)


def test_no_more_tasks_than_the_run_needs() -> None:
    world = World(config(run={"steps": 1}, staleness={"max_lag": 5}))
    world.join("g0", 100)
    assert len(world.tasks["g0"]) == BATCH


def test_a_learner_that_wants_no_more_ends_the_run_in_order() -> None:
    world = World()
    world.join("g0", 8)
    world.take()
    world.answer_all("g0")
    world.frames.clear()
    world.broker.commit(m.Commit(world.batches[-1].lease, 1, 0, 20, 0, {}, done="explained enough"), 0.0)
    done = world.broker.run.done
    assert done and (done.reason, done.failed, done.step) == ("explained enough", False, 1)
    world.take()
    assert world.stopped_takes == ["explained enough"]
    world.ledger.check()


def test_duplicates_and_late_answers_are_refused_with_a_reason() -> None:
    world = World()
    world.join("g0", 2)
    task = world.pop("g0")
    frames = world.encoded(task)
    assert world.deliver("g0", frames) == ""
    assert world.deliver("g0", frames) == "duplicate" and not world.pushed(m.Event)
    assert world.answer("g0", task) == "duplicate with other content"
    (event,) = world.pushed(m.Event)
    assert event.level == "error" and event.text.startswith(f"generator g0: task {task.ordinal} attempt 0 came again")
    late = world.pop("g0")
    world.broker.generator_left("g0", "silent", 1.0)
    world.join("g1", 1)
    again = world.pop("g1")
    assert (again.ordinal, again.attempt, again.seed) == (late.ordinal, 1, late.seed)
    assert world.answer("g1", late, n_sampled=7) == "late"
    assert world.answer("g1", again) == ""
    tokens = world.ledger.tokens()
    assert tokens["dropped"]["late"] == 7
    assert tokens["held"] == 10
    world.ledger.check()


def test_unknown_tasks_are_refused() -> None:
    world = World()
    world.join("g0", 1)
    task = world.pop("g0")
    assert world.answer("g0", replace(task, ordinal=99)) == "unknown task"
    assert world.answer("g0", replace(task, attempt=5)) == "unknown task"
    assert world.fail("g0", replace(task, attempt=5)) == "unknown task"
    assert world.answer("g0", task) == ""


def test_corrupt_bytes_are_refused_and_reported() -> None:
    world = World()
    world.join("g0", 1)
    header, payload = encode(trajectory(0))
    broken = bytes([payload[0] ^ 1]) + payload[1:]
    for pair in ((header, broken), (header, payload[:-1]), (b"\x80\x04K\x01.", payload), (header[:20], payload)):
        answer = world.deliver("g0", pair)
        assert answer.startswith("corrupt")
    assert len(world.pushed(m.Event)) == 4
    assert world.answer("g0", world.pop("g0")) == ""


def test_a_rollout_of_unpublished_or_false_weights_is_not_trained() -> None:
    world = World()
    world.join("g0", 8)
    assert world.answer("g0", world.pop("g0"), version=1) == "future_version"
    world.take()
    world.answer_all("g0")
    world.commit()  # version 1 with fingerprint f1
    world.slots("g0", 8)
    assert world.answer("g0", world.pop("g0"), version=1, fingerprints={1: "f0"}) == "wrong_fingerprint"
    assert world.answer("g0", world.pop("g0"), version=1, fingerprints={0: "any", 1: "f1"}) == ""
    with pytest.raises(TransportError, match="published were f1"):
        world.load("g0", 1, "f0")
    world.load("g0", 1, "f1")


def test_failures_are_counted_apart_and_replaced() -> None:
    """Every fourth rollout fails: the batches hold real trajectories only, progress is never above 100 %."""
    world = World(config(run={"steps": 8, "max_failures_in_a_row": 3}))
    world.join("g0", 4)
    n = 0
    for _ in range(8):
        world.take()
        while not world.broker.leases.open:
            world.slots("g0", 4)
            task = world.pop("g0")
            n += 1
            if n % 4 == 0:
                assert world.fail("g0", task, "Grader Crashed!", tokens=3) == ""
            else:
                world.answer("g0", task)
        assert len(world.batches[-1].ordinals) == BATCH
        world.commit()
    counts, tokens = world.ledger.counts(), world.ledger.tokens()
    assert counts["trained"] == 32
    assert tokens["trained"] == 32 * 5
    assert tokens["dropped"]["failed_grader_crashed"] == 3 * (n // 4)
    assert not world.broker.run.done.failed


def test_failures_in_a_row_stop_the_run_and_name_the_environment() -> None:
    world = World(config(run={"max_failures_in_a_row": 3}))
    world.join("g0", 8)
    world.fail("g0", world.pop("g0"))
    world.fail("g0", world.pop("g0"))
    world.answer("g0", world.pop("g0"))  # a success starts the count again
    world.fail("g0", world.pop("g0"))
    world.fail("g0", world.pop("g0"))
    assert world.broker.run.done is None
    world.take()
    world.fail("g0", world.pop("g0"), "step_timeout", 2, "no answer in 60 s")
    done = world.pushed(m.Done)[0]
    assert done.failed
    for part in ("3 rollouts in a row", "environment scripted", "step_timeout", "no answer in 60 s"):
        assert part in done.reason
    assert ": crashed: " in done.reason and done.reason.index("crashed") < done.reason.index(
        "; the last one: step_timeout"
    )
    assert world.stopped_takes == [done.reason]
    assert world.pushed(m.Stop, "g0") and world.pushed(m.Stop, "learner")


def test_a_failed_trajectory_is_never_trained() -> None:
    world = World()
    world.join("g0", 1)
    answer = world.answer("g0", world.pop("g0"), reward=None)
    assert answer == "failed_crashed"
    assert world.ledger.tokens()["dropped"] == {"failed_crashed": 5}
    assert world.ledger.counts()["ready"] == 0


def test_reasons_are_short_codes_and_bounded_in_number() -> None:
    assert reason_code("Timeout: 3.5 s!\n" + "x" * 100) == "timeout_3_5_s_" + "x" * 26
    assert reason_code("«»") == "unknown"
    world = World(config(run={"max_failures_in_a_row": 10_000, "steps": 100}, staleness={"max_lag": 60}))
    world.join("g0", 100)
    for i in range(100):
        world.fail("g0", world.pop("g0"), f"reason {i}")
    assert len(world.broker.book.dropped) <= 65
    assert world.broker.book.dropped["failed_other"] == 36
