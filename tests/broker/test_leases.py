"""Peers that leave, deadlines, takes and commits."""

from __future__ import annotations

from typing import Any

import pytest
from broker.broker_world import BATCH, World, batches_of, config
from msgspec.structs import replace

from sao import _core
from sao.errors import LedgerError, TransportError, ValidationError
from sao.transport import messages as m


def test_tasks_of_a_dead_generator_are_started_again() -> None:
    world = World()
    world.join("g0", 4)
    world.join("g1", 0)
    lost = [t.ordinal for t in world.tasks["g0"]]
    world.broker.generator_left("g0", "unreachable", 3.0)
    assert world.in_flight() == 0
    assert world.ledger.counts()["requeued"] == 4
    world.slots("g1", 8)
    assert [(t.ordinal, t.attempt) for t in world.tasks["g1"]][:4] == [(o, 1) for o in lost]
    assert "4 tasks in flight" in world.pushed(m.Event)[0].text


def test_a_task_that_kills_its_generators_is_given_up() -> None:
    world = World(config(run={"steps": 1}, learner={"batch_trajectories": 1}, staleness={"max_lag": 0}))
    attempts = []
    for i in range(6):
        world.join(f"g{i}", 1)
        attempts.append((world.tasks[f"g{i}"][0].ordinal, world.tasks[f"g{i}"][0].attempt))
        world.broker.generator_left(f"g{i}", "unreachable", float(i))
    assert attempts == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]
    assert world.broker.book.dropped["generator_lost"] == 1


def test_a_lost_rollout_does_not_hold_up_the_run() -> None:
    """One of 50 requests is never answered: the others train, it is cancelled, started once more, then given up."""
    world = World(config(run={"steps": 12}, transport={"rollout_timeout_s": 100.0}))
    world.join("g0", 8)
    lost = world.pop("g0")
    for step in range(11):
        world.take()
        while not world.broker.leases.open:
            world.slots("g0", 8)
            world.answer("g0", world.pop("g0"))
        world.commit()
        assert world.broker.run.step == step + 1
    world.tasks["g0"].clear()
    world.now = 100.5
    world.broker.tick(world.now)
    event = world.pushed(m.Event)[0].text
    assert f"task {lost.ordinal} attempt 0 on g0 is 100.5 s old" in event
    assert world.pushed(m.CancelTask, "g0")[0] == m.CancelTask(0, 0)
    assert world.answer("g0", lost) == "late"
    world.slots("g0", 8)
    assert (world.tasks["g0"][0].ordinal, world.tasks["g0"][0].attempt) == (0, 1)
    world.now = 300.0
    world.broker.tick(world.now)
    assert world.broker.book.dropped["deadline"] == 4  # with the three that the test left lying
    assert world.ledger.state(0) == "finished"


def test_a_dead_learner_gives_its_lease_back_in_the_old_order() -> None:
    world = World()
    world.join("g0", 8)
    world.answer_all("g0")
    world.take()
    first = world.batches[-1].ordinals
    world.broker.learner_left("silent for 15 s", 1.0)
    assert world.ledger.counts()["ready"] == 8
    assert "4 leased trajectories given back" in world.pushed(m.Event)[-1].text
    world.learner(0)
    world.take()
    assert world.batches[-1].ordinals == first
    assert world.batches[-1].lease != world.batches[-2].lease
    world.commit()


def test_a_take_that_was_given_up_leaves_nothing_leased() -> None:
    world = World()
    world.join("g0", 8)
    waiting = world.take()
    world.broker.give_up(waiting, 0.0)
    world.answer_all("g0")
    assert world.batches == []
    key = world.take()
    assert world.ledger.counts()["leased"] == 4
    world.broker.give_up(key, 0.0)
    assert world.ledger.counts()["leased"] == 0
    with pytest.raises(TransportError, match=r"commit\.lease"):
        world.commit()


def test_a_take_waits_until_all_are_there() -> None:
    world = World()
    world.join("g0", 8)
    world.take()
    for _i in range(BATCH):
        assert world.batches == []
        world.now += 1
        world.answer("g0", world.pop("g0"))
    assert world.batches[0].ordinals == (0, 1, 2, 3)
    assert world.batches[0].ages_s == (3.0, 2.0, 1.0, 0.0)
    assert len(world.frames[0]) == 2 * BATCH
    assert _core.summary(world.frames[0][0], world.frames[0][1])["task_ordinal"] == 0
    for n in (0, BATCH + 1):
        with pytest.raises(ValidationError, match=r"take\.n"):
            world.take(n)


