"""A checkpoint's folder is a model that vLLM serves: its log-probs are those of the learner's policy."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engines.full_forward import largest_difference
from learner.rollouts import make_config, random_batch
from tiny_model import make_folder

from sao.engines.base import Request
from sao.learner.checkpoint import Checkpointer
from sao.learner.step import Learner
from sao.storage.checkpoints import newest

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(170)]


def test_vllm_serves_a_checkpoint(tmp_path):
    from sao.engines.vllm.engine import VllmEngine

    (tmp_path / "model").mkdir()
    make_folder(tmp_path / "model", head_dim=32)  # vLLM's attention on a CPU has no smaller heads
    learner = Learner(make_config(tmp_path / "model", model__dtype="float32", learner__policy_lr=1e-2))
    for number in range(2):
        learner.step(random_batch(number, 5))
    saver = Checkpointer(learner, tmp_path / "checkpoints")
    assert saver.save(1, [(0, 0)]) is None and saver.finish() is None
    path = newest(tmp_path / "checkpoints")[0].path
    engine = VllmEngine(path, context_tokens=256, concurrency=4, vllm_args={"kv_cache_memory_bytes": 64 << 20})

    async def serve():
        await engine.start()
        try:
            prompt = np.random.default_rng(0).integers(3, 48, 20).astype(np.int32)
            request = Request("r", "s", prompt, 16, 1.0, ())
            return request, await engine.generate(request)
        finally:
            await engine.close()

    request, completion = asyncio.run(serve())
    assert largest_difference({0: learner.policy.lm}, request, completion) < 1e-4
