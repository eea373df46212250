"""The quickstart's task behind tools that take heavy-tailed time: the environment of `timelines.py`."""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path

from sao.envs.lookup import Lookup
from sao.envs.protocol import StepResult


class SlowLookup(Lookup):
    """`lookup` whose every answer takes log-normal time: mean `mean_s`, `sigma` of its logarithm (0: always the mean).

    Each wait is a line "begin end" in the file `log`.
    """

    def __init__(self, log: str, mean_s: float = 1.0, sigma: float = 1.0) -> None:
        super().__init__()
        self._log, self._mean_s, self._sigma = Path(log), mean_s, sigma
        self._random = random.Random()  # members of a group wait independently of one another

    async def step(self, text: str) -> StepResult:
        """Waits, then answers as `lookup` does."""
        begin = time.time()
        drawn = self._random.lognormvariate(math.log(self._mean_s) - self._sigma**2 / 2, self._sigma)
        await asyncio.sleep(min(drawn, 60 * self._mean_s))
        with self._log.open("a") as file:
            file.write(f"{begin} {time.time()}\n")
        return await super().step(text)
