"""The dialects of Responses and Messages: read strictly, and spoken to the real clients, streamed and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agents.tool_agents import PARAMETERS, TOOL, Recording, call_text, chat, check_books, configuration, run, sampled
from rollout.families import folder, templates
from scripted import Reply

from sao.agents import anthropic_messages, responses
from sao.agents.request import ApiError, ModelCall, Turn
from sao.envs.agent import Access
from sao.envs.protocol import Message, ToolCall
from sao.rollout.chat import Renderer

openai = pytest.importorskip("openai", reason="needs the package openai")
anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
needs_trl = pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", "id": "fc_1"}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"city": "Bern"}}
FLAT = {"type": "function", "name": "look", "description": "d", "parameters": PARAMETERS}
ASKED = {"city": "Bern", "days": 2}
FUNCTION = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}


def test_items_of_a_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "21"}]}
    call = responses.parse(
        {"input": [{"role": "user", "content": "a"}, thought, said, CALL, result], "instructions": "s"}, 1.0
    )
    assert call.messages == (
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "I look.", (ToolCall("look", "{}", "c1"),), reasoning="hm"),
        Message("tool", "21", (), "c1", "look"),
    )
    assert (
        responses.parse({"input": [{"role": "user", "content": "a"}, said, thought, CALL, result]}, 1.0).messages
        == (call.messages[1:])
    )
    assert responses.parse({"input": "a"}, 1.0).messages == (Message("user", "a"),)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: expected"),
        ({"input": []}, "input: expected"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: nothing is kept"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: an item of type 'item_reference'"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\]: expected a role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content: expected text"),
        ({"input": [{"role": "user", "content": "a"}, CALL]}, "begun for the policy"),
        ({"input": "a", "tools": [{"name": "web_search"}]}, r"tools\[0\]"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [1]}, r"input\[0\]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, r"input\[0\]: expected a name"),
        ({"input": "half \ud800"}, "surrogate"),
    ],
)
def test_responses_that_cannot_be_served_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        responses.parse(body, 1.0)
    assert caught.value.status == 400


def test_blocks_of_messages_are_read() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "21"}]}
    body = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ],
        "max_tokens": 9,
        "tool_choice": {"type": "any"},
    }
    call = anthropic_messages.parse(body, 1.0)
    assert call.messages == (
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "", (ToolCall("look", '{"city": "Bern"}', "c1"),), reasoning="hm"),
        Message("tool", "21", (), "c1", "look"),
        Message("user", "and now?"),
    )
    assert call.max_tokens == 9 and call.notes == {"tool_choice": "unforced"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: expected"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a block of type 'image'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "a block of type 'tool_use' is not supported"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "begun for the policy"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": ["bash"]}, r"tools\[0\]"),
        ({"messages": [{"role": "user", "content": "a"}], "stop_sequences": [1]}, "stop_sequences"),
    ],
)
def test_messages_that_cannot_be_served_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        anthropic_messages.parse(body, 1.0)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (responses, {"input": "a", "tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "patch"}]}),
        (
            anthropic_messages,
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"name": "look", "input_schema": PARAMETERS}, {"type": "web_search_20250305", "name": "s"}],
            },
        ),
    ],
)
def test_tools_that_a_provider_would_run_are_left_out_and_counted(dialect: Any, body: dict[str, Any]) -> None:
    call = dialect.parse(body, 1.0)
    assert call.notes == {"tools": "ignored"}
    assert [tool["function"]["name"] for tool in json.loads(call.tools)] == ["look"]


@pytest.mark.parametrize("dialect", [responses, anthropic_messages])
def test_a_stream_says_what_the_whole_answer_says(dialect: Any) -> None:
    message = Message("assistant", "I look.", (ToolCall("look", '{"city": "Bern"}', "c1"),), reasoning="")
    turn, call = Turn(message, "I look.", "tool_calls", 5, 7), ModelCall((Message("user", "a"),))
    stream = dialect.stream(call, "m")
    raw = stream.begin() + stream.more("I ") + stream.end(turn, "I ")
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
    whole = dialect.answer(turn, call, "m")
    if dialect is responses:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]["response"]["output"]
        strip = [{key: value for key, value in item.items() if key != "id"} for item in last]
        assert strip == [{key: value for key, value in item.items() if key != "id"} for item in whole["output"]]
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "I look."
    else:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == whole["content"][0]["text"]
        assert json.loads(deltas[-1]["partial_json"]) == whole["content"][1]["input"]
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize("dialect", [responses, anthropic_messages])
@pytest.mark.parametrize("sent", ["", "I "])
def test_items_of_a_stream_come_one_behind_the_other(dialect: Any, sent: str) -> None:
    message = Message("assistant", "I look.", (ToolCall("look", "{}", "c1"),), reasoning="hm")
    turn, stream = Turn(message, "I look.", "tool_calls", 5, 7), dialect.stream(ModelCall((Message("user", "a"),)), "m")
    raw = stream.begin() + (stream.more(sent) if sent else b"") + stream.end(turn, sent)
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
    place, marks = ("output_index", "output_item") if dialect is responses else ("index", "content_block")
    ends = {"added": "start", "start": "start", "done": "stop", "stop": "stop"}
    found = [
        (ends[kind.rpartition("." if dialect is responses else "_")[2]], event[place])
        for event in events
        if (kind := event["type"]).removeprefix("response.").startswith(marks) and not kind.endswith("_delta")
    ]
    assert found == [(what, number) for number in range(3) for what in ("start", "stop")]


@needs_trl
@pytest.mark.parametrize("streamed", [False, True])
def test_the_responses_client_works_unchanged(tmp_path: Path, streamed: bool) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    calls = call_text(renderer, ("look", {"city": "Bern"}), ("look", {"city": "Rome"}), text="I look.")
    turns = [sampled(renderer, calls), sampled(renderer, "It is warm.")]
    engine = Recording(lambda request, number: Reply(turns[number]))

    async def script(access: Access, post: Any) -> float:
        client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)

        async def ask(given: Any) -> Any:
            fields = {"model": access.model, "input": given, "tools": [FUNCTION], "instructions": "Be short."}
            if not streamed:
                return await client.responses.create(**fields)
            async with client.responses.stream(**fields) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_response()

        given: list[Any] = [{"role": "user", "content": "weather?"}]
        first = await ask(given)
        found = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(item.arguments)["city"] for item in found] == ["Bern", "Rome"]
        assert first.output_text.strip() == "I look." and first.usage.output_tokens == len(turns[0])
        given += [item.model_dump(exclude_none=True) for item in first.output]
        given += [{"type": "function_call_output", "call_id": item.call_id, "output": "21"} for item in found]
        assert (await ask(given)).output_text == "It is warm."
        await client.close()
        return 1.0

    trajectory = run(configuration(tmp_path), engine, script)
    assert len(trajectory.segments) == 1 and trajectory.metadata["agent_rewritten"] == 0
    check_books(trajectory, engine)


@needs_trl
@pytest.mark.parametrize("streamed", [False, True])
def test_the_messages_client_works_unchanged(tmp_path: Path, streamed: bool) -> None:
    renderer = Renderer(folder(tmp_path, "qwen3"))
    calls = call_text(renderer, ("look", {"city": "Bern"}), text="I look.")
    turns = [sampled(renderer, f"<think>hm</think>{calls}"), sampled(renderer, "It is warm. STOP and more")]
    engine = Recording(lambda request, number: Reply(turns[number]))
    tools = [{"name": "look", "description": "d", "input_schema": PARAMETERS}]

    async def script(access: Access, post: Any) -> float:
        root = access.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=root, api_key=access.api_key, max_retries=0)

        async def ask(messages: Any, **more: Any) -> Any:
            fields = {"model": access.model, "max_tokens": 1000, "messages": messages, "tools": tools, **more}
            if not streamed:
                return await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                return await stream.get_final_message()

        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        counted = await client.messages.count_tokens(model=access.model, messages=messages, tools=tools)
        first = await ask(messages)
        assert first.stop_reason == "tool_use" and first.usage.input_tokens == counted.input_tokens
        thought, text, use = first.content
        assert (thought.thinking, text.text.strip(), use.input) == ("hm", "I look.", {"city": "Bern"})
        messages.append({"role": "assistant", "content": [text.model_dump(), use.model_dump()]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "21"}
        messages.append({"role": "user", "content": [result]})
        second = await ask(messages, stop_sequences=["STOP"])
        assert (second.content[0].text, second.stop_reason, second.stop_sequence) == (
            "It is warm. ",
            "stop_sequence",
            "STOP",
        )
        with pytest.raises(anthropic.AuthenticationError):
            await anthropic.AsyncAnthropic(base_url=root, api_key="x", max_retries=0).messages.create(
                model="m", max_tokens=1, messages=messages
            )
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum context length"):
            await ask([{"role": "user", "content": "a" * 30_000}])
        await client.close()
        return 1.0

    trajectory = run(configuration(tmp_path), engine, script)
    assert len(trajectory.segments) == 1 and trajectory.metadata["agent_rewritten"] == 0
    check_books(trajectory, engine)


async def post_ok(post: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, found = await post(path, body)
    assert status == 200, found
    return dict(found)


async def by_chat(access: Access, post: Any) -> float:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"}]
    said = (await chat(post, {"messages": messages, "tools": [TOOL]}))["message"]
    messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "21"}]
    assert (await chat(post, {"messages": messages, "tools": [TOOL]}))["message"]["content"] == "It is warm."
    return 1.0


async def by_responses(access: Access, post: Any) -> float:
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": [FLAT],
        "include": [],
        "input": "weather?",
    }
    first = await post_ok(post, "/v1/responses", body)
    (call,) = first["output"]
    assert (first["status"], call["type"], json.loads(call["arguments"])) == ("completed", "function_call", ASKED)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    body["input"] = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}, call, result]
    second = await post_ok(post, "/v1/responses", body)
    assert second["output"][0]["content"][0]["text"] == "It is warm."
    assert second["usage"]["total_tokens"] == second["usage"]["input_tokens"] + second["usage"]["output_tokens"]
    return 1.0


async def by_messages(access: Access, post: Any) -> float:
    body: dict[str, Any] = {
        "max_tokens": 900,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look", "description": "d", "input_schema": PARAMETERS}],
    }
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    first = await post_ok(post, "/v1/messages", body | {"messages": messages})
    (call,) = first["content"]
    assert (first["stop_reason"], call["type"], call["input"]) == ("tool_use", "tool_use", ASKED)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "21"}]}
    messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    count = await post_ok(
        post,
        "/v1/messages/count_tokens",
        {
            "messages": messages,
            "system": "",
            "tools": [{"name": "look", "description": "d", "input_schema": PARAMETERS}],
        },
    )
    second = await post_ok(post, "/v1/messages", body | {"messages": messages})
    assert (second["stop_reason"], second["content"]) == ("end_turn", [{"type": "text", "text": "It is warm."}])
    assert count["input_tokens"] > 0
    return 1.0


@needs_trl
@pytest.mark.parametrize("family", ["qwen2_5", "glm4moe", "gptoss"])
def test_three_dialects_train_the_same_ids(tmp_path: Path, family: str) -> None:
    found = []
    for number, script in enumerate((by_chat, by_responses, by_messages)):
        renderer = Renderer(folder(tmp_path / str(number), family))
        turns = [sampled(renderer, call_text(renderer, ("look", ASKED))), sampled(renderer, "It is warm.")]
        engine = Recording(lambda request, at, turns=turns: Reply(turns[at]))
        trajectory = run(configuration(tmp_path / str(number)), engine, script)
        (segment,) = trajectory.segments
        assert trajectory.metadata["agent_rewritten"] == 0
        check_books(trajectory, engine)
        found.append((segment.token_ids.tolist(), segment.action_mask.tolist()))
    assert found[0] == found[1] == found[2]


@needs_trl
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 3, 0, 2), (0, 1, 3, 2), (1, 0, 2, 3)])
def test_calls_at_once_may_come_back_one_by_one_and_their_results_in_any_order(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    renderer = Renderer(folder(tmp_path, "qwen2_5"))
    both = call_text(renderer, ("look", {"city": "Bern"}), ("look", {"city": "Rome"}))
    turns = [sampled(renderer, both), sampled(renderer, "It is warm.")]
    engine = Recording(lambda request, number: Reply(turns[number]))

    async def script(access: Access, post: Any) -> float:
        body: dict[str, Any] = {"tools": [FLAT], "input": "weather?"}
        calls = (await post_ok(post, "/v1/responses", body))["output"]
        results = [{"type": "function_call_output", "call_id": one["call_id"], "output": "21"} for one in calls]
        items = [*calls, *results]
        body["input"] = [{"role": "user", "content": "weather?"}, *(items[at] for at in order)]
        await post_ok(post, "/v1/responses", body)
        return 1.0

    trajectory = run(configuration(tmp_path), engine, script)
    assert len(trajectory.segments) == 1 and trajectory.metadata["agent_rewritten"] == 0
    check_books(trajectory, engine)
