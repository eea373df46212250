"""Agents in processes of their own: one per episode, one for many, or started elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted import ScriptedEngine
from tests.agents.test_agents import END, TASK, configured, hosting, played, says, user

from sao.envs import registry
from sao.envs.agent import Agent
from sao.errors import EnvironmentFailure
from sao.rollout.recorder import Assignment
from sao.trajectory import Trajectory

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra `agents`")


PLAIN = """
import json, os, sys, urllib.request

def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))

base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"messages": [{"role": "user", "content": "a b"}]}
answer = post(base + "/chat/completions", body, key)["choices"][0]["message"]["content"]
how = sys.argv[1]
if how == "post":
    post(os.environ["SAO_REWARD_URL"], {"reward": 0.75}, os.environ["SAO_REWARD_KEY"])
elif how == "print":
    print("noise"); print(json.dumps({"reward": 0.25}))
elif how == "crash":
    sys.exit("no such tool")
elif how == "hang":
    import subprocess, time
    subprocess.Popen(["sleep", sys.argv[3]]); time.sleep(1000)
assert os.environ["SAO_SEED"] == sys.argv[2] == "77" and os.environ["SAO_SPLIT"] == "train"
"""


SLEEP_S = f"1000.{os.getpid()}"  # of no other process


def command(tmp_path: Path, how: str, **more: Any) -> Agent:
    program = tmp_path / "agent.py"
    program.write_text(PLAIN)
    made = registry.make("agent", command=[sys.executable, "-S", str(program), how, "{seed}", SLEEP_S], **more)
    assert isinstance(made, Agent)
    return made


def test_a_command_per_episode(tiny_model: Path, tmp_path: Path) -> None:
    assert played(tiny_model, command(tmp_path, "post")).reward == 0.75
    assert played(tiny_model, command(tmp_path, "print", reward="last_line")).reward == 0.25
    with pytest.raises(EnvironmentFailure, match="agent_exit: exit code 1: no such tool"):
        played(tiny_model, command(tmp_path, "crash"))
    with pytest.raises(EnvironmentFailure, match="bad_reward: last line of output ''"):
        played(tiny_model, command(tmp_path, "post", reward="last_line"))


def test_a_command_that_hangs_is_killed_with_what_it_started(tiny_model: Path, tmp_path: Path) -> None:
    env = command(tmp_path, "hang")
    trajectory = played(tiny_model, env, env={"episode_timeout_s": 3.0})
    assert trajectory.termination.reason == "time_limit"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", SLEEP_S]]


WORKER = """
import json, os, urllib.request

def post(path, body, key):
    request = urllib.request.Request(
        os.environ["SAO_AGENT_URL"] + path, json.dumps(body).encode(), {"Authorization": "Bearer " + key}
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")

while True:
    session = post("/sessions", {"wait_s": 5}, os.environ["SAO_AGENT_TOKEN"])
    if session is None:
        continue
    post("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, session["api_key"])
    if session["seed"] == 3:
        os._exit(9)
    if session["seed"] == 4:
        post("/sessions/close", {"failure": "grader gone"}, session["reward_key"])
        continue
    post("/sessions/reward", {"reward": session["seed"] / 10}, session["reward_key"])
    post("/sessions/close", {}, session["reward_key"])
"""


def test_one_program_plays_many_episodes_and_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    env = Agent([sys.executable, "-S", str(program)], start="once")

    async def main() -> list[Any]:
        async with hosting(configured(tiny_model), ScriptedEngine(says(20, END)), env) as playing:

            def play(seed: int) -> Awaitable[Trajectory]:
                return playing(Assignment(seed, 0, seed, "eval"))

            first = await asyncio.gather(*(play(seed) for seed in (1, 2, 4)), return_exceptions=True)
            dies = await asyncio.gather(play(3), return_exceptions=True)
            return [*first, *dies, await play(5)]

    one, two, closed, died, five = asyncio.run(main())
    assert [t.reward for t in (one, two, five)] == [0.1, 0.2, 0.5] and one.temperature == 0.0
    assert (closed.reason, closed.detail) == ("agent_failed", "grader gone")
    assert died.reason == "agent_exit" and "exit code 9" in died.detail


def test_a_program_that_cannot_be_started_is_tried_again(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    env = Agent([sys.executable, "-S", str(program)], start="once")
    real, fails = env.run, iter([True])

    async def run(*arguments: Any) -> Any:
        if next(fails, False):
            raise EnvironmentFailure("agent_start", "no more processes")
        return await real(*arguments)

    env.run = run  # type: ignore[method-assign]

    async def main() -> Trajectory:
        async with hosting(configured(tiny_model), ScriptedEngine(says(20, END)), env) as play, asyncio.timeout(60):
            with pytest.raises(EnvironmentFailure, match="agent_start: no more processes"):
                await play(Assignment(2, 0, 2, "eval"))
            return await play(Assignment(1, 0, 1, "eval"))

    assert asyncio.run(main()).reward == 0.1


def test_an_agent_from_elsewhere_finds_address_and_token(tiny_model: Path, tmp_path: Path) -> None:
    env = Agent(start="never")
    config = configured(tiny_model, run={"dir": str(tmp_path), "name": "r"})

    async def main() -> None:
        async with hosting(config, ScriptedEngine(), env):
            note = tmp_path / "r" / "agents" / "g0.json"
            assert note.stat().st_mode & 0o077 == 0
            found = json.loads(note.read_text())
            assert found["url"].startswith("http://127.0.0.1:")
            async with aiohttp.ClientSession() as http:
                headers = {"Authorization": f"Bearer {found['token']}"}
                async with http.post(f"{found['url']}/sessions", json={"wait_s": 0.05}, headers=headers) as answer:
                    assert answer.status == 204
        assert not note.exists()

    asyncio.run(main())


def test_an_agent_that_hung_up_while_it_waited_gets_no_session(tiny_model: Path, tmp_path: Path) -> None:
    env = Agent(start="never")
    config = configured(tiny_model, run={"dir": str(tmp_path), "name": "r"})

    async def main() -> Trajectory:
        async with hosting(config, ScriptedEngine(says(20, END)), env) as play:
            found = json.loads((tmp_path / "r" / "agents" / "g0.json").read_text())
            headers = {"Authorization": f"Bearer {found['token']}"}

            async def post(path: str, body: Any, **more: str) -> Any:
                async with http.post(found["url"] + path, json=body, headers=headers | more) as answer:
                    assert answer.status == 200
                    return await answer.json()

            async with aiohttp.ClientSession() as http:
                gone = [asyncio.create_task(post("/sessions", {"wait_s": 30})) for _ in range(3)]
                await asyncio.sleep(0.2)
                for waiting in gone:
                    waiting.cancel()
                await asyncio.gather(*gone, return_exceptions=True)
                waits = asyncio.create_task(post("/sessions", {"wait_s": 30}))
                await asyncio.sleep(0.2)
                playing = asyncio.create_task(play(TASK))
                session = await asyncio.wait_for(waits, 5)
                reward = {"Authorization": f"Bearer {session['reward_key']}"}
                await post("/chat/completions", {"messages": [user("a")]}, Authorization=f"Bearer {session['api_key']}")
                await post("/sessions/reward", {"reward": 1.0}, **reward)
                await post("/sessions/close", {}, **reward)
                return await asyncio.wait_for(playing, 5)

    assert asyncio.run(main()).reward == 1.0
