"""What counts as a reward, as messages and as a step's result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sao.envs.protocol import Message, StepResult, check_messages, check_reward, check_split, check_step
from sao.errors import EnvironmentFailure

RANGE = (0.0, 1.0)


@pytest.mark.parametrize(
    "reward", [None, "", "abc", "1.0", math.nan, math.inf, -math.inf, -0.5, 1.5, 10**400, 1j, [1.0]]
)
def test_what_is_no_reward_is_a_failure_never_zero(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure) as failure:
        check_step(StepResult((), reward, True), RANGE)
    assert failure.value.reason == "bad_reward"
    assert "[0.0, 1.0]" in failure.value.detail


@pytest.mark.parametrize(
    ("reward", "expected"), [(0, 0.0), (1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5)]
)
def test_rewards_in_range_pass_as_float(reward: Any, expected: float) -> None:
    value = check_reward(reward, RANGE)
    assert type(value) is float
    assert value == expected


def test_a_running_episode_may_have_no_reward_but_must_have_messages() -> None:
    message = Message("tool", "x")
    assert check_step(StepResult((message,), None, False), RANGE) == StepResult((message,), None, False)
    with pytest.raises(EnvironmentFailure, match="bad_messages"):
        check_step(StepResult((), None, False), RANGE)
    with pytest.raises(EnvironmentFailure, match="bad_reward"):
        check_step(StepResult((message,), math.nan, False), RANGE)


def test_messages_after_the_end_are_left_out() -> None:
    assert check_step(StepResult((Message("tool", "x"),), 1.0, True), RANGE).messages == ()


@pytest.mark.parametrize("result", [None, 1.0, ((), 1.0, True), StepResult((), 1.0, done=1)])  # type: ignore[arg-type]
def test_a_step_returns_a_step_result(result: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="bad_result"):
        check_step(result, RANGE)


@pytest.mark.parametrize(
    "messages",
    [None, (), "text", ["text"], (Message("robot", "x"),), (Message("user", None),), (Message("user", "\udcff"),)],  # type: ignore[arg-type]
)
def test_messages_are_messages_of_a_known_role(messages: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="bad_messages"):
        check_messages(messages, "reset")


@pytest.mark.parametrize(("seed", "split"), [(-1, "train"), (1.5, "train"), (True, "train"), (0, "test"), (0, "")])
def test_a_task_is_a_seed_and_a_split(seed: Any, split: str) -> None:
    with pytest.raises(EnvironmentFailure, match="bad_task"):
        check_split(seed, split)
