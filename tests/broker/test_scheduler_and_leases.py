"""The scheduler and the lease table alone, with the owners that they read and an outbox that is a list."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
from broker.broker_world import BATCH, config, trajectory

from sao import _core
from sao.broker.evaluation import Evaluation
from sao.broker.leases import STARVING_S, LeaseTable, ReadyStore
from sao.broker.metrics import StepMeter
from sao.broker.outbox import Outbox
from sao.broker.persistence import Persistence
from sao.broker.run import Run
from sao.broker.scheduler import Generator, Scheduler
from sao.broker.tasks import TaskBook
from sao.broker.versions import Versions
from sao.errors import TransportError, ValidationError
from sao.trajectory import encode_frames
from sao.transport import messages as m


class Owners:
    """Both, and what they share."""

    def __init__(self, **sections: dict[str, Any]) -> None:
        self.sent: list[tuple[Hashable, m.Message]] = []
        outbox = Outbox(
            lambda _, name, message: self.sent.append((name, message)), lambda *pair: self.sent.append(pair)
        )
        self.config = config(**sections)
        self.run, self.book = Run(), TaskBook(Persistence(_core.Ledger()))
        self.store, self.versions = ReadyStore(100, 1 << 20, 1000), Versions(self.config.staleness)
        shared = self.config, self.run, self.book, self.store, self.versions
        self.scheduler = Scheduler(*shared, Evaluation(self.config), outbox)
        self.leases = LeaseTable(*shared, StepMeter(0.0, 0), outbox)

    def tasks(self, name: str) -> list[int]:
        """Ordinals of all tasks that were sent to a generator."""
        return [task.ordinal for who, x in self.sent if who == name and isinstance(x, m.Tasks) for task in x.tasks]

    def finish(self, *ordinals: int) -> None:
        """Running tasks become ready."""
        for ordinal in ordinals:
            frames = encode_frames(trajectory(ordinal))
            self.book.ready(self.book.live[ordinal], _core.summary(frames[0]), frames, 0.0)
            self.store.put(ordinal, frames, 0)


def test_tasks_go_where_most_slots_are_free_and_no_further_than_the_permits() -> None:
    owners = Owners()
    scheduler = owners.scheduler
    for name, free in (("g0", 2), ("g1", 5)):
        scheduler.joined(name)
        scheduler.slots(name, free, 0)
    scheduler.generators["g2"] = Generator(free=9)
    scheduler.floor = 1
    scheduler.generators["g0"].loaded = scheduler.generators["g1"].loaded = 1  # g2 still serves older weights
    scheduler.dispatch(0.0)
    assert (owners.tasks("g0"), owners.tasks("g1"), owners.tasks("g2")) == ([3, 5], [0, 1, 2, 4, 6], [])
    scheduler.slots("g1", 5, 5)
    scheduler.dispatch(0.0)
    assert len(owners.tasks("g1")) == 6 and scheduler.permits() == 0  # (max_lag + 1) * batch = 8 run
    owners.run.ending = "over"
    assert scheduler.permits() == 0


def test_what_is_overdue_is_found_in_the_order_of_its_start() -> None:
    owners = Owners()
    for now in (0.0, 5.0, 50.0):
        owners.book.start("g0", now)
    assert [task.ordinal for task in owners.scheduler.overdue(105.0)] == [0, 1]


def test_rollouts_of_an_earlier_broker_wait_for_their_generators() -> None:
    owners = Owners()
    for _ in range(3):
        owners.book.start("", 0.0)
    scheduler = replace(owners.scheduler)  # made after the book was restored
    scheduler.restore({"floor": 0, "generators": ["g0", "g1"]}, 10.0)
    scheduler.joined("g0")
    scheduler.claim("g0", [(0, 0), (7, 0)])
    assert owners.sent == [("g0", m.CancelTask(7, 0))]
    assert scheduler.orphans(11.0) == [] and scheduler.missing == {"g1"}
    scheduler.left("g1")
    assert [task.ordinal for task in scheduler.orphans(11.0)] == [1, 2]
    assert scheduler.orphans(99.0) == []  # they are handed over once


def test_a_take_is_answered_when_all_are_there_and_its_lease_is_trained_once() -> None:
    owners = Owners()
    leases = owners.leases
    for _ in range(BATCH):
        owners.book.start("g0", 0.0)
    with pytest.raises(ValidationError, match=r"take\.n: 5"):
        leases.ask("a", BATCH + 1, 0.0)
    leases.ask("a", BATCH, 0.0)
    owners.finish(2, 0, 3)
    leases.serve(1.0)
    assert owners.sent == [] and leases.starving(STARVING_S) and not leases.starving(STARVING_S + 1)
    owners.finish(1)
    leases.serve(2.0)
    ((key, batch),) = owners.sent
    assert key == "a" and isinstance(batch, m.Batch) and (batch.lease, batch.ordinals) == (1, (2, 0, 3, 1))
    assert leases.of("a") == [1] and owners.book.ledger.counts()["leased"] == BATCH
    leases.give_back(1)
    leases.ask("b", BATCH, 3.0)
    leases.serve(3.0)
    assert owners.sent[-1][1] == m.Batch(2, 0, (2, 0, 3, 1), (0,) * 4, 0, (3.0,) * 4, frames=owners.sent[-1][1].frames)
    with pytest.raises(TransportError, match="1 is not open"):
        leases.committed(1, 1)
    assert not leases.committed(2, 1)
    leases.trained(2, 1, 20, 0)
    owners.run.step = 1
    assert leases.committed(2, 1) and not leases.open and not owners.book.live


def test_the_end_answers_what_waits() -> None:
    owners = Owners()
    owners.leases.ask("a", BATCH, 0.0)
    owners.run.ending = "all steps done"
    owners.leases.refuse("all steps done")
    owners.leases.ask("b", BATCH, 0.0)
    assert owners.sent == [("a", m.Stop("all steps done")), ("b", m.Stop("all steps done"))]
