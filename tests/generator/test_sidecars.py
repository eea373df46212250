"""Trajectories with sidecars leave a generator with the frames that belong to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from generator.test_worker import broker, configured, engine_that, running

from sao.generator import player

__all__ = ["broker"]  # a fixture
EXPERTS = np.arange(24, dtype=np.uint8).reshape(3, 8)


@pytest.fixture
def attached(monkeypatch):
    """Every episode's trajectory gets a sidecar."""
    real = player.run_episode

    async def run_episode(*arguments, **more):
        return replace(await real(*arguments, **more), sidecars={"experts": EXPERTS})

    monkeypatch.setattr(player, "run_episode", run_episode)


def test_sidecars_leave_with_their_trajectory(tiny_model, broker, attached):
    with running(broker, configured(tiny_model), engine_that()):
        broker.tasks(10)
        broker.wait(lambda: broker.trajectories)
    assert np.array_equal(broker.trajectories[0].sidecars["experts"], EXPERTS)
