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
from sao.envs.agent import Agent, without_proxy
from sao.errors import ConfigError, EnvironmentFailure
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
elif how in ("leaves", "escapes"):
    import subprocess
    if "last" in sys.argv:
        print(json.dumps({"reward": 0.25}), flush=True)
    else:
        post(os.environ["SAO_REWARD_URL"], {"reward": 0.25}, os.environ["SAO_REWARD_KEY"])
    subprocess.Popen(["sleep", sys.argv[3]], start_new_session=how == "escapes")
elif how == "floods":
    print("x" * (1 << 25)); print(0.5)
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


def sleepers() -> list[psutil.Process]:
    found = [p for p in psutil.process_iter(["cmdline", "status"]) if p.info["cmdline"] == ["sleep", SLEEP_S]]
    return [p for p in found if p.info["status"] != psutil.STATUS_ZOMBIE]  # killed, but its new parent is late


@pytest.mark.parametrize("reward", ["posted", "last_line"])
@pytest.mark.parametrize("how", ["leaves", "escapes"])
def test_the_end_of_a_program_is_not_the_end_of_its_output(
    tiny_model: Path, tmp_path: Path, how: str, reward: str
) -> None:
    """What it leaves behind holds its pipes open; that of its own session is killed, another session only let go."""
    program = tmp_path / "agent.py"
    program.write_text(PLAIN)
    line = [sys.executable, "-S", str(program), how, "{seed}", SLEEP_S, "last" if reward == "last_line" else "posted"]
    env = registry.make("agent", command=line, reward=reward)
    try:
        trajectory = played(tiny_model, env, env={"episode_timeout_s": 20.0})
        assert trajectory.reward == 0.25 and trajectory.termination.reason != "time_limit"
        assert len(sleepers()) == (how == "escapes")
    finally:
        for process in sleepers():
            process.kill()


def test_the_last_line_of_a_flood_is_found(tiny_model: Path, tmp_path: Path) -> None:
    assert played(tiny_model, command(tmp_path, "floods", reward="last_line")).reward == 0.5


@pytest.mark.parametrize("before", [None, "example.org"])
def test_a_proxy_for_the_outside_world_is_not_asked_for_this_machine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        if before:
            monkeypatch.setenv(name, before)
    assert played(tiny_model, command(tmp_path, "post")).reward == 0.75
    for given in (
        {"no_proxy": "example.org"},
        {"NO_PROXY": " example.org ,"},
    ):  # urllib reads the first, curl the second
        made = without_proxy({**given, "OPENAI_BASE_URL": "http://10.0.0.7:80/v1"})
        assert made["no_proxy"] == made["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1,10.0.0.7"


def test_a_program_is_looked_up_where_it_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "play"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    for named in ({"command": "bin/play", "cwd": str(tmp_path)}, {"command": "./bin/play", "cwd": str(tmp_path)}):
        assert asyncio.run(Agent(**named).run(Agent(**named).command, {}))[0] == 0
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    found = Agent("play", environment=environment)
    assert asyncio.run(found.run(found.command, {}))[0] == 0
    for wrong in ({"command": "bin/play"}, {"command": "play"}, {"command": str(program.parent / "none")}):
        with pytest.raises(ConfigError, match=r"env\.args\.command: .* is no program"):
            Agent(**wrong)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Agent("bin/play", cwd="~").command == ["bin/play"]


def test_a_command_that_hangs_is_killed_with_what_it_started(tiny_model: Path, tmp_path: Path) -> None:
    env = command(tmp_path, "hang")
    trajectory = played(tiny_model, env, env={"episode_timeout_s": 3.0})
    assert trajectory.termination.reason == "time_limit"
    assert not sleepers()


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


def test_a_program_that_cannot_be_started_is_tried_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sao.agents.host.RESTART_S", 0.2)
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    env = Agent([sys.executable, "-S", str(program)], start="once")
    real, fails = env.run, iter([True, True])

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


OPENS = """
import json, os, urllib.request

def post(path, body, key):
    request = urllib.request.Request(
        os.environ["SAO_AGENT_URL"] + path, json.dumps(body).encode(), {"Authorization": "Bearer " + key}
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")

session = post("/sessions", {"wait_s": 30}, os.environ["SAO_AGENT_TOKEN"])
post("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, session["api_key"])
if session["seed"] == 1:
    os._exit(3)
post("/sessions/reward", {"reward": 0.5}, session["reward_key"])
post("/sessions/close", {}, session["reward_key"])
"""


@pytest.mark.parametrize("opens", [True, False])
def test_the_end_of_a_program_fails_what_it_had_opened_or_one_that_waits(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    monkeypatch.setattr("sao.agents.host.RESTART_S", 0.1)
    program = tmp_path / "worker.py"
    program.write_text(OPENS if opens else "raise SystemExit('no such library')")
    env = Agent([sys.executable, "-S", str(program)], start="once")

    async def main() -> list[Any]:
        async with hosting(configured(tiny_model), ScriptedEngine(says(20, END)), env) as play, asyncio.timeout(60):
            playing = (play(Assignment(seed, 0, seed, "eval")) for seed in (1, 2, 3))
            return await asyncio.gather(*playing, return_exceptions=True)

    lost, *others = asyncio.run(main())
    assert lost.reason == "agent_exit"
    if opens:
        assert [one.reward for one in others] == [0.5, 0.5]
    else:
        assert ["no such library" in one.detail for one in others] == [True, True]  # each by a start of its own


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


SHOWS = """
import json, os, sys
wanted = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PROJECT_TOKEN", "PATH"}
print(json.dumps({"reward": sum(2 ** at for at, name in enumerate(sorted(wanted)) if name in os.environ) / 32}))
"""


@pytest.mark.parametrize(("inherit", "names"), [((), {"PATH"}), (("PROJECT_*",), {"PATH", "PROJECT_TOKEN"})])
def test_an_agent_gets_no_secret_of_ours_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherit: tuple[str, ...], names: set[str]
) -> None:
    every = sorted({"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PROJECT_TOKEN", "PATH"})
    for name in every:
        monkeypatch.setenv(name, os.environ.get(name, "secret"))
    program = tmp_path / "shows.py"
    program.write_text(SHOWS)
    env = Agent([sys.executable, str(program)], reward="last_line", inherit=inherit)
    code, out, err = asyncio.run(env.run(env.command, {}))
    assert code == 0, err
    assert json.loads(out)["reward"] == sum(2**at for at, name in enumerate(every) if name in names) / 32


def test_what_is_inherited_is_a_list_of_names() -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.inherit: 'HF_TOKEN', expected a list of names"):
        Agent(["true"], inherit="HF_TOKEN")


def test_a_program_that_cannot_begin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "p"
    program.write_text("#!/nowhere/python -u\n")
    program.chmod(0o755)
    for command, said in (
        (["~/p"], "a script for /nowhere/python, which is absent"),
        (["true", "a\0b"], "no argument can hold a NUL"),
        ("python 'x", "No closing quotation"),
    ):
        with pytest.raises(ConfigError, match=f"env.args.command: .*{said}"):
            Agent(command)
    program.write_text("#!/bin/sh\n")
    assert Agent(["~/p"]).command == [str(program)]
