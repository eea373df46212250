"""CPU time of a generator for ten calls of an agent, by tokens of history: `python bench/agent_cost.py`.

A real endpoint, real HTTP from another process, tool calls, the template of Qwen3 with a byte-level vocabulary, and an
engine that costs nothing. The history comes with a first call, which encodes it and is not counted: any trainer has to
encode a text once. It has four bytes a token, so the ids that are handled are four times as many as those of a real
vocabulary. What is measured is this process's CPU time from the first call's turn to the end of the episode, ten
calls, HTTP and the engine's script included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from agents.tool_agents import TOOL, call_text, sampled
from rollout.families import folder
from scripted import Reply, ScriptedEngine

from sao.agents.host import AgentHost
from sao.config import parse
from sao.engines.base import Request
from sao.envs.agent import Agent
from sao.rollout.chat import Renderer
from sao.rollout.recorder import Assignment, Recorder

CALLS, BYTES_A_TOKEN = 10, 4
HISTORIES = (100, 1_000, 10_000, 30_000)  # tokens


def client() -> None:
    """Plays episodes as `start = "once"` has them played; the size of a history is the seed."""
    import os
    import urllib.request

    def post(url: str, key: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.loads(answer.read() or b"null")

    url, token = os.environ["SAO_AGENT_URL"], os.environ["SAO_AGENT_TOKEN"]
    while True:
        if (session := post(f"{url}/sessions", token, {"wait_s": 30})) is None:
            continue
        text = "The quick brown fox jumps over the lazy dog. " * (session["seed"] * BYTES_A_TOKEN // 45 + 1)
        messages: list[Any] = [{"role": "user", "content": text[: session["seed"] * BYTES_A_TOKEN]}]
        for number in range(1 + CALLS):
            body = {"messages": messages, "tools": [TOOL]}
            message = post(f"{url}/chat/completions", session["api_key"], body)["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"{number}.{session['id']} degrees"}
                for call in message["tool_calls"]
            ]
            messages += [message, *results]
        post(f"{url}/sessions/reward", session["reward_key"], {"reward": 1.0})
        post(f"{url}/sessions/close", session["reward_key"], {})


async def measured(path: Path, repeats: int) -> list[dict[str, float]]:
    sampling = {"context_tokens": 400_000, "max_response_tokens": 1000}
    config = parse(
        {
            "model": {"path": str(path)},
            "env": {"name": "agent", "args": {"command": ["true"]}, "max_turns": 1 + CALLS},
            "sampling": sampling,
            "learner": {"row_tokens": 400_000},
        }
    )
    renderer = Renderer(path)
    turn = sampled(renderer, call_text(renderer, ("look", {"city": "Bern", "days": 2})))
    begun = [0.0]

    def script(request: Request, number: int) -> Reply:
        if number % (1 + CALLS) == 0:
            begun[0] = time.process_time()
        return Reply(turn)

    engine = ScriptedEngine(script, record=False)
    env = Agent([sys.executable, __file__, "--client"], start="once")
    host = AgentHost(config, "bench")
    await host.start(env)
    rows = []
    try:
        for history in HISTORIES:
            spent = []
            for number in range(repeats + 2):
                recorder = Recorder(engine, renderer, config, Assignment(number, 0, history, "train"), 3)
                trajectory = await host.play(recorder, env)
                spent.append((time.process_time() - begun[0]) * 1e3)
                assert len(trajectory.segments) == 1 and trajectory.metadata["turns"] == 1 + CALLS
            row = {"history_tokens": history, "cpu_ms": statistics.median(spent[2:])}
            rows.append(row)
            print(f"{history:7,} tokens of history: {row['cpu_ms']:6.1f} ms of CPU for {CALLS} calls", flush=True)
    finally:
        await host.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.client:
        client()
    with tempfile.TemporaryDirectory() as scratch:
        rows = asyncio.run(measured(folder(Path(scratch), "qwen3"), arguments.repeats))
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine(), "calls": CALLS, "bytes_a_token": BYTES_A_TOKEN, "rows": rows}
    (RESULTS / "agent_cost.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
