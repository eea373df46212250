"""Baselines without a critic: a group of rollouts of one task, and running means of rewards."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.errors import ValidationError

EPSILON = 1e-6


def group_advantages(rewards: NDArray[np.float64], groups: NDArray[np.int64], group_size: int) -> NDArray[np.float64]:
    """Group-relative advantages: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + 1e-6)        R of the G rollouts of one task; population std

    rewards float64[t], groups int64[t] (which group each rollout is of) -> advantages float64[t]: every action token of
    rollout i gets A_i. A group of equal rewards teaches nothing: A = 0. With `policy_loss = "ppo"` this is GRPO, with
    "dis" it is the stabilised GRPO that SAO compares itself with (arXiv 2607.07508, table 1).

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


def window_advantages(
    rewards: NDArray[np.float64], tasks: NDArray[np.int64], state: dict[str, Any], window: int, task_window: int = 0
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Rewards over running means of the last rewards, of all tasks or (if `task_window` is not 0) of each task.

        A = R - mean(last 128 rewards)                          SAO (arXiv 2607.07508), section 4.5
        A = R - mean(last 8 rewards of the same task)           section 4.3

    rewards float64[t], tasks int64[t] of a batch -> advantages float64[t], and the windows with the rewards, as JSON
    can hold them; before the first batch `state` is `{"all": [], "tasks": []}`.

    A reward never enters its own baseline: the means are those before the batch, so they do not depend on the order
    inside it. A task that was never seen takes the window over all tasks; while that is empty, before the first batch,
    the mean of the batch takes its place.
    """
    every, of_task = state["all"], dict(state["tasks"])
    common = float(np.mean(every or rewards))
    baselines = [np.mean(of_task[task]) if task in of_task else common for task in tasks.tolist()]
    if task_window:
        for reward, task in zip(rewards.tolist(), tasks.tolist(), strict=True):
            of_task[task] = [*of_task.get(task, ()), reward][-task_window:]
    state = {"all": [*every, *rewards.tolist()][-window:], "tasks": [list(item) for item in of_task.items()]}
    return rewards - np.array(baselines), state
