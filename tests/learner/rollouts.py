"""Rollouts made of random tokens, and the small configuration that the learner tests train with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import Config, parse
from sao.trajectory import Segment, SegmentBuilder, Termination, Trajectory

VOCABULARY = 48


def make_segment(
    rng: np.random.Generator,
    turns: Sequence[tuple[int, int]],
    *,
    versions: Sequence[int] = (0,),
    kind: str = "execution",
    logprob: float | None = None,
) -> Segment:
    """A segment of (context tokens, sampled tokens) turns; the sampled tokens are split evenly over `versions`."""
    builder = SegmentBuilder(kind)
    total, done = sum(sampled for _, sampled in turns), 0
    for context, sampled in turns:
        builder.append_context(rng.integers(3, VOCABULARY, context).astype(np.int32))
        if sampled:
            ids = rng.integers(3, VOCABULARY, sampled).astype(np.int32)
            drawn = -np.log(VOCABULARY) + rng.normal(0, 1.0, sampled)
            logprobs = np.minimum(drawn if logprob is None else logprob, -1e-3) + np.zeros(sampled)
            stamps = [versions[index * len(versions) // total] for index in range(done, done + sampled)]
            spans = [(index, index + 1, stamp) for index, stamp in enumerate(stamps)]
            builder.append_sampled(ids, logprobs.astype(np.float32), np.array(spans, dtype=np.int64))
            done += sampled
    return builder.build()


def make_trajectory(
    rng: np.random.Generator,
    segments: Sequence[Segment],
    *,
    reward: float | None = None,
    temperature: float = 1.0,
    kind: str = "finished",
    ordinal: int = 0,
    name: bytes | None = None,
    **fields: Any,
) -> Trajectory:
    """A trajectory with a random id, or `name`; the reward is 0 or 1 unless it is given."""
    return Trajectory(
        id=name or rng.bytes(16),
        task_ordinal=ordinal,
        attempt=0,
        env="test",
        segments=tuple(segments),
        reward=None if kind == "failed" else float(rng.integers(0, 2)) if reward is None else reward,
        termination=Termination(kind, "" if kind == "finished" else "test"),
        temperature=temperature,
        **fields,
    )


def random_batch(seed: int, count: int, *, versions: Sequence[int] = (0,), long: int = 0) -> list[Trajectory]:
    """`count` rollouts of 1 to 3 segments at different temperatures; with `long`, the first has that many tokens."""
    rng = np.random.default_rng(seed)
    batch = []
    for index in range(count):
        segments = []
        for _ in range(int(rng.integers(1, 4))):
            turns = [(int(rng.integers(1, 6)), int(rng.integers(0, 6))) for _ in range(int(rng.integers(1, 4)))]
            segments.append(make_segment(rng, [*turns, (1, 2)], versions=versions))
        if long and index == 0:
            segments = [make_segment(rng, [(long // 2, long - long // 2)], versions=versions)]
        batch.append(make_trajectory(rng, segments, temperature=float(rng.choice([0.7, 1.0, 1.5])), ordinal=index))
    return batch


def make_config(model: Path, **values: Any) -> Config:
    """The tests' configuration; `learner__row_tokens=64` sets `learner.row_tokens`."""
    data: dict[str, Any] = {
        "run": {"steps": 20},
        "model": {"path": str(model), "dtype": "float64"},
        "env": {"name": "lookup"},
        "sampling": {"context_tokens": 64, "max_response_tokens": 32},
        "learner": {
            "row_tokens": 64,
            "rows_per_micro_batch": 4,
            "critic_warmup_steps": 0,
            "policy_lr": 1e-3,
            "critic_lr": 1e-2,
        },
    }
    for name, value in values.items():
        section, _, field = name.partition("__")
        data.setdefault(section, {})[field] = value
    return parse(data)
