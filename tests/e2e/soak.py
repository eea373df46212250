"""Agents that misbehave, as an environment: which way follows from the task's seed, and so does what must come of it.

Most play in the generator's own process, over the same HTTP endpoint; six in a hundred are real programs
(`soak_program.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from sao.broker.tasks import task_seed
from sao.envs.agent import Access, Agent

PROGRAM = Path(__file__).with_name("soak_program.py")
TRAINED = ""


class Kind(NamedTuple):
    """A way to behave: how many in 10,000 do, and the reason under which such a rollout is dropped, if it is."""

    share: int
    reason: str = TRAINED


IN_PROCESS: Final = {
    "plays well": Kind(8040),
    "two turns": Kind(300),
    "no call at all": Kind(150, "no_turn"),
    "no reward": Kind(150, "no_reward"),
    "two rewards": Kind(100),
    "reward NaN": Kind(100, "no_reward"),
    "reward 1e300": Kind(100, "no_reward"),
    "JSON cut off": Kind(100),
    "hangs up before the answer": Kind(100),
    "30 calls at once": Kind(50),
    "raises an exception": Kind(100, "agent_error"),
    "wrong key": Kind(60, "no_turn"),
    "returns NaN": Kind(50, "bad_reward"),
}
PROGRAMS: Final = {
    "plays well": Kind(200),
    "exit code 3": Kind(60, "agent_exit"),
    "kills itself": Kind(40, "agent_exit"),
    "no reward": Kind(40, "no_reward"),
    "two rewards": Kind(40),
    "last line is no number": Kind(40, "bad_reward"),
    "last line is NaN": Kind(30, "bad_reward"),
    "child keeps the output": Kind(40),
    "child in a session of its own": Kind(20),
    "forks 20 times": Kind(10),
    "hangs after its turn": Kind(20),
    "hangs before its turn": Kind(15, "timeout"),
    "half a request, then nothing": Kind(15, "timeout"),
    "ignores every signal": Kind(7),
    "writes a gigabyte": Kind(3),
    "no HTTP": Kind(20),
}
KINDS: Final = [*((name, kind, False) for name, kind in IN_PROCESS.items())]
KINDS += [(f"program: {name}", kind, True) for name, kind in PROGRAMS.items()]
assert sum(kind.share for _, kind, _ in KINDS) == 10_000


def kind_of(seed: int) -> tuple[str, Kind, bool]:
    """Name, kind, and whether it is a program."""
    rest = seed % 10_000
    for found in KINDS:
        rest -= found[1].share
        if rest < 0:
            return found
    raise AssertionError(seed)


def expected(run_seed: int, tasks: int) -> dict[int, tuple[str, Kind, bool]]:
    """What the tasks of a run are, by ordinal."""
    return {ordinal: kind_of(task_seed(run_seed, "train", ordinal)) for ordinal in range(tasks)}


class Soak:
    """See `sao.envs.agent.AgentEnvironment`."""

    reward_range = (0.0, 1.0)
    replayable = True
    http: aiohttp.ClientSession | None = None  # one of all episodes

    async def play(self, seed: int, split: str, access: Access) -> float | None:
        name, _, program = kind_of(seed)
        if program:
            name = name.removeprefix("program: ")
            last_line = name.startswith("last line")
            agent = Agent(
                [sys.executable, "-S", "-E", str(PROGRAM), name], reward="last_line" if last_line else "posted"
            )
            return await agent.play(seed, split, access)
        if Soak.http is None:
            Soak.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return await getattr(_Guest(Soak.http, access), "_".join(name.split()[:3]).lower())()

    async def close(self) -> None:
        pass


class _Guest:
    """An agent in this process; a method for each way."""

    def __init__(self, http: aiohttp.ClientSession, access: Access) -> None:
        self.http, self.access = http, access

    async def post(self, url: str, key: str, body: object, *, raw: str = "") -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with self.http.post(url, data=raw or json.dumps(body), headers=headers) as answer:
            await answer.read()
            return answer.status

    async def call(self, *texts: str, key: str = "", raw: str = "") -> int:
        messages = [{"role": "user", "content": text} for text in texts or ("a b c",)]
        url = f"{self.access.base_url}/chat/completions"
        return await self.post(url, key or self.access.api_key, {"messages": messages}, raw=raw)

    async def reward(self, value: float = 1.0) -> int:
        return await self.post(self.access.reward_url, self.access.reward_key, {"reward": value})

    async def plays_well(self) -> None:
        assert await self.call() == 200 and await self.reward() == 200

    async def two_turns(self) -> None:
        assert await self.call("a") == await self.call("a", "b") == await self.reward(0.5) == 200

    async def no_call_at(self) -> None:
        pass

    async def no_reward(self) -> None:
        assert await self.call() == 200

    async def two_rewards(self) -> None:
        await self.plays_well()
        assert await self.reward(0.0) == 409

    async def reward_nan(self) -> None:
        assert await self.call() == 200 and await self.reward(float("nan")) == 400

    async def reward_1e300(self) -> None:
        assert await self.call() == 200 and await self.reward(1e300) == 400

    async def json_cut_off(self) -> None:
        assert await self.call(raw='{"messages": [{"role":') == 400
        await self.plays_well()

    async def hangs_up_before(self) -> None:
        address = self.access.base_url.split("/")[2]
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {self.access.api_key}\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await self.plays_well()

    async def returns_nan(self) -> float:
        assert await self.call() == 200
        return float("nan")

    async def raises_an_exception(self) -> None:
        assert await self.call() == 200
        raise RuntimeError("an agent may raise anything")

    async def wrong_key(self) -> None:
        assert await self.call(key="sao-wrong") == 401


async def _thirty(self: _Guest) -> None:
    statuses = Counter(await asyncio.gather(*(self.call(str(number)) for number in range(30))))
    assert statuses[200] >= 1 and statuses[200] + statuses[400] == 30, statuses
    await self.reward()


_way: Callable[[_Guest], Awaitable[None]] = _thirty
setattr(_Guest, "30_calls_at", _way)
