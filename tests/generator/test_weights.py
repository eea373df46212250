"""Weights that another host serves: pulled before an engine takes them over; meanwhile it serves what it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generator import test_worker
from generator.test_worker import Broker, broker, configured, engine_that  # noqa: F401 - a fixture

from sao.generator.weights import Arrivals
from sao.generator.worker import Generator
from sao.transport.messages import Loaded, NewWeights, WeightsRef
from sao.transport.sockets import Limits
from sao.transport.weight_bus import WeightsServer
from sao.transport.weights import publish


@pytest.fixture
def server() -> Iterator[WeightsServer]:
    server = WeightsServer("tcp://127.0.0.1:0", Limits(heartbeat_s=0.1))
    yield server
    server.close()


def served(server: WeightsServer, folder: Path, version: int) -> WeightsRef:
    folder.mkdir(exist_ok=True)
    ref = publish({"w": torch.full((1000,), float(version))}, folder, version)
    return replace(server.publish(ref), path="/no/such/file")


def test_the_engine_serves_what_it_has_while_the_learner_cannot_be_reached(
    tiny_model: Path,
    tmp_path: Path,
    broker: Broker,  # noqa: F811
    server: WeightsServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, engine, local = configured(tiny_model), engine_that(), tmp_path / "local"
    local.mkdir()
    arrivals = Arrivals(config, local, "tcp://127.0.0.1:1", "g0", 0)

    def with_arrivals(*arguments: Any) -> Generator:
        return Generator(*arguments, arrivals)

    monkeypatch.setattr(test_worker, "Generator", with_arrivals)
    with test_worker.running(broker, config, engine) as generator:
        first = served(server, tmp_path / "published", 1)
        broker.push(NewWeights(first))
        broker.wait(lambda: broker.all(Loaded)[-1] == Loaded(1, first.fingerprint))
        assert [path.name for path in local.iterdir()] == ["weights-0000000001.safetensors"]
        wrong = replace(served(server, tmp_path / "published", 2), fingerprint="0" * 32)
        broker.push(NewWeights(wrong))
        time.sleep(2.5)  # longer than the patience of a generator whose learner is on the same host
        assert engine.version == 1 and not generator._stopped.is_set()
        broker.tasks(1)
        broker.wait(lambda: broker.trajectories)
        assert broker.trajectories[0].fingerprints == {1: first.fingerprint}
        newest = served(server, tmp_path / "published", 4)
        served(server, tmp_path / "published", 3)
        broker.push(NewWeights(newest))
        broker.wait(lambda: broker.all(Loaded)[-1] == Loaded(4, newest.fingerprint))
        assert [path.name for path in local.iterdir()] == ["weights-0000000004.safetensors"]
    assert not local.exists()
    assert [version for kind, version in engine.calls if kind == "update_weights"] == [1, 4]


def test_a_file_that_is_here_is_not_pulled(tiny_model: Path, tmp_path: Path, server: WeightsServer) -> None:
    import asyncio

    ref = server.publish(publish({"w": torch.zeros(10)}, tmp_path, 1))
    arrivals = Arrivals(configured(tiny_model), tmp_path / "local", "tcp://127.0.0.1:1", "g0", 0)
    assert asyncio.run(arrivals.local(ref)) is ref
    assert asyncio.run(arrivals.local(replace(ref, path="/no/such/file", source=""))).path == "/no/such/file"
    assert server.sent_bytes == 0
