"""Group-relative advantages: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), a baseline without a critic.

    A_i = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + 1e-6)        R of the G rollouts of one task; population std

Every action token of rollout i gets A_i. A group of equal rewards teaches nothing: A = 0. With `policy_loss = "ppo"`
this is GRPO, with "dis" it is the stabilised GRPO that SAO compares itself with (arXiv 2607.07508, table 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sao.errors import ValidationError

EPSILON = 1e-6


def group_advantages(rewards: NDArray[np.float64], groups: NDArray[np.int64], group_size: int) -> NDArray[np.float64]:
    """rewards float64[t], groups int64[t] (which group each rollout is of) -> advantages float64[t].

    Raises `ValidationError` for a group that does not have exactly `group_size` rollouts.
    """
    names, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if (counts != group_size).any():
        wrong = int(np.flatnonzero(counts != group_size)[0])
        raise ValidationError(f"group {names[wrong]}: {counts[wrong]} rollouts, expected {group_size}")
    mean = np.bincount(group, rewards) / group_size
    distance = rewards - mean[group]
    deviation = np.sqrt(np.bincount(group, distance * distance) / group_size)
    return distance / (deviation[group] + EPSILON)
