"""Trajectories with sidecars leave a generator when everybody can read them, and are a failure by name when not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from generator.test_worker import broker, configured, engine_that, running

from sao import _core
from sao.generator import worker as actor

__all__ = ["broker"]  # a fixture
EXPERTS = np.arange(24, dtype=np.uint8).reshape(3, 8)


@pytest.fixture
def attached(monkeypatch):
    """Every episode's trajectory gets a sidecar."""
    real = actor.run_episode

    async def run_episode(*arguments, **more):
        return replace(await real(*arguments, **more), sidecars={"experts": EXPERTS})

    monkeypatch.setattr(actor, "run_episode", run_episode)


def test_it_says_what_it_reads_and_writes_what_it_was_told(tiny_model, broker, attached):
    broker.welcome["formats"] = [1, 2]
    with running(broker, configured(tiny_model), engine_that()):
        assert broker.peers[0].hello["formats"] == list(_core.WIRE_FORMATS)
        broker.tasks(10)
        broker.wait(lambda: broker.trajectories)
        assert np.array_equal(broker.trajectories[0].sidecars["experts"], EXPERTS)
        broker.push("formats", formats=[1])  # a learner that reads no more has joined
        broker.tasks(11)
        broker.wait(lambda: broker.all("failure"))
        broker.push("formats", formats=[1, 2])
        broker.tasks(12)
        broker.wait(lambda: len(broker.trajectories) == 2)
    (failure,) = broker.all("failure")
    assert failure["ordinal"] == 11 and failure["reason"] == "bad_trajectory" and failure["sampled_tokens"] == 6
    assert failure["detail"] == "sidecars: need format 2, the reader reads [1]"


def test_a_broker_that_names_no_format_gets_format_1(tiny_model, broker, attached):
    with running(broker, configured(tiny_model), engine_that()):
        broker.tasks(10)
        broker.wait(lambda: broker.all("failure"))
    assert "need format 2, the reader reads [1]" in broker.all("failure")[0]["detail"]
