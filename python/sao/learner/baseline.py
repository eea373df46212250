"""Advantages without a critic: one number for all action tokens of a rollout, from rewards alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.algorithms.baselines import RewardWindows, group_advantages
from sao.config import Config
from sao.learner.batch import Batch


class Baseline:
    """The estimators `grpo`, `running_mean` and `prompt_mean`. The same on every rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        algorithm = config.algorithm
        task_window = algorithm.prompt_window if algorithm.estimator == "prompt_mean" else 0
        self._windows = RewardWindows(algorithm.baseline_window, task_window)

    def advantages(self, batch: Batch) -> NDArray[np.float32]:
        """float32[N] by flat index, 0 at non-actions. A rollout's reward here is its outcome plus its turn rewards.

        Raises `ValidationError` for a group that is not whole.
        """
        rewards = batch.rewards.astype(np.float64)
        if batch.turn_rewards is not None:
            positions, extra = batch.turn_rewards
            np.add.at(rewards, batch.trajectory_of_token[positions], extra)
        size = self.config.algorithm.group_size
        if self.config.algorithm.estimator == "grpo":
            found = group_advantages(rewards, batch.ordinals // size, size)
        else:
            tasks = np.array([self.config.prompt_of(int(ordinal)) for ordinal in batch.ordinals], dtype=np.int64)
            found = self._windows.advantages(rewards, tasks)
        return np.where(batch.action_mask, found[batch.trajectory_of_token], 0.0).astype(np.float32)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain JSON."""
        return self._windows.state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._windows.state = value
