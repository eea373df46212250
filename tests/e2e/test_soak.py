"""Agents that misbehave, some hundred of them; `bench/soak.py` has 100,000."""

from __future__ import annotations

import pytest
from tests.e2e.soaking import Soaking

pytestmark = pytest.mark.timeout(300)


def test_every_failure_of_an_agent_is_under_its_reason(tmp_path, tiny_model):
    run = Soaking(tmp_path / "run", tiny_model, steps=12)
    run.play(240.0, every_s=1.0)
    found = run.check()
    assert found["programs"] >= 20 and len(found["dropped_by_reason"]) >= 4, found
    assert all(sample["broker/descriptors"] < 40 for sample in run.samples), run.samples
