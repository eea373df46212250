"""Advantage whitening, off by default: not part of SAO, and it re-centres the credit that discounting has set.

A'_t = (A_t - mean) / (std + 1e-8)      mean and population std over all action tokens of the batch
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def whiten(advantages: NDArray[np.float32], action_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """advantages float32[n] of a whole batch, action_mask bool[n] -> whitened float32[n], 0 at non-actions.

    Statistics in float64 over the mask only: each sampled token counts once, however a rollout is cut into segments.
    Fewer than two action tokens are returned unchanged.
    """
    chosen = advantages[action_mask].astype(np.float64)
    out = np.zeros_like(advantages)
    out[action_mask] = chosen if chosen.size < 2 else (chosen - chosen.mean()) / (chosen.std() + 1e-8)
    return out
