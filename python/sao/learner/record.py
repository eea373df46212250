"""What a step leaves for `sao.telemetry.recording`: arrays over the flat tokens of the batch, equal on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sao.learner.batch import Batch
from sao.learner.world import World


class Record:
    """Collects the arrays of one step; every rank makes the same calls."""

    def __init__(self, batch: Batch, plan: Any, device: torch.device) -> None:
        self._arrays: dict[str, NDArray[Any]] = {
            "rollout_logprobs": batch.logprobs,
            "lags": batch.lags,
            "segment_offsets": batch.segment_offsets,
            "trajectory_offsets": batch.trajectory_offsets,
            **{f"plan_{name}": np.asarray(getattr(plan, name)) for name in ("rank", "micro_batch", "row", "position")},
        }
        n_tokens = len(batch.token_ids)
        self._logprobs = torch.zeros(n_tokens, dtype=torch.float32, device=device)
        self._seen = torch.zeros(n_tokens, dtype=torch.float32, device=device)

    def put(self, **arrays: NDArray[Any]) -> None:
        """Keeps copies, in place of what had the same name."""
        self._arrays.update({name: array.copy() for name, array in arrays.items()})

    def add_logprobs(self, flat: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Current log-probs of this rank's tokens, by flat index."""
        self._logprobs[flat] = logprobs.detach().float()
        self._seen[flat] = 1.0

    def finish(self, world: World) -> dict[str, NDArray[Any]]:
        """All arrays; log-probs of all ranks, NaN where none was computed."""
        logprobs, seen = world.total(self._logprobs), world.total(self._seen)
        self.put(logprobs=torch.where(seen > 0, logprobs, torch.nan).cpu().numpy())
        return self._arrays
