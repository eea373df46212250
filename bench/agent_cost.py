"""CPU time of a generator for ten calls of an agent, by tokens of history: `python bench/agent_cost.py`.

`docs/results/agents.md` has the numbers. The client is a process of its own, whose time is not in them.

A real endpoint, real HTTP from another process, tool calls, the template of Qwen3 with a byte-level vocabulary, and an
engine that costs nothing. The history comes with a first call, which encodes it and is not counted: any trainer has to
encode a text once. It has four bytes a token, so the ids that are handled are four times as many as those of a real
vocabulary. What is measured is this process's CPU time from the first call's turn to the end of the episode, ten
calls, HTTP included; once over one connection, as clients keep it, and once with a new one for every call. `parts_us`
are medians of the loop's thread in the parts of one call; they are taken in the same run and cost it some 0.3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from agents.tool_agents import TOOL, call_text, sampled
from rollout.families import folder

from sao.agents import chat_completions, server
from sao.agents.history import History
from sao.agents.host import AgentHost
from sao.agents.session import AgentSession
from sao.config import parse
from sao.engines.base import Completion, Flight
from sao.engines.scripted import ScriptedEngine
from sao.envs.agent import Agent
from sao.rollout import recorder as recorder_module
from sao.rollout.chat import Renderer
from sao.rollout.recorder import Assignment, Recorder

CALLS, BYTES_A_TOKEN = 10, 4
HISTORIES = (100, 1_000, 10_000, 30_000)  # tokens


def client() -> None:
    """Plays episodes as `start = "once"` has them played; the size of a history is the seed."""
    import http.client
    import os
    from urllib.parse import urlsplit

    connections: list[http.client.HTTPConnection] = []

    def post(url: str, key: str, body: dict[str, Any], kept: bool = True) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if not connections:
            connections.append(http.client.HTTPConnection(urlsplit(url).netloc))
        connections[0].request("POST", urlsplit(url).path, json.dumps(body), headers)
        answer = connections[0].getresponse()
        found = answer.read()
        assert answer.status < 300, found
        if not kept:
            connections.pop().close()
        return json.loads(found or b"null")

    url, token = os.environ["SAO_AGENT_URL"], os.environ["SAO_AGENT_TOKEN"]
    while True:
        if (session := post(f"{url}/sessions", token, {"wait_s": 30})) is None:
            continue
        kept = session["split"] == "train"
        text = "The quick brown fox jumps over the lazy dog. " * (session["seed"] * BYTES_A_TOKEN // 45 + 1)
        messages: list[Any] = [{"role": "user", "content": text[: session["seed"] * BYTES_A_TOKEN]}]
        for number in range(1 + CALLS):
            body = {"messages": messages, "tools": [TOOL]}
            message = post(f"{url}/chat/completions", session["api_key"], body, kept)["choices"][0]["message"]
            said = f"{number} degrees in {session['id']} of {session['seed']}"  # never the same twice
            results = [{"role": "tool", "tool_call_id": call["id"], "content": said} for call in message["tool_calls"]]
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
    calls = call_text(renderer, ("look", {"city": "Bern", "days": 2})).removeprefix("<think>\n\n</think>\n\n")
    thought = "<think>\nI need the weather of two days.\n</think>\n\n"
    turn = np.array(sampled(renderer, thought + calls), np.int32)
    logprobs, spans = np.full(turn.size, -1.0, np.float32), np.array([[0, turn.size, 0]])
    begun = [0.0]

    class Ready(ScriptedEngine):
        async def _sample(self, flight: Flight) -> Completion:
            self._number += 1
            if self._number % (1 + CALLS) == 0:
                begun[0] = time.process_time()
            return Completion(turn, logprobs, spans, "stop", {0: self.fingerprint})

    parts = timed()
    engine = Ready()
    env = Agent([sys.executable, __file__, "--client"], start="once")
    host = AgentHost(config, "bench")
    await host.start(env)
    rows = []
    try:
        for history in HISTORIES:
            spent = defaultdict(list)
            parts.clear()
            for number in range(repeats + 2):
                for split in ("train", "eval"):  # one connection, or a new one for every call
                    recorder = Recorder(engine, renderer, config, Assignment(number, 0, history, split), 3)
                    trajectory = await host.play(recorder, env)
                    spent[split].append((time.process_time() - begun[0]) * 1e3)
                    assert len(trajectory.segments) == 1 and trajectory.metadata["turns"] == 1 + CALLS
                    assert trajectory.metadata["agent_drift"] == 0
            kept, new = (statistics.median(spent[split][2:]) for split in ("train", "eval"))
            medians = {name: round(statistics.median(times), 1) for name, times in parts.items()}
            rows.append({"history_tokens": history, "cpu_ms": kept, "cpu_ms_new_connections": new, "parts_us": medians})
            text = f"{kept:6.1f} ms of CPU for {CALLS} calls, {new:6.1f} ms with a connection for each"
            print(f"{history:7,} tokens of history: {text}", flush=True)
    finally:
        await host.close()
    return rows


def timed() -> dict[str, list[float]]:
    """Has the parts of a call timed from now on; microseconds of the thread, by part, as they are measured."""
    found: dict[str, list[float]] = defaultdict(list)

    def wrap(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*args: Any, **more: Any) -> Any:
            before = time.thread_time_ns()
            result = function(*args, **more)
            found[part].append((time.thread_time_ns() - before) / 1e3)
            return result

        setattr(owner, name, measured)

    wrap(server, "_object", "JSON of the request")
    wrap(chat_completions, "parse", "its messages")
    wrap(server, "_digest", "its digest, for repeated requests")
    wrap(History, "find", "the turns found again")
    wrap(AgentSession, "_behind", "turn and new messages rendered and encoded")
    wrap(ScriptedEngine, "_check", "the request to the engine checked")
    wrap(recorder_module, "check_completion", "the completion checked")
    wrap(AgentSession, "_read", "the turn decoded and read")
    wrap(History, "add", "the turn kept")
    wrap(server, "json_answer", "JSON of the answer")
    return found


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