def test_commit_refuses_what_does_not_add_up_and_changes_nothing() -> None:
    world = World()
    world.join("g0", 8)
    world.answer_all("g0")
    world.take()
    good = m.Commit(1, 1, 1, 18, 2, {}, m.WeightsRef(1, "/w/1", "f1"))
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"lease": 7}, TransportError, "7 is not open"),
        ({"step": 0}, ValidationError, "must be above"),
        ({"weights": m.WeightsRef(0, "/w/0", "f0")}, ValidationError, "weights.version: 0"),
        ({"trained_tokens": 19}, LedgerError, "holds 20"),
    ]
    for change, kind, text in bad:
        with pytest.raises(kind, match=text):
            world.broker.commit(replace(good, **change), 0.0)
        assert (world.broker.run.step, world.broker.versions.current) == (0, 0)
        assert world.ledger.counts()["leased"] == 4
    assert world.broker.commit(good, 0.0) == m.Position(1, 1)
    assert world.broker.commit(good, 0.0) == m.Position(1, 1)  # once more, the answer was lost
    assert world.ledger.tokens()["trained"] == 18
    assert world.ledger.tokens()["masked"] == 2


def test_the_version_follows_published_weights_not_steps_or_trajectories() -> None:
    """Critic warm-up publishes nothing: the version stays, so that nothing ages, and tasks keep flowing."""
    world = World(config(run={"steps": 14}, staleness={"max_lag": 1, "stale": "drop"}))
    world.join("g0", 8)
    for _ in range(10):
        world.slots("g0", 8)
        world.take()
        world.answer_all("g0")
        world.commit(weights=False)
    assert world.broker.versions.current == 0
    assert world.broker.book.dropped == {}
    batches_of(world, 2, slots=8)
    assert world.broker.versions.current == 2
    assert [b.weights.version for b in world.pushed(m.NewWeights, "g0")] == [1, 2]
    assert world.broker.versions.weights == m.WeightsRef(2, "/w/2", "f2")


def test_step_metrics_hold_both_sides() -> None:
    world = World()
    world.join("g0", 8)
    world.broker.scheduler.generators["g0"].report = m.Stats(busy_share=0.75, tokens_per_s=90.0)
    world.take()
    world.now = 2.0
    world.answer_all("g0")
    world.commit(loss=0.5, masked=3)
    step = world.pushed(m.StepReport)[0]
    metrics = step.metrics
    assert step.step == 1
    assert metrics["loss"] == 0.5
    assert metrics["broker/tokens_sampled"] == 40
    assert metrics["broker/sampled_tokens_per_s"] == 20.0
    assert (metrics["broker/tokens_trained"], metrics["broker/tokens_masked"]) == (17, 3)
    assert metrics["broker/tokens_held"] == 20
    assert metrics["broker/take_wait_s"] == 2.0
    assert metrics["broker/lag_max"] == 0
    assert metrics["broker/busy_share/g0"] == metrics["broker/busy_share"] == 0.75
    assert all(isinstance(v, int | float) for v in metrics.values())


def test_a_gap_between_engine_and_learner_is_an_event_once() -> None:
    """A mean gap of 0.015 is usual, 0.2 is not; it is told when it appears, not at every step of it."""
    world = World(config(run={"steps": 9}, telemetry={"max_logprob_gap": 0.05}))
    world.join("g0", 100)
    for gap in (0.015, 0.2, 0.3, None, 0.25, 0.01, 0.06):
        world.slots("g0", 100)
        world.take()
        world.answer_all("g0")
        world.commit(**({} if gap is None else {"logprob_gap/mean": gap}))
    told = [body.text for body in world.pushed(m.Event) if "log-prob gap" in body.text]
    assert [text.partition(" nats")[0] for text in told] == [
        "step 2: log-prob gap at lag 0: 0.2",
        "step 7: log-prob gap at lag 0: 0.06",
    ]
    assert all("expected at most 0.05 (telemetry.max_logprob_gap)" in text for text in told)


def test_survival_by_length_shows_what_dropping_by_age_does() -> None:
    world = World(
        config(run={"steps": 100}, staleness={"max_lag": 0, "stale": "drop"}, learner={"batch_trajectories": 8})
    )
    world.join("g0", 8)
    for step in range(4):
        world.take(8)
        for index in range(8):
            world.answer("g0", world.pop("g0"), n_sampled=2 + index, version=step)
        world.commit()
        world.slots("g0", 8)
    meter = world.broker.meter
    assert meter.survival_by_decile() == [1.0] * 10
    for n in range(20):
        meter.ended(1000 + n, False)  # the longest are too old
    shares = meter.survival_by_decile()
    assert shares[:5] == [1.0] * 5
    assert shares[-1] == 0.0
    assert sorted(shares, reverse=True) == shares
    world.take(8)
    world.answer_all("g0", version=4)
    world.commit()
    metrics = world.pushed(m.StepReport)[-1].metrics
    assert metrics["broker/survival_decile/9"] == 0.0
    assert metrics["broker/lag_count/0"] == 8


def test_a_starving_learner_is_an_event_that_names_the_oldest_task() -> None:
    world = World(config(transport={"rollout_timeout_s": 1000.0}))
    world.join("g0", 8)
    world.take()
    for now in (30.0, 61.0, 90.0, 122.0):
        world.now = now
        world.broker.tick(now)
    events = [body.text for body in world.pushed(m.Event)]
    assert len(events) == 2
    assert "learner: a batch of 4 trajectories, for 61 s (0 ready, 8 running, 0 to be started again)" in events[0]
    assert "g0: the end of 8 rollouts, task 0 attempt 0 for 61 s of transport.rollout_timeout_s = 1000" in events[0]
