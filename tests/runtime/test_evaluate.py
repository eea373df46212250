"""`sao eval` against an engine that does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.runs import write

from sao.config import load
from sao.engines.base import Completion, Request
from sao.engines.torch_engine import TorchEngine
from sao.runtime.evaluate import evaluate


def test_an_engine_that_never_answers_is_waited_for_until_the_deadline(
    tmp_path: Path, tiny_model: Path, monkeypatch
) -> None:
    async def never(self: TorchEngine, request: Request) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(TorchEngine, "generate", never)
    config = load(write(tmp_path, tiny_model), ["transport.rollout_timeout_s=0.3", "eval.episodes=4"])
    result = evaluate(config)
    assert result.rewards == () and result.failures == {"deadline": 4}
    assert "none of the episodes was scored" in str(result)
