"""Environments that misbehave, each in one way."""

from __future__ import annotations

from typing import Any

from sao.envs.protocol import Message, StepResult


class Rewarding:
    """Ends at once with the reward it is given, whatever that is."""

    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, reward: Any = 1.0) -> None:
        self.reward = reward
        self.closed = 0

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", f"{split} {seed}"),)

    async def step(self, text: str) -> StepResult:
        return StepResult((), self.reward, True)

    async def close(self) -> None:
        self.closed += 1


class Inverted(Rewarding):
    """Declares a range without numbers in it."""

    reward_range = (1.0, 1.0)


def not_an_environment() -> object:
    """What a factory must not return."""
    return object()
