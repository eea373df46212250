"""An environment whose reward is drawn from what was answered: every rollout teaches something, whatever is sampled."""

from __future__ import annotations

import zlib

from sao.envs.protocol import Message, StepResult


class Coin:
    """Reward 1 for half of all answers; `turns` answers, each commented on, the last one counts."""

    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, turns: int = 1) -> None:
        self.left = turns

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", f"{seed % 1000} {split}"),)

    async def step(self, text: str) -> StepResult:
        self.left -= 1
        if self.left:
            return StepResult((Message("user", f"{zlib.crc32(text.encode()) % 1000}"),), None, False)
        return StepResult((), float(zlib.crc32(text.encode()) % 2), True)

    async def close(self) -> None:
        pass
