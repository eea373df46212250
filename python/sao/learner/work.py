"""One step in progress on this rank: its batch, its micro-batches, and where times, metrics and arrays go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from sao.learner.batch import Batch, MicroBatch
from sao.learner.plan import Plan
from sao.learner.world import World


class Skipped(Exception):
    """Why a step, or a further pass of it, is not applied; raised on every rank alike."""


class Work:
    """One step in progress. `arrays`: what `sao.telemetry.recording` keeps of it."""

    def __init__(self, batch: Batch, plan: Plan, micro: list[MicroBatch]) -> None:
        self.batch, self.micro = batch, micro
        self.n_actions = int(batch.action_mask.sum())  # of the whole batch, on all ranks
        self.seconds: dict[str, float] = {}  # by cause
        self.metrics: dict[str, float] = {}
        self.arrays: dict[str, NDArray[Any]] = {"rollout_logprobs": batch.logprobs}
        self.arrays |= {name: getattr(batch, name) for name in ("lags", "segment_offsets", "trajectory_offsets")}
        self.arrays |= {f"plan_{name}": getattr(plan, name) for name in ("rank", "micro_batch", "row", "position")}
        # Log-prob of each token of this rank and the entropy it was sampled at, and 1 where there are any.
        self._scores = torch.zeros(3, len(batch.token_ids), device=micro[0].flat.device)

    @contextmanager
    def timed(self, cause: str) -> Iterator[None]:
        """Adds the time spent in the block to `cause`."""
        start = time.perf_counter()
        yield
        self.seconds[cause] = self.seconds.get(cause, 0.0) + time.perf_counter() - start

    def record_scores(self, flat: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Keeps what the current policy gives this rank's tokens, by flat index."""
        self._scores[0, flat], self._scores[1, flat] = logprobs.detach().float(), entropies.detach().float()
        self._scores[2, flat] = 1.0

    def record(self, world: World) -> dict[str, NDArray[Any]]:
        """All arrays, with the scores of all ranks (NaN where none was computed). A collective."""
        *scores, seen = world.total(self._scores)
        found = (torch.where(seen > 0, score, torch.nan).cpu().numpy() for score in scores)
        return self.arrays | dict(zip(("logprobs", "entropies"), found, strict=True))
