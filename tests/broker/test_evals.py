"""Held-out rounds: when they are due, what they count, and that they end."""

from __future__ import annotations

from typing import Any

from broker.broker_world import World, config

from sao.broker.tasks import task_seed
from sao.transport import messages as m


def eval_config(**run: Any) -> Any:
    return config(
        eval={"every_steps": 2, "episodes": 3}, run={"steps": 4, **run}, transport={"rollout_timeout_s": 100.0}
    )


def result(world: World, task: m.TaskEntry, reward: float | None, reason: str = "", success: bool | None = None) -> str:
    version = world.broker.versions.current
    message = m.EvalResult(task.ordinal, version, reward, task.attempt, reason, success=success)
    return world.broker.eval_result("g0", message, world.now).reason


def run_evals(world: World, reward: float = 1.0) -> int:
    """Answers all held-out tasks that g0 holds or gets."""
    n = 0
    while any(t.split == "eval" for t in world.tasks["g0"]):
        assert result(world, world.pop("g0", "eval"), reward) == ""
        world.slots("g0", 8 - len(world.tasks["g0"]))
        n += 1
    return n


def train_step(world: World) -> None:
    world.slots("g0", 20)
    world.take()
    world.answer_all("g0")
    world.commit()


def test_rounds_at_the_first_every_nth_and_the_last_step() -> None:
    world = World(eval_config(steps=5))
    world.join("g0", 8)
    seeds = [[t.seed for t in world.tasks["g0"] if t.split == "eval"]]
    assert seeds[0] == [task_seed(0, "eval", i) for i in range(3)]
    for _ in range(5):
        run_evals(world)
        train_step(world)
        world.slots("g0", 20)
        new = [t.seed for t in world.tasks["g0"] if t.split == "eval"]
        if new:
            seeds.append(new)
    run_evals(world)
    assert [e.step for e in world.pushed(m.EvalReport)] == [0, 2, 4, 5]
    assert [e.version for e in world.pushed(m.EvalReport)] == [0, 2, 4, 5]
    assert all(s == seeds[0] for s in seeds)  # the same held-out set each time
    assert world.broker.run.done is not None and not world.broker.run.done.failed


def test_held_out_tasks_go_first_and_leave_ledger_and_buffer_alone() -> None:
    world = World(eval_config())
    world.join("g0", 4)
    assert [t.split for t in world.tasks["g0"]] == ["eval"] * 3 + ["train"]
    assert world.ledger.next_ordinal == 1
    run_evals(world)
    assert world.ledger.tokens()["sampled"] == 0
    assert world.broker.store.buffer.stats()["received"] == 0


def test_failures_are_counted_and_enter_no_mean() -> None:
    world = World(eval_config())
    world.join("g0", 3)
    result(world, world.pop("g0", "eval"), 0.5)
    result(world, world.pop("g0", "eval"), None, "grader crashed")
    result(world, world.pop("g0", "eval"), 1.0)
    report = world.pushed(m.EvalReport)[0]
    assert (report.success, report.mean_reward, report.n) == (0.5, 0.75, 2)
    assert (report.failed, report.failed_by_reason) == (1, {"grader_crashed": 1})


def test_rubbish_rewards_are_failures_and_the_generators_verdict_counts() -> None:
    world = World(eval_config())
    world.join("g0", 3)
    result(world, world.pop("g0", "eval"), float("nan"))
    result(world, world.pop("g0", "eval"), float("inf"))
    result(world, world.pop("g0", "eval"), 0.2, success=True)
    last = world.pushed(m.EvalReport)[0]
    assert (last.success, last.n, last.failed) == (1.0, 1, 2)


def test_all_failed_is_no_success_rate() -> None:
    world = World(eval_config())
    world.join("g0", 3)
    for _ in range(3):
        result(world, world.pop("g0", "eval"), None, "down")
    assert world.pushed(m.EvalReport)[0].success is None


def test_answers_that_come_twice_or_in_the_next_round_are_refused() -> None:
    world = World(eval_config())
    world.join("g0", 8)
    task = world.pop("g0", "eval")
    assert result(world, task, 1.0) == ""
    assert result(world, task, 1.0) == "late"
    late = world.pop("g0", "eval")
    world.now = 100.0
    world.broker.tick(world.now)  # the round's deadline
    assert world.pushed(m.EvalReport)[0].failed_by_reason == {"deadline": 2}
    assert result(world, late, 1.0) == "late"


def test_a_dead_generators_episodes_are_started_again() -> None:
    world = World(eval_config())
    world.join("g0", 2)
    held = [t.ordinal for t in world.tasks["g0"]]
    world.broker.generator_left("g0", "killed", 1.0)
    world.tasks["g0"] = []
    world.join("g0", 3)
    assert sorted(t.ordinal for t in world.tasks["g0"]) == [0, 1, 2]
    assert {t.attempt for t in world.tasks["g0"] if t.ordinal in held} == {2}
    run_evals(world)
    assert world.pushed(m.EvalReport)[0].n == 3


def test_the_last_round_ends_before_the_run_and_has_a_deadline() -> None:
    world = World(eval_config(steps=1))
    world.join("g0", 8)
    run_evals(world)
    world.take()
    world.answer_all("g0")
    world.commit()
    assert world.broker.run.done is None  # held-out episodes are out
    assert world.broker.scheduler.permits() == 0
    world.take()
    assert world.stopped_takes == ["all steps done"]
    world.now = 50.0
    world.broker.tick(world.now)
    assert world.broker.run.done is None
    world.now = 100.0
    world.broker.tick(world.now)
    assert world.pushed(m.EvalReport)[-1].failed_by_reason == {"deadline": 3}
    assert world.broker.run.done is not None and not world.broker.run.done.failed


def test_a_slow_round_lets_only_the_newest_wait() -> None:
    world = World(eval_config(steps=9))
    world.join("g0", 20)
    for _ in range(7):
        train_step(world)
    assert world.broker.evaluation.skipped == 2  # steps 2 and 4, replaced by 6
    run_evals(world)
    assert [e.step for e in world.pushed(m.EvalReport)] == [0, 6]


def test_target_success_ends_the_run_early_and_in_order() -> None:
    world = World(eval_config(steps=100, target_success=0.9))
    world.join("g0", 8)
    run_evals(world, 0.0)
    train_step(world)
    world.take()
    world.slots("g0", 20)
    world.answer_all("g0")
    world.commit()
    world.slots("g0", 20)
    world.take()  # the learner is at work when the target is reached
    world.answer_all("g0")
    run_evals(world, 1.0)
    assert world.broker.run.done is None
    world.commit()
    assert world.broker.run.done is not None and not world.broker.run.done.failed
    assert "target_success = 0.9" in world.broker.run.done.reason
    assert world.broker.run.done.step == 3
    world.ledger.check()


def test_a_start_policy_at_the_target_does_not_end_a_run_that_no_learner_has_joined() -> None:
    world = World(eval_config(steps=100, target_success=0.9))
    world.join("g0", 8)
    run_evals(world, 1.0)
    assert world.pushed(m.EvalReport)[0].success == 1.0
    assert world.broker.run.done is None
    assert world.broker.scheduler.permits() > 0 or world.tasks["g0"]
