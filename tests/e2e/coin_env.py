"""An environment whose reward is drawn from what was answered: every rollout teaches something, whatever is sampled."""

from __future__ import annotations

import zlib

from sao.envs.protocol import Message, StepResult


class Coin:
    """One turn; reward 1 for half of all answers."""

    reward_range = (0.0, 1.0)
    replayable = True

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", f"{seed % 1000} {split}"),)

    async def step(self, text: str) -> StepResult:
        return StepResult((), float(zlib.crc32(text.encode()) % 2), True)

    async def close(self) -> None:
        pass
