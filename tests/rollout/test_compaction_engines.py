"""Compacted rollouts of real engines: every segment's log-probs are those of a full forward pass over that segment, and
of the learner's packed rows, although the engine reuses what it has cached of earlier windows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout.compacting import Talk, configured
from tiny_model import make_folder

from sao.config import Config
from sao.engines.base import Engine
from sao.engines.torch_engine import TorchEngine, load_model
from sao.learner.step import Learner
from sao.rollout.chat import Renderer
from sao.rollout.compaction import Compactor
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory

TOLERANCE = 1e-4
N_EPISODES = 8
SHAPE = {"head_dim": 32}  # the smallest heads that vLLM's attention on a CPU has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), 3, **SHAPE)


def setting(folder: Path, tmp_path: Path, **more: object) -> Config:
    return configured(folder, tmp_path, context=128, response=8, max_summary_tokens=10, keep_steps=2, **more)


async def played(engine: Engine, config: Config) -> list[Trajectory]:
    """Eight episodes at once, of observations of different lengths."""
    renderer = Renderer(config.model.path)
    compactor = Compactor(config, renderer)
    rng = np.random.default_rng(1)
    talks = [Talk([int(n) for n in rng.integers(1, 12, 16)], turn_rewards={3: 0.5}) for _ in range(N_EPISODES)]
    await engine.start()
    try:
        return list(
            await asyncio.gather(
                *(
                    run_episode(
                        Recorder(engine, renderer, config, Assignment(i, 0, i, "train"), 5), talk, compactor=compactor
                    )
                    for i, talk in enumerate(talks)
                )
            )
        )
    finally:
        await engine.close()


def check(trajectories: list[Trajectory], config: Config) -> None:
    model = load_model(config.model.path).double()
    worst = 0.0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            ids = torch.from_numpy(segment.token_ids.astype(np.int64))
            with torch.inference_mode():
                scores = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            at = np.flatnonzero(segment.action_mask)
            expected = scores[at - 1, ids[at]].numpy()
            worst = max(worst, float(np.abs(expected - segment.logprobs[at]).max()))
            assert np.isnan(np.delete(segment.logprobs, at)).all()
    assert worst < TOLERANCE
    compactions = [trajectory.metadata["compactions"] for trajectory in trajectories]
    assert sum(compactions) >= N_EPISODES and max(compactions) >= 2, "the episodes were too short to show anything"
    result = Learner(config).step(trajectories)
    assert result.metrics["logprob_gap/max"] < TOLERANCE
    assert result.trained_tokens == sum(trajectory.n_actions for trajectory in trajectories)
    assert result.metrics["rollout/compactions"] == np.mean(compactions)


def test_segments_of_the_torch_engine(folder: Path, tmp_path: Path) -> None:
    config = learning(setting(folder, tmp_path))
    engine = TorchEngine(folder, slots=5, context_tokens=128, seed=0, threads=1)
    check(asyncio.run(played(engine, config)), config)


@pytest.mark.vllm
@pytest.mark.timeout(170)
@pytest.mark.slow
def test_segments_of_vllm_with_its_prefix_cache(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs the extra `vllm`")
    from sao.engines.vllm.engine import VllmEngine

    config = learning(setting(folder, tmp_path))
    arguments = {"kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": True}
    engine = VllmEngine(folder, context_tokens=128, concurrency=N_EPISODES, vllm_args=arguments)
    check(asyncio.run(played(engine, config)), config)


def learning(config: Config) -> Config:
    """With a learner that trains at its first step."""
    return config.model_copy(update={"learner": config.learner.model_copy(update={"critic_warmup_steps": 0})})
