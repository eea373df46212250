"""Takes episodes from a generator (`start = "once"`), plays many at once, and posts their rewards.

Standard library only, so that it runs beside any agent's packages.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Play = Callable[[dict[str, Any]], Awaitable[float]]


async def serve(play: Play, at_once: int) -> None:
    """Has `play` play episodes until the generator ends this process.

    It gets `base_url`, `api_key`, `model`, `seed` and `split`, and returns the reward; what it raises ends the episode
    as a failure, or as truncated where the endpoint has refused a call for a limit of the run.
    """
    with ThreadPoolExecutor(at_once) as threads:
        await asyncio.gather(*(_worker(play, threads) for _ in range(at_once)))


async def _worker(play: Play, threads: ThreadPoolExecutor) -> None:
    def post(path: str, body: dict[str, object], key: str) -> Any:
        return asyncio.get_running_loop().run_in_executor(threads, _post, path, body, key)

    while True:
        session = await post("", {"wait_s": 30}, os.environ["SAO_AGENT_TOKEN"])
        if session is None:  # nothing to play just now
            continue
        key, end = session["reward_key"], dict[str, object]()
        try:
            await post("/reward", {"reward": await play(session)}, key)
        except Exception as error:
            end = {"failure": f"{type(error).__name__}: {error}"[:500]}
        await post("/close", end, key)


def _post(path: str, body: dict[str, object], key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"{os.environ['SAO_AGENT_URL']}/sessions{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")
