"""Small owners alone: the ready store, the versions, the evaluation rounds, the step meter."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from broker.broker_world import config, trajectory

from sao.broker.evaluation import MAX_ATTEMPTS, Evaluation
from sao.broker.leases import ReadyStore
from sao.broker.metrics import GapAlarm, StepMeter
from sao.broker.versions import KNOWN_FINGERPRINTS, Versions
from sao.errors import TransportError, ValidationError
from sao.trajectory import encode_frames
from sao.transport.messages import WeightsRef


def put(store: ReadyStore, ordinal: int, version: int = 0, n_sampled: int = 5) -> None:
    store.put(ordinal, encode_frames(trajectory(ordinal, version=version, n_sampled=n_sampled)), version)


def test_the_store_keeps_room_for_what_runs_and_lets_wait_what_does_not_fit() -> None:
    store = ReadyStore(3, 1 << 16, expected_bytes=1 << 14)
    assert store.room(leased=0, ready=0, running=0) == 3 and store.room(0, 0, 1) == 2
    for ordinal in range(4):
        put(store, ordinal)
    assert len(store.waiting) == 1 and store.room(0, 4, 0) == 0
    assert store.take([3]) == []
    lease, _ = store.take(2)
    assert lease.task == 0 and not store.refill()  # what is leased takes room, too
    lease.commit()
    assert store.refill() and len(store.waiting) == 0
    assert [lease.task for lease in store.take([3, 2])] == [3, 2]


def test_the_store_drops_what_is_too_old_and_what_is_not_wanted() -> None:
    store = ReadyStore(2, 1 << 16, 1000)
    for ordinal, version in ((0, 0), (1, 2), (2, 2)):
        put(store, ordinal, version)
    assert store.buffer.advance(2, None) == [] and store.buffer.advance(2, 1) == [0]
    store.discard(2)  # waits for room
    assert len(store.waiting) == 0
    store.discard(1)
    assert store.buffer.stats()["trajectories"] == 0


def weights(version: int) -> WeightsRef:
    return WeightsRef(version, f"/w/{version}", f"f{version}")


def test_versions_advance_and_know_what_was_published() -> None:
    versions = Versions(config(staleness={"max_lag": 1, "stale": "drop"}).staleness)
    with pytest.raises(ValidationError, match="must be above the current 0"):
        versions.check(weights(0))
    for version in range(1, KNOWN_FINGERPRINTS + 5):
        versions.publish(weights(version))
    assert versions.current - 1 == versions.oldest_kept and len(versions.fingerprints) == KNOWN_FINGERPRINTS
    versions.verify(1, "forgotten")
    with pytest.raises(TransportError, match="published were f60"):
        versions.verify(60, "f61")
    assert versions.fault({"max_version": 99, "fingerprints": {}})[0] == "future_version"
    assert versions.fault({"max_version": 60, "fingerprints": {60: "f0"}})[0] == "wrong_fingerprint"
    assert versions.fault({"max_version": 60, "fingerprints": {60: "f60"}}) == ("", "")
    moved = replace(weights(versions.current), path="/elsewhere")
    assert versions.repeated(moved) and versions.weights == moved and not versions.repeated(weights(3))
    later = Versions(config().staleness)
    later.restore(msgspec.to_builtins(versions.note()))
    assert (later.current, later.oldest_kept, later.weights) == (versions.current, 0, moved)


def test_a_round_is_played_once_and_a_lost_episode_again() -> None:
    rounds = Evaluation(config(eval={"every_steps": 2, "episodes": 2}))
    rounds.start(0, 0, 0.0)
    rounds.start(0, 0, 0.0)
    rounds.due(1, 1, 0.0)  # not due
    rounds.due(2, 1, 0.0)  # waits
    first, second = rounds.next_task("g0"), rounds.next_task("g1")
    assert first and second and rounds.next_task("g0") is None and rounds.open == {0: "g0", 1: "g1"}
    assert rounds.result(second.ordinal, 1.0, None, "", 0) and not rounds.result(second.ordinal, 1.0, None, "", 0)
    for _ in range(MAX_ATTEMPTS - 1):
        rounds.lost("g0")
        again = rounds.next_task("g0")
        assert again and again.seed == first.seed
    rounds.lost("g0")
    report = rounds.finish(5.0)
    assert report and (report.step, report.n, report.success) == (0, 1, 1.0)
    assert report.failed_by_reason == {"generator_lost": 1}
    assert rounds.busy and rounds.current and rounds.current.step == 2
    later = Evaluation(config(eval={"every_steps": 2, "episodes": 2}))
    later.restore(rounds.note(), 0.0)
    assert later.current and (later.current.step, later.current.first) == (2, 4)


def test_the_meter_counts_between_steps() -> None:
    meter = StepMeter(0.0, 100)
    for lag in (0, 0, 2):
        meter.taken(lag, 1.0 + lag)
    found = meter.step(2.0, 300)
    assert found["broker/sampled_tokens_per_s"] == 100.0 and found["broker/lag_count/0"] == 2
    assert (found["broker/lag_max"], found["broker/age_s_max"]) == (2, 3.0)
    assert "broker/lag_max" not in meter.step(3.0, 300)


def test_the_alarm_sounds_once_until_the_gap_was_below_the_limit() -> None:
    alarm = GapAlarm(0.1)
    gaps = (0.05, 0.2, 0.3, None, 0.05, 0.4)
    assert [bool(alarm.check({"logprob_gap/mean": gap})) for gap in gaps] == [False, True, False, False, False, True]
