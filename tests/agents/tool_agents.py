"""Agents that call tools, in this process: what a policy of a family writes, and whether it is what was trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from agents.test_agents import TASK, Scripted, configured, hosting
from scripted import Reply, ScriptedEngine

from sao.config import Config
from sao.engines.base import Completion, Flight, Request
from sao.envs.protocol import Message, ToolCall
from sao.rollout.chat import Renderer
from sao.trajectory import Trajectory, decode, encode

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}}


class Recording(ScriptedEngine):
    """The scripted engine, and every completion that it has given."""

    def __init__(self, script: Callable[[Request, int], Reply], **more: Any) -> None:
        super().__init__(script, **more)
        self.given: list[tuple[list[int], Completion]] = []

    async def _sample(self, flight: Flight) -> Completion:
        completion = await super()._sample(flight)
        self.given.append((flight.request.prompt_ids.tolist(), completion))
        return completion


def call_text(renderer: Renderer, *calls: tuple[str, dict[str, Any]], text: str = "") -> str:
    """What a policy of this family writes to make these calls."""
    made = tuple(ToolCall(name, json.dumps(arguments), f"call{i:05}") for i, (name, arguments) in enumerate(calls))
    before = [Message("user", "a")]
    tools = json.dumps([TOOL])
    start = renderer.template.text(before, tools)
    whole = renderer.template.text([*before, Message("assistant", text, made)], tools, prompt=False)
    common = 0
    while common < min(len(start), len(whole)) and start[common] == whole[common]:
        common += 1
    return whole[common:]


def sampled(renderer: Renderer, text: str) -> list[int]:
    """The ids of a turn, up to its first stop token, which is put there when there is none."""
    ids = renderer._encode(text).tolist()
    ends = [at for at, token in enumerate(ids) if token in renderer.stop_token_ids]
    return ids[: ends[0] + 1] if ends else [*ids, renderer.stop_token_ids[0]]


def configuration(path: Path, **env: Any) -> Config:
    sampling = {"max_response_tokens": 2000, "context_tokens": 20_000, "temperature": 0.7}
    return configured(path, sampling=sampling, learner={"row_tokens": 20_000}, env={"max_turns": 60, **env})


def run(config: Config, engine: ScriptedEngine, script: Any, **more: Any) -> Trajectory:
    async def main() -> Trajectory:
        env = Scripted(script)
        for name, value in more.items():
            setattr(env, name, value)
        async with hosting(config, engine, env) as play:
            return await play(TASK)

    return decode(*encode(asyncio.run(main())))


def check_books(trajectory: Trajectory, engine: Recording) -> None:
    """Every sampled token is trained once, behind the prompt it was sampled from, with its log-prob and version."""
    rest = list(engine.given)
    for segment in trajectory.segments:
        ids, mask = segment.token_ids.tolist(), segment.action_mask
        versions = np.full(len(ids), -1)
        for start, stop, version in segment.version_spans.tolist():
            versions[start:stop] = version
        at = 0
        while at < len(ids):
            if not mask[at]:
                at += 1
                continue
            match = next(
                (
                    one
                    for one in rest
                    if one[0] == ids[:at] and one[1].token_ids.tolist() == ids[at : at + one[1].token_ids.size]
                ),
                None,
            )
            assert match is not None, "trained behind another prompt than the one it was sampled from"
            stop = at + match[1].token_ids.size
            assert mask[at:stop].all() and np.array_equal(segment.logprobs[at:stop], match[1].logprobs)
            assert np.array_equal(
                versions[at:stop], np.repeat(match[1].version_spans[:, 2], np.diff(match[1].version_spans[:, :2])[:, 0])
            )
            rest.remove(match)
            at = stop
    assert not rest, "sampled and not trained"


async def chat(post: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, found = await post("/v1/chat/completions", body)
    assert status == 200, found
    return dict(found["choices"][0])


def rewritten(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), separators=(",", ":"))
    return {**call, "index": 0, "function": {**function, "arguments": arguments}}
