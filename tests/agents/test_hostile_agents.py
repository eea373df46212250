"""What an agent, or a policy, can send that would hold up or end the others: lists in lists, streams without end."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import tracemalloc
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


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize(
    "call",
    [
        CALL % ("lo\\ud800ok", "{}"),
        CALL % ("look", '{"city": "\\ud800"}'),
        CALL % ("look", '{"\\udfff": 1}'),
        CALL % ("look", '{"days": NaN}'),
        CALL % ("look", '{"days": -Infinity}'),
        CALL % ("look", '{"days": 1e999}'),
        CALL % ("look", '{"city": %s}' % ("[" * 480 + "]" * 480)),
        CALL % ("look", '{"days": %s}' % ("9" * 4400)),
    ],
    ids=["name", "value", "key", "nan", "infinity", "beyond floats", "deep", "long number"],
)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_call_that_no_client_could_read_is_text(tmp_path: Path, path: str, call: str) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, f"I call. {call}" if number == 0 else "ok")))
    flat = {"name": "look", "type": "function"}
    tools = {"chat/completions": TOOL, "responses": flat, "messages": {"name": "look", "input_schema": {}}}

    def strict(text: str) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    async def script(access: Access, post: Any) -> float:
        asked = {"messages": [user("a")], "input": "a", "max_tokens": 9000, "tools": [tools[path]]}
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with aiohttp.ClientSession() as http:

            async def ask(**more: Any) -> dict[str, Any]:
                async with http.post(f"{access.base_url}/{path}", json=asked | more, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    return strict(await answer.text())

            said = await ask()
            kept: list[Any] = [user("a")]
            if path == "chat/completions":
                assert "tool_calls" not in said["choices"][0]["message"]
                kept += [said["choices"][0]["message"], user("b")]
            elif path == "responses":
                assert [item["type"] for item in said["output"]] == ["message"]
                kept += [*said["output"], user("b")]
            else:
                assert [block["type"] for block in said["content"]] == ["text"]
                kept += [{"role": "assistant", "content": said["content"]}, user("b")]
            await ask(messages=kept, input=kept)
        return 1.0

    sampling = {"max_response_tokens": 9000, "context_tokens": 20_000, "temperature": 0.7}
    config = configured(tmp_path, sampling=sampling, learner={"row_tokens": 20_000})
    trajectory = run(config, engine, script)
    assert len(trajectory.segments) == 1 and trajectory.metadata["agent_rewritten"] == 0
    check_books(trajectory, engine)


def test_arguments_that_hold_half_of_a_character_as_an_escape_are_refused(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, "ok")))

    async def script(access: Access, post: Any) -> float:
        function = {"name": "look", "arguments": '{"city": "\\ud800"}'}
        made = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
        body = {"messages": [user("a"), made, {"role": "tool", "tool_call_id": "x", "content": "r"}], "tools": [TOOL]}
        status, answer = await post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "messages")
        await chat(post, {"messages": [user("a")]})
        return 1.0

    check_books(run(configuration(tmp_path), engine, script), engine)


def test_a_session_keeps_no_bodies_of_its_calls(tmp_path: Path) -> None:
    """What is kept grows by the turns, not by what was sent for them: an agent sends its whole conversation again."""
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, "ok")), record=False)
    size, grown = 500_000, {}
    extra = {"metadata": {"k": "w" * size}, "stop": ["never"]}
    made = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "[" * 50_000}}]}

    async def script(access: Access, post: Any) -> float:
        async def answered(number: int) -> None:
            await chat(post, {"messages": [user(f"a{number}")], **extra})

        async def refused(number: int) -> None:
            body = {"messages": [user(f"a{number}"), made, user("b")], "tools": [TOOL], **extra}
            assert (await post("/v1/chat/completions", body))[0] == 400

        said = (await chat(post, {"messages": [user("a")]}))["message"]["content"]

        async def counted(number: int) -> None:
            messages = [user("a"), {"role": "assistant", "content": said + " " * size}, user(f"{number}" + "y" * size)]
            assert (await post("/v1/messages/count_tokens", {"messages": messages, "max_tokens": 1}))[0] == 200

        tracemalloc.start()
        for call in (answered, refused, counted):
            await call(0)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(1, 9):
                await call(number)
            gc.collect()
            grown[call.__name__] = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return 1.0

    run(configuration(tmp_path), engine, script)
    assert max(grown.values()) < 6 * size, grown  # eight bodies are more, of two texts each where they are counted


def test_counts_of_tokens_have_a_limit(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, "ok")))

    async def script(access: Access, post: Any) -> float:
        body = {"messages": [user("a")], "max_tokens": 1}
        found = [(await post("/v1/messages/count_tokens", body))[0] for _ in range(2 * 8 + 1)]
        assert found == [200] * 16 + [400]
        await chat(post, {"messages": [user("a")]})
        return 1.0

    assert run(configuration(tmp_path, max_turns=2), engine, script).termination.kind == "finished"


def test_what_is_no_request_is_refused_in_openais_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, "ok")))
    body = json.dumps({"messages": [user("a")]}).encode()
    cases = [
        ({"x-stainless-retry-count": "1" * 5000}, body, 200),
        ({"x-stainless-retry-count": "²"}, body, 200),
        ({"Content-Encoding": "gzip"}, gzip.compress(body), 200),
        ({"Content-Encoding": "gzip"}, gzip.compress(body)[:20], 400),
        ({"Content-Encoding": "gzip"}, b"garbage", 400),
        ({"Content-Encoding": "deflate"}, b"garbage", 400),
        ({"Content-Encoding": "br"}, b"garbage", 400),
        ({"Content-Encoding": "zstd"}, b"garbage", 400),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * (17 << 20)), 413),
    ]

    async def script(access: Access, post: Any) -> float:
        url, key = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.api_key}"}
        for headers, data, status in cases:
            async with (
                aiohttp.ClientSession() as http,
                http.post(url, data=data, headers=key | headers) as answer,
            ):
                found = await answer.json()
                assert answer.status == status and ("choices" in found or found["error"]["message"]), (headers, found)
        name, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        for raw in (b"nonsense\r\n\r\n", b"POST /v1/models HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection(name, int(port))
            writer.write(raw)
            head, _, rest = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
            assert head.split()[1] == b"400" and json.loads(rest)["error"]["type"] == "invalid_request_error"
            writer.close()
        assert (await post("/v1/models", {}))[0] == 405
        return 1.0

    run(configuration(tmp_path), engine, script)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_before_the_answer_leaves_no_error_and_gets_it_when_asking_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, f"answer {number} " * 40), delay_s=0.1))

    async def script(access: Access, post: Any) -> float:
        body = json.dumps({"messages": [user("a")], "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.api_key}\r\n"
        name, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        _, writer = await asyncio.open_connection(name, int(port))
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        while not engine.given:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{access.base_url}/chat/completions", data=body, headers={"Authorization": f"Bearer {access.api_key}"}
            ) as answer,
        ):
            assert "answer 0" in await answer.text()
        return 1.0

    assert run(configuration(tmp_path), engine, script).metadata["turns"] == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_answer_that_is_not_read_to_its_end_is_not_delivered(tmp_path: Path) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    engine = Recording(lambda request, number: Reply(sampled(renderer, f"{number}" + "x" * 60_000)))

    async def script(access: Access, post: Any) -> float:
        asked = {"messages": [user("a")], "logprobs": True}  # 6 MB, more than sockets hold
        body, url = json.dumps(asked).encode(), f"{access.base_url}/chat/completions"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.api_key}\r\n"
        name, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        reader, writer = await asyncio.open_connection(name, int(port), limit=1024)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await asyncio.sleep(0.2)
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"].startswith("0x")
        return 1.0

    sampling = {"max_response_tokens": 100_000, "context_tokens": 200_000, "temperature": 0.7}
    config = configured(tmp_path, sampling=sampling, learner={"row_tokens": 200_000})
    assert run(config, engine, script).metadata["turns"] == 1
