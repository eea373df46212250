"""An environment with slow turns that writes down when, in which process, each episode begins and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import time

from sao.envs.protocol import Message, StepResult


class Slow:
    """`turns` answers, `step_s` seconds each; one JSON line for each call goes to the file `log`."""

    reward_range = (0.0, 1.0)

    def __init__(self, log: str, turns: int = 6, step_s: float = 1.0, replayable: bool = True) -> None:
        self.log, self.turns, self.step_s, self.replayable = log, turns, step_s, replayable
        self.seed, self.turn, self.began = 0, 0, time.monotonic()

    def _note(self, what: str) -> None:
        line = json.dumps({"what": what, "seed": self.seed, "turn": self.turn, "pid": os.getpid(), "at": time.time()})
        with open(self.log, "a") as file:  # noqa: PTH123 - one write, so that lines of processes do not mix
            file.write(line + "\n")

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        self.seed = seed
        self._note("reset")
        return (Message("user", f"{seed % 1000}"),)

    async def step(self, text: str) -> StepResult:
        self.turn += 1
        self._note("step")
        await asyncio.sleep(self.step_s)
        done = self.turn >= self.turns
        self._note("done" if done else "stepped")
        return StepResult((), 1.0, True) if done else StepResult((Message("user", f"{self.turn}"),), None, False)

    async def close(self) -> None:
        pass
