"""The limit on episodes in flight, in simulated engines: it finds what fits, keeps to it and comes back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from generator.test_worker import Broker, broker, configured, running
from scripted import ScriptedEngine

from sao.engines.base import EngineStats
from sao.generator.load import COOL_DOWN, LoadControl
from sao.transport.messages import Slots, Stats

__all__ = ["broker"]


class Engine:
    """A KV cache of `room` episodes; those beyond wait, and every fourth report one of them threw another back."""

    def __init__(self, room: float) -> None:
        self.room, self.preempted = room, 0

    def stats(self, episodes: int) -> EngineStats:
        over = max(0, round(episodes - self.room))
        self.preempted += over > 0
        return EngineStats(0.0, 0, episodes - over, over, min(1.0, episodes / self.room), self.preempted)


def settle(control: LoadControl, engine: Engine, reports: int, rng: random.Random) -> list[int]:
    """Episodes in flight over reports; some end between two reports, and free slots are filled at once."""
    episodes, seen = 0, []
    for _ in range(reports):
        episodes = max(control.limit, episodes - rng.randrange(1 + episodes // 4))
        control.take(engine.stats(episodes), episodes)
        seen.append(episodes)
    return seen


@pytest.mark.parametrize("room", [3, 20, 100, 200])
def test_it_settles_where_the_cache_is_nearly_full_and_hardly_ever_overfills(room):
    control, engine = LoadControl(256), Engine(room)
    settle(control, engine, 100, random.Random(room))
    preempted = engine.preempted
    seen = settle(control, engine, 1000, random.Random(room))
    assert 0.7 * room - 1 <= sum(seen) / len(seen) <= room
    assert engine.preempted - preempted <= 60


def test_it_never_passes_the_bound_nor_falls_to_nothing():
    control, engine = LoadControl(8), Engine(1000)
    assert set(settle(control, engine, 50, random.Random(0))) == {8}
    engine.room = 0.2
    settle(control, engine, 100, random.Random(0))
    assert control.limit == 1
    engine.room = 1000
    settle(control, engine, 200, random.Random(0))
    assert control.limit == 8


def test_a_cut_is_given_time_to_show():
    control = LoadControl(100)
    cuts = [control.take(EngineStats(kv_use=1.0, running=100), 100) for _ in range(3 * (COOL_DOWN + 1))]
    assert cuts == ([True] + [False] * COOL_DOWN) * 3


def test_a_queue_without_a_cache_in_use_changes_nothing():
    """A torch engine: it has no paged cache, and sessions beyond its slots wait by design."""
    control = LoadControl(64)
    assert not any(control.take(EngineStats(running=8, waiting=56), 64) for _ in range(50))
    assert control.limit == 64


def test_the_limit_grows_only_while_it_is_in_use():
    control = LoadControl(64)
    control.take(EngineStats(kv_use=1.0), 64)
    low = control.limit
    for _ in range(20):
        control.take(EngineStats(kv_use=0.1, running=3), 3)
    assert control.limit == low
    for _ in range(40):
        control.take(EngineStats(kv_use=0.5, running=control.limit), control.limit)
    assert control.limit == 64


class Full(ScriptedEngine):
    full = True

    def stats(self) -> EngineStats:
        return EngineStats(kv_use=1.0 if self.full else 0.1, running=1)


@pytest.mark.parametrize("control", [True, False])
def test_a_generator_asks_for_fewer_tasks_while_its_engine_is_full(broker: Broker, tiny_model: Path, control: bool):
    settings = {"generator": {"engine": "scripted", "concurrency": 8, "load_control": control}}
    with running(broker, configured(tiny_model, **settings), Full()):
        assert broker.all(Slots)[0].free == 8
        if control:
            broker.wait(lambda: any(slots.free == 1 for slots in broker.all(Slots)))
        else:
            broker.wait(lambda: len(broker.all(Stats)) > 5)
            assert {slots.free for slots in broker.all(Slots)} == {8}
