"""What an agent, or a policy, can send that would hold up or end the others: lists in lists, streams without end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agents.test_agents import TASK, Scripted, configured, hosting, user
from agents.tool_agents import TOOL, Recording, call_text, chat, check_books, configuration, run, sampled
from rollout.families import folder, templates
from scripted import Reply

from sao.engines.base import Completion, Flight, no_tokens
from sao.envs.agent import Access
from sao.rollout.chat import Renderer
from sao.trajectory import Trajectory

aiohttp = pytest.importorskip("aiohttp", reason="needs the extra `agents`")
pytestmark = pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")

DEEP = 50_000


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def test_lists_in_lists_without_end_are_text_or_refused(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    deep = sampled(renderer, call_text(renderer, ("look", {"city": "x"})).replace('"x"', "[" * 1500))
    engine = Recording(lambda request, number: Reply(deep if number == 0 else sampled(renderer, "ok")))

    async def script(access: Access, post: Any) -> float:
        message = (await chat(post, {"messages": [user("a")], "tools": [TOOL]}))["message"]
        assert "tool_calls" not in message and "[" * 1500 in message["content"]
        await chat(post, {"messages": [user("a"), message, user("b")], "tools": [TOOL]})
        for depth in (400, 900):  # what JSON takes, and templates or a second reader may not
            tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
            function = {"name": "f", "arguments": json.dumps(nested(depth))}
            made = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
            result = {"role": "tool", "tool_call_id": "x", "content": "r"}
            for more in ({"messages": [user("a")], "tools": [tool]}, {"messages": [user("a"), made, result]}):
                status, body = await post("/v1/chat/completions", {"tools": [TOOL], **more})
                assert status in (200, 400), body
        status, body = await post("/v1/chat/completions", b'{"messages": ' + b"[" * DEEP)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        made = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "[" * DEEP}}]}
        status, body = await post("/v1/chat/completions", {"messages": [user("a"), made, user("b")], "tools": [TOOL]})
        assert status == 400 and "the chat template refuses" in body["error"]["message"]
        await chat(post, {"messages": [user("a")]})
        return 1.0

    check_books(run(configuration(tmp_path), engine, script), engine)


def test_arguments_of_a_megabyte_come_and_go(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    long = "x" * (1 << 20)
    engine = Recording(lambda request, number: Reply(sampled(renderer, "ok")))

    async def script(access: Access, post: Any) -> float:
        function = {"name": "look", "arguments": json.dumps({"city": long})}
        made = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
        body = {"messages": [user("a"), made, {"role": "tool", "tool_call_id": "x", "content": "r"}], "tools": [TOOL]}
        status, answer = await post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        await chat(post, {"messages": [user("a")], "tools": [TOOL]})
        return 1.0

    check_books(run(configuration(tmp_path), engine, script), engine)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_stream_without_end_ends_in_an_error_with_its_episode(tmp_path: Path, path: str) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    word = renderer._encode("word ").tolist()

    class Endless(Recording):
        released = asyncio.Event()

        async def _sample(self, flight: Flight) -> Completion:
            self._number += 1
            if self._number == 0:
                return await Recording._sample(self, flight)
            assert flight.request.watch is not None
            while not self.released.is_set():
                for token in word:
                    flight.request.watch(token)
                await asyncio.sleep(0.01)
            return no_tokens("abort")

        async def release(self, session: str) -> None:
            self.released.set()

    async def main() -> Trajectory:
        reading: list[asyncio.Task[bytes]] = []

        async def read(url: str, key: str) -> bytes:
            body = {"messages": [user("b")], "input": "b", "max_tokens": 1000, "stream": True}
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
                return await answer.read()

        async def script(access: Access, post: Any) -> float:
            await chat(post, {"messages": [user("a")]})
            reading.append(asyncio.create_task(read(f"{access.base_url}/{path}", access.api_key)))
            await asyncio.Event().wait()  # for the end of its stream
            return 1.0

        engine = Endless(lambda request, number: Reply(sampled(renderer, "ok")))
        config = configuration(tmp_path, episode_timeout_s=1.0)
        async with hosting(config, engine, Scripted(script)) as play:
            trajectory = await play(TASK)
            async with asyncio.timeout(10):
                events = await reading[0]
        assert b"word word" in events and b"error" in events.rstrip().split(b"\n\n")[-1]
        return trajectory

    trajectory = asyncio.run(main())
    assert (trajectory.termination.reason, trajectory.metadata["turns"]) == ("time_limit", 1)


def test_who_reads_nothing_of_a_stream_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao.agents.server.READ_S", 0.5)
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, "x" * 100_000 if number == 0 else "ok")))

    async def script(access: Access, post: Any) -> float:
        body = json.dumps({"messages": [user("a")], "stream": True, "logprobs": True}).encode()  # 10 MB of events
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.api_key}\r\n"
        address = access.base_url.removeprefix("http://").removesuffix("/v1")
        name, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(name, int(port), limit=1024)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not engine.given:
            await asyncio.sleep(0.05)
        await chat(post, {"messages": [user("b")]})  # others are answered meanwhile
        await asyncio.sleep(3)
        got = b""
        try:
            async with asyncio.timeout(10):
                while piece := await reader.read(1 << 16):
                    got = (got + piece)[-100:]
        except ConnectionError:
            pass
        writer.close()
        assert b"[DONE]" not in got
        return 1.0

    sampling = {"max_response_tokens": 150_000, "context_tokens": 200_000, "temperature": 0.7}
    config = configured(tmp_path, sampling=sampling, learner={"row_tokens": 200_000})
    check_books(run(config, engine, script), engine)
