"""A generator and `sao eval` that compact, with real engines: the policy's, and a fixed summariser's beside it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from generator.test_worker import FAST, Broker, broker, running
from rollout.compacting import Talk, configured
from scripted import Reply, ScriptedEngine
from tiny_model import make_folder

from sao.config import Config, parse
from sao.engines.base import Request
from sao.engines.torch_engine import TorchEngine
from sao.errors import ConfigError, EngineError
from sao.generator import worker as actor
from sao.runtime.evaluate import evaluate
from sao.transport.messages import FailedRollout, Slots, Stop

__all__ = ["broker"]


class Long(Talk):
    """Ten observations of three words."""

    def __init__(self) -> None:
        super().__init__([3] * 10)


def setting(path: Path, folder: Path, **compaction: object) -> Config:
    """A run in which two windows are not enough, whatever a random policy says."""
    plain = configured(path, folder, context=80, max_compactions=2, **compaction).model_dump(mode="json")
    plain["env"]["name"] = f"{__name__}:Long"
    plain["transport"] |= FAST
    plain["generator"] |= {"concurrency": 4}
    plain["eval"] |= {"episodes": 5}
    return parse(plain)


def test_a_generator_with_a_fixed_summariser(
    tiny_model: Path, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines are started and closed; summaries are context, and the policy's weights alone are stamped."""
    made: list[TorchEngine] = []
    plain = TorchEngine.__init__

    def remembered(self: TorchEngine, *args: object, **more: object) -> None:
        made.append(self)
        plain(self, *args, **more)

    monkeypatch.setattr(TorchEngine, "__init__", remembered)
    other = make_folder(tmp_path / "other", seed=9)
    config = setting(tiny_model, tmp_path, summariser=str(other))
    generator = actor.make_generator(config, broker.actor.endpoint, "g0", 0)
    thread = threading.Thread(target=lambda: asyncio.run(generator.run()), daemon=True)
    thread.start()
    broker.wait(lambda: broker.all(Slots), 30.0)
    broker.tasks(1, 2, 3)
    broker.wait(lambda: len(broker.trajectories) == 3, 30.0)
    broker.push(Stop("end of test"))
    thread.join(20)
    policy, summariser = made
    for trajectory in broker.trajectories:
        assert {segment.kind for segment in trajectory.segments} == {"execution"}
        assert trajectory.metadata["compactions"] >= 1 and len(trajectory.fingerprints) == 1
        assert trajectory.metadata["compaction_summariser"] == str(other)
    assert not thread.is_alive() and policy.closed and summariser.closed


@pytest.mark.parametrize("good", [0, 1], ids=["from the start", "later"])
def test_a_summariser_that_is_broken_for_good_ends_the_generator_not_the_run(
    tiny_model: Path, tmp_path: Path, broker: Broker, good: int
) -> None:
    """Otherwise every rollout would fail as soon as it compacts, in an environment that is not to blame."""

    def broken(request: Request, number: int) -> Reply:
        return Reply([20], stop_reason="length") if number < good else Reply([], error=EngineError("engine: gone"))

    config = setting(tiny_model, tmp_path, summariser=str(tiny_model))
    policy, summariser = ScriptedEngine(), ScriptedEngine(broken)
    with (
        pytest.raises(EngineError, match="engine: gone"),
        running(broker, config, policy, ready=bool(good), summariser=summariser),
    ):
        if good:
            broker.tasks(1, 2)
            broker.wait(lambda: broker.left or broker.all(FailedRollout))
    assert not broker.all(FailedRollout) and bool(broker.all(Slots)) == bool(good)


@pytest.mark.parametrize("fixed", [False, True], ids=["policy", "fixed"])
def test_evaluation_compacts_too(tiny_model: Path, tmp_path: Path, fixed: bool) -> None:
    more = {"summariser": str(make_folder(tmp_path / "other", seed=9))} if fixed else {}
    result = evaluate(setting(tiny_model, tmp_path, **more))
    assert len(result.rewards) == 5 and result.failures == {}


def test_lengths_that_only_the_tokenizer_knows_end_a_generator_with_a_wrong_configuration(
    tiny_model: Path, tmp_path: Path, broker: Broker
) -> None:
    with pytest.raises(ConfigError, match=r"compaction\.threshold_tokens: 31 must be at least 32"):
        actor.make_generator(setting(tiny_model, tmp_path, threshold_tokens=31), broker.actor.endpoint, "g0", 0)
