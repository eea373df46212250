"""Agents: the OpenAI form of calls and errors, joining calls to segments, keys, streams and rewards, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Reply, ScriptedEngine

from sao.agents import server as agent_server
from sao.agents.chat_completions import error_body
from sao.agents.chat_completions import parse as read
from sao.agents.host import AgentHost
from sao.agents.request import ApiError
from sao.agents.session import AgentSession
from sao.config import Config, parse
from sao.engines.base import Request
from sao.envs import registry
from sao.envs.agent import Access
from sao.errors import ConfigError
from sao.rollout.chat import Renderer
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory, decode, encode

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra `agents`")

END = 2
TASK = Assignment(ordinal=5, attempt=1, seed=77, split="train")
Post = Callable[..., Awaitable[tuple[int, Any]]]


def configured(path: Path, **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": str(path)},
        "env": {"name": "agent", "args": {"command": ["true"]}, "max_turns": 6},
        "sampling": {"max_response_tokens": 6, "context_tokens": 64, "temperature": 0.7},
        "eval": {"temperature": 0.0},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def says(*ids: int) -> Callable[[Request, int], Reply]:
    return lambda *_: Reply(list(ids))


@dataclass
class Scripted:
    """An agent in this process: `play` is what it does with a way to post to the endpoint."""

    script: Callable[[Access, Post], Awaitable[float | None]]
    reward_range: tuple[float, float] = (0.0, 1.0)
    replayable: bool = True
    closed: int = 0

    async def play(self, seed: int, split: str, access: Access) -> float | None:
        async with aiohttp.ClientSession() as http:

            async def post(path: str, body: Any, key: str = access.api_key) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                root = access.base_url.removesuffix("/v1")
                data = body if isinstance(body, bytes) else json.dumps(body)
                async with http.post(root + path, data=data, headers=headers) as answer:
                    return answer.status, await answer.json() if answer.status != 204 else None

            return await self.script(access, post)

    async def close(self) -> None:
        self.closed += 1


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ours(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def ask(post: Post, *messages: dict[str, str], **more: Any) -> str:
    status, body = await post("/v1/chat/completions", {"messages": list(messages), **more})
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


@asynccontextmanager
async def hosting(config: Config, engine: ScriptedEngine, env: Any) -> AsyncIterator[Callable[[Assignment], Any]]:
    """Plays an assignment through the agents of a host."""
    host, renderer = AgentHost(config, "g0"), Renderer(config.model.path)
    await host.start(env)
    try:
        yield lambda task: host.play(Recorder(engine, renderer, config, task, 3), env)
    finally:
        await host.close()


def played(path: Path, agent: Any, engine: ScriptedEngine | None = None, **sections: dict[str, Any]) -> Trajectory:
    engine = engine or ScriptedEngine(says(20, 21, END))

    async def main() -> Trajectory:
        async with hosting(configured(path, **sections), engine, agent) as play:
            return await play(TASK)

    trajectory = asyncio.run(main())
    assert engine.calls[-1][0] == "release" and ("release", "train/5/1") in engine.calls
    return decode(*encode(trajectory))


def test_calls_that_extend_one_another_are_one_segment(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        first = await ask(post, user("a b"))
        second = await ask(post, user("a b"), ours(first), user("c"))
        await ask(post, user("a b"), ours(first), user("c"), ours(second), {"role": "tool", "content": "d"})
        return 0.5

    env, engine = Scripted(script), ScriptedEngine(says(20, 21, END), version=3)
    trajectory = played(tiny_model, env, engine)
    assert env.closed == 1
    (segment,) = trajectory.segments
    assert segment.n_actions == 9 and trajectory.reward == 0.5 and trajectory.termination.kind == "finished"
    prompts = [request.prompt_ids.tolist() for request in engine.requests]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before) + 3] == [*before, 20, 21, END]
    assert segment.token_ids.tolist() == [*prompts[-1], 20, 21, END]
    assert all(request.temperature == 0.7 and request.max_new_tokens == 6 for request in engine.requests)
    facts = trajectory.metadata
    assert (facts["turns"], facts["agent_drift"], facts["agent_rewritten"]) == (3, 0, 0)
    assert trajectory.fingerprints == {3: engine.fingerprint} and trajectory.temperature == 0.7


def test_other_histories_open_segments_and_no_sampled_token_is_lost(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        first = await ask(post, user("a b"))
        await ask(post, user("a b"))  # a second try
        await ask(post, user("a b"), ours(first), user("c"))  # goes on behind the newer of two equal turns
        await ask(post, user("d"), ours("never said"), user("e"))  # edited history
        await ask(post, user("a b"), ours(first), user("f"))  # a branch
        return 1.0

    engine = ScriptedEngine(says(20, 21, END))
    trajectory = played(tiny_model, Scripted(script), engine)
    assert [segment.n_actions for segment in trajectory.segments] == [3, 6, 3, 3]
    assert trajectory.n_actions == 15 and trajectory.metadata["agent_rewritten"] == 1
    branch = trajectory.segments[-1]
    assert branch.token_ids[: branch.action_mask.argmax()].tolist() == engine.requests[-1].prompt_ids.tolist()
    assert not branch.action_mask[: engine.requests[-1].prompt_ids.size].any()


def test_drift_is_counted_and_the_sampled_ids_are_kept(tiny_model: Path) -> None:
    """The turn says one word, but by tokens that encoding its text would not give: a special token in the middle."""

    async def script(access: Access, post: Post) -> float:
        first = await ask(post, user("a"))
        await ask(post, user("a"), ours(f"  {first}\n"), user("c"))  # stripped or padded: still ours
        return 1.0

    engine = ScriptedEngine(says(20, 0, 21, END))  # 0 is the padding token, which decoding leaves out
    trajectory = played(tiny_model, Scripted(script), engine)
    (segment,) = trajectory.segments
    assert trajectory.metadata["agent_drift"] == 1 and trajectory.metadata["agent_rewritten"] == 0
    assert segment.token_ids[segment.action_mask].tolist() == [20, 0, 21, END] * 2


def test_parallel_calls_of_a_session_take_turns(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        await asyncio.gather(*(ask(post, user(text)) for text in "abcd"))
        return 1.0

    def slow(request: Request, number: int) -> Reply:
        return Reply([20, END], delay_s=0.02)

    trajectory = played(tiny_model, Scripted(script), ScriptedEngine(slow))
    assert len(trajectory.segments) == 4


def test_streams_and_usage(tiny_model: Path) -> None:
    events: list[str] = []

    async def script(access: Access, post: Post) -> float:
        body = {"messages": [user("a b")], "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{access.base_url}/chat/completions", json=body, headers=headers) as answer,
        ):
            assert answer.headers["Content-Type"] == "text/event-stream"
            events.extend((await answer.text()).split("\n\n"))
        return 1.0

    trajectory = played(tiny_model, Scripted(script))
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == Renderer(tiny_model).decode([20, 21])
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    (segment,) = trajectory.segments
    prompt = int(segment.action_mask.argmax())
    assert chunks[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 2}, "n: 2 is not supported: one completion a call"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions.*give them as tools"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stop": [1]}, "stop: "),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: expected an object of type .function."),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, r"tools\[0\]: expected a function with a name"),
        ({"tools": {}}, "tools: expected a list"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [ours("x")]}, "begun for the policy"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: expected an object with a role"),
        ({"messages": [{"role": [], "content": "x"}]}, r"messages\[0\]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content: expected text"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: expected text"),
        ({"messages": [{**ours("x"), "tool_calls": [{}]}, user("a")]}, r"messages\[0\].tool_calls\[0\]"),
        ({"stream_options": 1}, "stream_options"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    body = {"messages": [user("a")], "model": "any", "user": "me", "seed": 3, "temperature": 0.7, "n": 1, "stop": None}
    assert read(body, 0.7).messages[0].content == "a" and not read(body, 0.7).notes
    with pytest.raises(ApiError, match=message) as caught:
        read(body | change, 0.7)
    error = error_body(caught.value)["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"temperature": 0.2}, "overruled"),
        ({"top_p": 0.9}, "overruled"),
        ({"top_k": 5}, "overruled"),
        ({"tool_choice": "required"}, "unforced"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "unforced"),
        ({"response_format": {"type": "json_object"}}, "unforced"),
        ({"return_token_ids": True}, "ignored"),
    ],
)
def test_what_is_not_followed_is_noted(change: dict[str, Any], note: str) -> None:
    body = {"messages": [user("a")], "tool_choice": "auto", "response_format": {"type": "text"}}
    assert not read(body, 0.7).notes
    assert read(body | change, 0.7).notes == dict.fromkeys(change, note)


def test_parts_of_text_and_developers_are_taken() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = read({"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]}, 1.0)
    assert [(message.role, message.content) for message in call.messages] == [("system", "x"), ("user", "ab")]


def test_keys_rewards_and_errors_over_http(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> None:
        chat = {"messages": [user("a")]}
        for key in ("", "wrong", access.reward_key):
            status, body = await post("/v1/chat/completions", chat, key)
            assert status == 401 and body["error"]["code"] == "invalid_api_key", key
        assert (await post(f"/session/{access.api_key}/v1/chat/completions", chat, ""))[0] == 200
        assert (await post("/session/wrong/v1/chat/completions", chat, ""))[0] == 401
        assert (await post("/v1/chat/completions", b"{nonsense"))[0] == 400
        assert (await post("/v1/chat/completions", b"[" * 100_000))[0] == 400
        assert (await post("/v1/chat/completions", b"x" * (17 << 20)))[0] == 413
        status, body = await post("/v1/nothing", {})
        assert status == 404 and body["error"]["type"] == "not_found_error"
        assert (await post("/v1/sessions", {}))[0] == 401
        host, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/sessions HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")  # no text in any encoding
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        # The key with which the policy's text is asked for does not give rewards.
        assert (await post("/v1/sessions/reward", {"reward": 1.0}))[0] == 401
        for wrong in (1.5, "1", None, float("nan"), True):
            status, body = await post("/v1/sessions/reward", {"reward": wrong}, access.reward_key)
            assert (status, body["error"]["param"]) == (400, "reward"), wrong
        assert (await post("/v1/sessions/reward", {"reward": 1.0}, access.reward_key))[0] == 200
        assert (await post("/v1/sessions/reward", {"reward": 0.0}, access.reward_key))[0] == 409

    trajectory = played(tiny_model, Scripted(script))
    assert trajectory.reward == 1.0 and trajectory.metadata["turns"] == 1


def test_a_body_that_does_not_arrive_is_waited_for_no_longer_than_it_may_take(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_server, "READ_S", 0.2)

    async def script(access: Access, post: Post) -> float:
        host, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = access.api_key.encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key)
        writer.write(b"\r\nContent-Length: 100\r\n\r\n{")  # and no more
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        writer.close()
        assert answer.split()[1] == b"408" and b"did not arrive within 0.2 s" in answer
        await ask(post, user("a"))
        return 1.0

    assert played(tiny_model, Scripted(script)).metadata["turns"] == 1


def test_a_long_conversation_is_encoded_beside_the_loop(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, others = Renderer.conversation, threading.Event(), threading.Event()
    in_time: list[bool] = []

    def slow(self: Renderer, messages: Any, tools: str = "") -> Any:
        begun.set()
        in_time.append(others.wait(10))
        return encode(self, messages)

    monkeypatch.setattr(Renderer, "conversation", slow)
    monkeypatch.setattr("sao.agents.session.SHORT", 0)

    async def script(access: Access, post: Post) -> float:
        asking = asyncio.create_task(ask(post, user("a")))
        assert await asyncio.to_thread(begun.wait, 10)
        status, _ = await post("/v1/sessions/reward", {"reward": 1.0}, access.reward_key)
        others.set()
        await asking
        assert status == 200 and in_time == [True], "the loop stood still while a conversation was encoded"
        return 1.0

    assert played(tiny_model, Scripted(script)).metadata["turns"] == 1


def test_nothing_is_sampled_when_the_episode_ends_while_a_conversation_is_encoded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, engine = configured(tiny_model), ScriptedEngine(says(20, 21, END))
    recorder = Recorder(engine, Renderer(tiny_model), config, TASK, 3)
    session = AgentSession(recorder, (0.0, 1.0))
    encode = Renderer.conversation

    def ends(self: Renderer, messages: Any, tools: str = "") -> Any:
        session.closed = True
        return encode(self, messages)

    monkeypatch.setattr(Renderer, "conversation", ends)
    with pytest.raises(ApiError, match="the session is over"):
        asyncio.run(session.complete(read({"messages": [user("a")]}, recorder.temperature)))
    assert not engine.requests and not recorder.segments()


def test_text_and_keys_that_are_no_unicode_are_refused_in_openais_form(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        status, body = await post("/v1/chat/completions", {"messages": [user("a \ud800")]})
        assert (status, body["error"]["param"]) == (400, "messages[0].content")
        for key in ("\udcff", "é"):
            assert (await post("/v1/sessions", {}, key))[0] == 401, key
            assert (await post("/v1/chat/completions", {"messages": [user("a")]}, key))[0] == 401, key
        assert (await post("/v1/sessions/reward", b'{"reward": 1' + b"0" * 400 + b"}", access.reward_key))[0] == 400
        await ask(post, user("a"))
        return 1.0

    assert played(tiny_model, Scripted(script)).n_actions == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "command: ()"),
        ({"command": "true", "start": "never"}, "expected none with start = 'never'"),
        ({"command": "true", "start": "now"}, "start: 'now'"),
        ({"command": "true", "reward": "guess"}, "reward: 'guess'"),
        ({"command": "true", "reward": "last_line", "start": "once"}, "needs start = 'episode'"),
        ({"command": "no-such-program"}, "no program in PATH"),
        ({"command": "true", "cwd": "/nowhere"}, "no such folder"),
        ({"command": "true", "reward_range": [0, float("inf")]}, "reward_range"),
        ({"comand": "true"}, "unexpected keyword argument"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        registry.make("agent", **args)


def test_the_endpoint_is_on_loopback_unless_permitted(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator\.agents_bind: 0\.0\.0\.0 is not a loopback address"):
        configured(tiny_model, generator={"agents_bind": "0.0.0.0:0"})
    config = configured(tiny_model, generator={"agents_bind": "0.0.0.0:0"}, transport={"allow_remote": True})
    assert config.generator.agents_bind == "0.0.0.0:0"


def test_the_openai_client_works_unchanged(tiny_model: Path) -> None:
    openai = pytest.importorskip("openai", reason="needs the package openai")

    async def script(access: Access, post: Post) -> float:
        client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
        assert [model.id for model in (await client.models.list()).data] == [access.model]
        messages = [user("a b")]
        answer = await client.chat.completions.create(model=access.model, messages=messages)
        messages += [ours(answer.choices[0].message.content), user("c")]
        stream = await client.chat.completions.create(model=access.model, messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="n: 2 is not supported"):
            await client.chat.completions.create(model=access.model, messages=messages, n=2)
        await client.close()
        return 1.0

    trajectory = played(tiny_model, Scripted(script))
    (segment,) = trajectory.segments
    assert segment.n_actions == 6 and np.isfinite(segment.logprobs[segment.action_mask]).all()
