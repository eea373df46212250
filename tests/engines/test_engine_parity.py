"""The torch engine, the vLLM engine and the learner's packed forward pass agree on log-probs, on the same tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines.full_forward import full_forward, largest_difference
from learner.rollouts import make_config
from tiny_model import make_folder, make_model

from sao.engines.base import Completion, Engine, Request
from sao.engines.torch_engine import TorchEngine
from sao.engines.vllm.engine import VllmEngine
from sao.errors import ClosedError
from sao.learner.batch import flatten, micro_batches
from sao.learner.model import Policy, load_policy
from sao.learner.plan import plan_segments
from sao.learner.world import World
from sao.trajectory import SegmentBuilder, Termination, Trajectory
from sao.transport.weights import publish

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(170)]

TOLERANCE = 1e-4
CONTEXT = 256
# Untied embeddings and biases, which other tests of the engines do not have.
SHAPE = {"head_dim": 32, "tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 3}


class Both:
    """One engine of each kind on the same folder, and the loop they live in."""

    def __init__(self, folder: Path, published: Path) -> None:
        self.folder, self.published = folder, published
        self.models = {0: make_model(0, **SHAPE)}
        self.runner = asyncio.Runner()
        # "keep" here; the tests of the vLLM engine have the default, "recompute".
        arguments = {"kv_cache_memory_bytes": 64 << 20, "kv_after_update": "keep"}
        self.vllm = VllmEngine(folder, context_tokens=CONTEXT, concurrency=16, vllm_args=arguments)
        self.torch = TorchEngine(folder, slots=16, context_tokens=CONTEXT, seed=1, threads=1)
        for engine in self.engines:
            self.runner.run(engine.start())
        self.numbers = itertools.count()
        self.rng = np.random.default_rng(0)

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.vllm, self.torch

    def request(self, prompt: np.ndarray, new: int, session: str | None = None, **more: Any) -> Request:
        number = next(self.numbers)
        values: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": (2,), "seed": None} | more
        return Request(f"r{number}", session or f"s{number}", prompt.astype(np.int32), new, **values)

    def both(self, asked: list[Request]) -> tuple[list[Completion], list[Completion]]:
        """The same requests by vLLM and by torch."""

        async def run(engine: Engine) -> list[Completion]:
            return await asyncio.gather(*(engine.generate(request) for request in asked))

        return self.runner.run(run(self.vllm)), self.runner.run(run(self.torch))

    def play(self, engine: Engine, number: int, temperature: float) -> Trajectory:
        """Three turns with random observations between, as a trajectory of what the engine said about them."""

        async def turns() -> Trajectory:
            builder = SegmentBuilder("execution")
            ids = self.rng.integers(3, 48, 10 + number)
            builder.append_context(ids.astype(np.int32))
            fingerprints: dict[int, str] = {}
            for turn in range(3):
                asked = self.request(ids, 20, f"play {number}", temperature=temperature)
                completion = await engine.generate(asked)
                assert largest_difference(self.models, asked, completion) < TOLERANCE
                builder.append_sampled(completion.token_ids, completion.logprobs, completion.version_spans)
                fingerprints |= completion.fingerprints
                glue = self.rng.integers(3, 48, 6)
                if turn < 2:
                    builder.append_context(glue.astype(np.int32))
                ids = np.concatenate([ids, completion.token_ids, glue])
            await engine.release(f"play {number}")
            return Trajectory(
                id=number.to_bytes(16, "big"),
                task_ordinal=number,
                attempt=0,
                env="test",
                segments=(builder.build(),),
                reward=1.0,
                termination=Termination("finished", ""),
                temperature=temperature,
                fingerprints=fingerprints,
            )

        return self.runner.run(turns())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    torch.set_num_threads(1)
    folder = make_folder(tmp_path_factory.mktemp("model"), 0, **SHAPE)
    both = Both(folder, tmp_path_factory.mktemp("published"))
    yield both
    for engine in both.engines:
        both.runner.run(engine.close())
    both.runner.close()


def learner_differences(policy: Policy, trajectories: list[Trajectory]) -> np.ndarray:
    """The learner's log-probs, as in a step (packed, several rollouts a row), less the engine's: float32[n actions]."""
    batch = flatten(trajectories, version=max(t.max_version for t in trajectories))
    plan = plan_segments(batch.lengths, 1, CONTEXT, 2)
    found = np.full(batch.token_ids.size, np.nan, dtype=np.float32)
    for part in micro_batches(batch, plan, 0, torch.device("cpu")):
        with torch.no_grad():
            scores, _ = policy(part)
        found[part.flat.numpy()] = scores.numpy()
    assert (np.isnan(found) == ~batch.action_mask).all()
    return found[batch.action_mask] - batch.logprobs[batch.action_mask]


def test_engines_and_learner_agree_on_rollouts(both: Both) -> None:
    window = {"sampling__context_tokens": CONTEXT, "learner__row_tokens": CONTEXT}
    policy = load_policy(make_config(both.folder, model__dtype="float32", **window), World.alone())
    for engine in both.engines:
        rollouts = [both.play(engine, number, temperature) for number, temperature in enumerate((1.0, 0.7, 1.3, 1.0))]
        differences = learner_differences(policy, rollouts)
        assert differences.size >= 20
        assert float(np.abs(differences).max()) < TOLERANCE


def agree(both: Both) -> None:
    """Greedy tokens are the same in both engines, so that their log-probs compare directly."""
    asked = [both.request(both.rng.integers(3, 48, 20 + 5 * index), 30, temperature=0.0) for index in range(8)]
    for request, ours, theirs in zip(asked, *both.both(asked), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.stop_reason == theirs.stop_reason
        assert ours.version_spans.tolist() == theirs.version_spans.tolist()
        assert ours.fingerprints == theirs.fingerprints
        assert float(np.abs(ours.logprobs - theirs.logprobs).max()) < TOLERANCE
        assert largest_difference(both.models, request, ours) < TOLERANCE


def test_engines_agree_with_each_other(both: Both) -> None:
    agree(both)


def test_kept_keys_change_only_what_was_in_flight(both: Both) -> None:
    prompt = both.rng.integers(3, 48, 100)

    async def update() -> tuple[list[Request], list[Completion]]:
        both.models[1] = make_model(1, **SHAPE)
        ref = publish(dict(both.models[1].named_parameters()), both.published, 1)
        asked = [both.request(prompt, 120, stop_token_ids=()) for _ in range(8)]
        flights = [asyncio.ensure_future(both.vllm.generate(request)) for request in asked]
        await asyncio.sleep(0.1)
        await both.vllm.update_weights(ref)
        await both.torch.update_weights(ref)
        # Begun while others still hold keys of the old weights for the same prompt.
        asked.append(both.request(prompt, 40, stop_token_ids=()))
        flights.append(asyncio.ensure_future(both.vllm.generate(asked[-1])))
        return asked, await asyncio.gather(*flights)

    asked, done = both.runner.run(update())
    assert done[-1].version_spans.tolist() == [[0, 40, 1]]
    assert largest_difference(both.models, asked[-1], done[-1]) < TOLERANCE
    for request, completion in zip(asked[:-1], done[:-1], strict=True):
        (_, at, first), (_, _, second) = completion.version_spans.tolist()
        assert (first, second) == (0, 1)
        old, new = (full_forward(both.models[version], request, completion) for version in (0, 1))
        assert float(np.abs(old - completion.logprobs)[:at].max()) < TOLERANCE
        assert float(np.abs(new - completion.logprobs)[at:].max()) > 0.01  # keys of both versions, as documented


def test_engines_agree_after_an_update(both: Both) -> None:
    assert both.vllm.version == both.torch.version == 1
    assert both.vllm.fingerprint == both.torch.fingerprint
    agree(both)


def test_close_ends_requests_in_flight(both: Both) -> None:
    async def close() -> None:
        flight = asyncio.ensure_future(both.vllm.generate(both.request(np.arange(3, 13), 200, stop_token_ids=())))
        await asyncio.sleep(0.05)
        await both.vllm.close()
        with pytest.raises(ClosedError):
            await flight

    both.runner.run(close())
