"""Running-mean baselines: the two that SAO (arXiv 2607.07508) compares its critic with.

    A = R - mean(last 128 rewards)                          section 4.5: one window over all tasks
    A = R - mean(last 8 rewards of the same task)           section 4.3

A reward never enters its own baseline: the means are those before the batch, so they do not depend on the order inside
it. A task that was never seen takes the window over all tasks; while that is empty, before the first batch, the mean of
the batch takes its place.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RewardWindows:
    """The last rewards, of all tasks and (if `task_window` is not 0) of each task."""

    def __init__(self, window: int, task_window: int = 0) -> None:
        self.window, self.task_window = window, task_window
        self._all: deque[float] = deque(maxlen=window)
        self._tasks: dict[int, deque[float]] = {}

    def advantages(self, rewards: NDArray[np.float64], tasks: NDArray[np.int64]) -> NDArray[np.float64]:
        """rewards float64[t] of a batch, tasks int64[t] -> advantages float64[t]; then the rewards join the windows."""
        common = float(np.mean(self._all if self._all else rewards))
        baselines = [np.mean(self._tasks[task]) if task in self._tasks else common for task in tasks.tolist()]
        for reward, task in zip(rewards.tolist(), tasks.tolist(), strict=True):
            self._all.append(reward)
            if self.task_window:
                self._tasks.setdefault(task, deque(maxlen=self.task_window)).append(reward)
        return rewards - np.array(baselines)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as plain lists: the windows, and `[task, rewards]` of each task."""
        return {"all": list(self._all), "tasks": [[task, list(rewards)] for task, rewards in self._tasks.items()]}

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._all = deque(value["all"], maxlen=self.window)
        self._tasks = {task: deque(rewards, maxlen=self.task_window) for task, rewards in value["tasks"]}
