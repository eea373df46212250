"""An agent that knows nothing of `sao` but its session API: the `openai` client, a loop, a tool and a grader.

It plays `lookup`: the user asks `c f plus 4`, the model says `get c f`, the tool answers `c f 5`, the model `say 9`.
The program is started once by every generator and plays many episodes at once.
"""

from __future__ import annotations

import asyncio
import os
import sys

import httpx
import openai

from sao.envs.lookup import Lookup

EPISODES_AT_ONCE = int(sys.argv[1]) if len(sys.argv) > 1 else 32


async def solve(client: openai.AsyncOpenAI, model: str, seed: int, split: str) -> float:
    """One episode: what the agent is. Replace this by your own; everything below stays."""
    task = Lookup()  # the tool and the grader, in this process
    messages = [message.as_dict() for message in await task.reset(seed, split)]
    while True:
        answer = await client.chat.completions.create(model=model, messages=messages)
        said = answer.choices[0].message.content or ""
        result = await task.step(said)
        if result.done:
            return float(result.reward or 0.0)
        messages += [{"role": "assistant", "content": said}, *(message.as_dict() for message in result.messages)]


async def worker(http: httpx.AsyncClient, transport: httpx.AsyncClient) -> None:
    """Opens one session after the other, plays it, and posts its reward."""
    root, token = os.environ["SAO_AGENT_URL"], os.environ["SAO_AGENT_TOKEN"]

    async def post(path: str, body: dict[str, object], key: str) -> httpx.Response:
        answer = await http.post(root + path, json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        return answer

    while True:
        opened = await post("/sessions", {"wait_s": 30}, token)
        if opened.status_code == 204:  # nothing to play just now
            continue
        session = opened.json()
        client = openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"], http_client=transport, max_retries=0
        )
        try:
            reward = await solve(client, session["model"], session["seed"], session["split"])
            await post("/sessions/reward", {"reward": reward}, session["reward_key"])
            await post("/sessions/close", {}, session["reward_key"])
        except openai.APIStatusError as error:  # a limit of the run, say; the episode failed, the agent goes on
            await post("/sessions/close", {"failure": str(error)}, session["reward_key"])


async def main() -> None:
    """Workers until the generator ends this process."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=None, limits=limits) as http,
        httpx.AsyncClient(timeout=None, limits=limits) as transport,
    ):
        await asyncio.gather(*(worker(http, transport) for _ in range(EPISODES_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main())
