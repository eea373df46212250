"""Several engines as one: where sessions go, and that after an update all that samples is one version."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from sao.engines.base import Request
from sao.engines.group import EngineGroup
from sao.engines.scripted import Reply, ScriptedEngine
from sao.engines.vllm_process import devices_of
from sao.errors import ClosedError, EngineError, WeightsError
from sao.transport.reference import WeightsRef


def ref(version: int) -> WeightsRef:
    return WeightsRef(version, "/nowhere", f"{version:032x}")


def request(session: str, number: int = 0) -> Request:
    return Request(f"{session}/{number}", session, np.array([3], np.int32), 4, 1.0, (0,))


def slow(_: Request, __: int) -> Reply:
    return Reply([5, 0], delay_s=0.05)


def test_sessions_are_spread_and_stay():
    async def play() -> None:
        engines = [ScriptedEngine(), ScriptedEngine(), ScriptedEngine()]
        group = EngineGroup(engines)
        await group.start(None)
        for turn in range(3):
            await asyncio.gather(*(group.generate(request(f"s{i}", turn)) for i in range(9)))
        for engine in engines:
            counts = Counter(asked.session for asked in engine.requests)
            assert set(counts.values()) == {3} and len(counts) == 3
        for i in range(9):
            await group.release(f"s{i}")
        assert group._sessions == {}
        assert [sum(name == "release" for name, _ in engine.calls) for engine in engines] == [3, 3, 3]
        assert group.stats().sampled_tokens == sum(engine.stats().sampled_tokens for engine in engines)

    asyncio.run(play())


def test_an_update_goes_to_all_and_a_refusal_by_all_keeps_the_old():
    async def play() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        group = EngineGroup(engines)
        await group.start(None)
        await group.update_weights(ref(3))
        assert [engine.version for engine in engines] == [3, 3]
        assert (group.version, group.fingerprint) == (3, ref(3).fingerprint)
        for engine in engines:
            engine.weights_error = WeightsError("torn file")
        with pytest.raises(WeightsError, match="torn file"):
            await group.update_weights(ref(4))
        assert group.version == 3 and group.broken is None
        await group.update_weights(ref(5))
        assert [engine.version for engine in engines] == [5, 5] and group.broken is None

    asyncio.run(play())


@pytest.mark.parametrize("error", [WeightsError("torn file"), EngineError("load failed")])
def test_one_of_two_that_does_not_take_an_update_is_never_asked_again(error):
    async def play() -> None:
        engines = [ScriptedEngine(script=slow), ScriptedEngine(script=slow)]
        group = EngineGroup(engines)
        await group.start(None)
        await asyncio.gather(*(group.generate(request(f"s{i}")) for i in range(4)))
        engines[1].weights_error = error
        await group.update_weights(ref(1))
        assert engines[1].closed and not engines[0].closed
        assert (group.version, group.fingerprint, group.broken) == (1, ref(1).fingerprint, None)
        asked = len(engines[1].requests)
        done = await asyncio.gather(*(group.generate(request(f"s{i}", 1)) for i in range(6)))
        assert {span[2] for completion in done for span in completion.version_spans.tolist()} == {1}
        assert len(engines[1].requests) == asked
        engines[0].weights_error = EngineError("load failed too")
        with pytest.raises(EngineError, match="load failed too"):
            await group.update_weights(ref(2))

    asyncio.run(play())


def test_an_engine_whose_process_dies_is_left_and_the_last_one_breaks_the_group():
    async def play() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        group = EngineGroup(engines)
        await group.start(None)
        await group.generate(request("a"))
        await group.generate(request("b"))
        engines[0].broken = "its process has died"
        engines[0].script = lambda *_: Reply([], error=EngineError("its process has died"))
        with pytest.raises(EngineError, match="died"):
            await group.generate(request("a", 1))
        assert (await group.generate(request("a", 2))).token_ids.size > 0
        assert group.broken is None
        engines[1].broken = "out of memory"
        with pytest.raises(EngineError, match=r"none is left: engine 0: its process has died; engine 1: out of memory"):
            await group.generate(request("b", 1))
            await group.generate(request("b", 2))
        assert group.broken == "engine 0: its process has died; engine 1: out of memory"

    asyncio.run(play())


def test_a_request_on_an_engine_that_is_given_up_fails_as_an_engine_does():
    """And not as one that was closed in order, which would end the generator."""

    async def play() -> None:
        engines = [ScriptedEngine(), ScriptedEngine()]
        group = EngineGroup(engines)
        await group.start(None)
        engines[0].script = lambda *_: Reply([5], delay_s=0.05, error=ClosedError("closed in flight"))
        flight = asyncio.ensure_future(group.generate(request("a")))
        await asyncio.sleep(0)
        engines[0].weights_error = EngineError("load failed")
        await group.update_weights(ref(1))
        with pytest.raises(EngineError, match="engine 0: did not take version 1: load failed"):
            await flight

    asyncio.run(play())


def test_one_that_cannot_start_closes_all():
    class Failing(ScriptedEngine):
        async def start(self, ref: WeightsRef | None) -> None:
            raise EngineError("no memory")

    engines = [ScriptedEngine(), Failing()]
    with pytest.raises(EngineError, match="no memory"):
        asyncio.run(EngineGroup(engines).start(None))
    assert all(engine.closed for engine in engines)


def test_each_engine_takes_the_gpus_behind_those_of_the_one_before(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices_of(k, {}, 4) for k in range(4)] == ["0", "1", "2", "3"]
    assert [devices_of(k, {"tensor_parallel_size": 2}, 4) for k in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert devices_of(1, {}, 3) == "6"
    with pytest.raises(EngineError, match="engine 1 needs GPUs 2 to 3, 3 are visible"):
        devices_of(1, {"tensor_parallel_size": 2}, 3)
