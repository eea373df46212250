"""Advantages without a critic: worked numbers, whole groups, and windows that know nothing of the batch at hand."""

import json

import numpy as np
import pytest

from sao.algorithms.baselines import group_advantages, window_advantages
from sao.errors import ValidationError


def floats(*numbers):
    return np.array(numbers, dtype=np.float64)


def ints(*numbers):
    return np.array(numbers, dtype=np.int64)


class Windows:
    """The windows of one run, batch after batch."""

    def __init__(self, *sizes):
        self.sizes, self.state = sizes, {"all": [], "tasks": []}

    def advantages(self, rewards, tasks):
        found, self.state = window_advantages(rewards, tasks, self.state, *self.sizes)
        return found


def test_a_group_is_normalised_by_its_own_mean_and_deviation():
    rewards = floats(1, 0, 0, 0, 3, 3, 1, 1)
    got = group_advantages(rewards, ints(7, 7, 7, 7, 9, 9, 9, 9), 4)
    deviation = np.sqrt(3 / 16)
    expected = [0.75 / deviation, *[-0.25 / deviation] * 3, 1, 1, -1, -1]
    assert got.tolist() == pytest.approx(expected, rel=1e-5)


def test_members_may_come_in_any_order():
    rewards, groups = floats(1, 5, 0, 7), ints(0, 1, 0, 1)
    assert group_advantages(rewards, groups, 2).tolist() == pytest.approx([1, -1, -1, 1], rel=1e-5)


def test_equal_rewards_teach_nothing():
    assert group_advantages(floats(1, 1, 0, 0), ints(0, 0, 1, 1), 2).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("groups", [(0, 0, 0, 1), (0, 0, 1, 2), (0, 0, 0, 0)])
def test_a_group_that_is_not_whole_is_refused(groups):
    with pytest.raises(ValidationError, match=r"group \d: \d rollouts, expected 2"):
        group_advantages(floats(1, 0, 1, 0), ints(*groups), 2)


def test_the_window_over_all_tasks_holds_the_last_rewards_before_the_batch():
    windows = Windows(3)
    tasks = ints(0, 1)
    assert windows.advantages(floats(1, 0), tasks).tolist() == [0.5, -0.5]  # nothing before: the batch's own mean
    assert windows.advantages(floats(1, 1), tasks).tolist() == [0.5, 0.5]  # of 1, 0
    assert windows.advantages(floats(4, 0), tasks).tolist() == pytest.approx([4 - 2 / 3, -2 / 3])  # of 0, 1, 1


def test_a_rewards_place_in_the_batch_does_not_matter():
    one, other = Windows(8, 4), Windows(8, 4)
    for windows in (one, other):
        windows.advantages(floats(1, 0, 0), ints(0, 1, 2))
    rewards, tasks, order = floats(3, 5, 7), ints(2, 2, 0), [2, 0, 1]
    got = one.advantages(rewards, tasks)
    assert other.advantages(rewards[order], tasks[order]).tolist() == got[order].tolist()


def test_the_window_of_a_task_holds_its_own_last_rewards():
    windows = Windows(128, 2)
    windows.advantages(floats(1, 0, 0), ints(0, 1, 1))
    assert windows.advantages(floats(1, 1), ints(0, 1)).tolist() == [0, 1]
    assert windows.advantages(floats(5, 5, 5), ints(0, 1, 2)).tolist() == pytest.approx([4, 4.5, 5 - 3 / 5])


def test_windows_survive_a_checkpoint():
    windows = Windows(5, 2)
    rng = np.random.default_rng(0)
    for _ in range(4):
        windows.advantages(rng.random(6), rng.integers(0, 3, 6))
    again = Windows(5, 2)
    again.state = json.loads(json.dumps(windows.state))
    rewards, tasks = rng.random(6), rng.integers(0, 5, 6)
    assert again.advantages(rewards, tasks).tolist() == windows.advantages(rewards, tasks).tolist()
    assert again.state == windows.state and len(again.state["all"]) == 5
