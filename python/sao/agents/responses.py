"""The dialect of `/v1/responses`, without state: every request brings its whole conversation.

An assistant's turn is a run of items there (reasoning, a message, calls); it is one message here. A schema in `text`
and a demanded tool are not enforced; `previous_response_id`, images and files are refused. Tools that are no functions,
which a provider would run, are left out and noted.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from sao.agents.chat_completions import error_body
from sao.agents.request import (
    ApiError,
    ModelCall,
    Note,
    Turn,
    checked_call,
    checked_text,
    function_schemas,
    named_results,
    sampling_notes,
    token_limit,
    wrong,
)
from sao.envs.protocol import Message, ToolCall

_READ = frozenset(
    {"input", "instructions", "tools", "tool_choice", "text", "stream", "max_output_tokens", "temperature"}
)
_HARMLESS = frozenset(
    {"model", "include", "store", "user", "metadata", "parallel_tool_calls", "truncation", "service_tier", "seed"}
    | {"safety_identifier", "stream_options", "background"}
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse(body: dict[str, Any], temperature: float) -> ModelCall:
    """See `Dialect`."""
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        text = "nothing is kept between requests; send the whole conversation as input"
        raise wrong("previous_response_id", text, "unsupported_value")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "expected text or a list of at least one item")
    messages = list(_messages(given))
    if (instructions := body.get("instructions")) is not None:
        messages.insert(0, Message("system", checked_text("instructions", instructions)))
    if messages[-1].role == "assistant":
        raise wrong("input", "the last item is the assistant's; a turn cannot be begun for the policy")
    notes: dict[str, Note] = dict(sampling_notes(body, temperature))
    choice, shape = body.get("tool_choice"), body.get("text")
    if choice not in (None, "auto", "none"):
        notes["tool_choice"] = "unforced"
    functions = _functions(body.get("tools") or [])
    if len(functions) < len(body.get("tools") or []):
        notes["tools"] = "ignored"
    form = shape.get("format") if isinstance(shape, dict) else None
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        notes["text"] = "unforced"
    known = _READ | _HARMLESS | notes.keys()
    notes |= {name: "ignored" for name, value in body.items() if name not in known and value is not None}
    return ModelCall(
        named_results(messages),
        function_schemas("tools", functions),
        reads_calls=choice != "none",
        max_tokens=token_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        notes=notes,
    )


def answer(turn: Turn, call: ModelCall, model: str) -> dict[str, Any]:
    """See `Dialect`: a `response`."""
    return _response(_id("resp"), turn, call, model, list(_items(turn)))


class ResponseStream:
    """See `Stream`: the events of a response; content as it comes, reasoning and calls whole."""

    def __init__(self, call: ModelCall, model: str) -> None:
        self._call, self._model, self._id = call, model, _id("resp")
        self._numbers = itertools.count()
        self._message = ""  # id of the message that content goes into; empty: it has not begun

    def begin(self) -> bytes:
        response = _response(self._id, None, self._call, self._model, [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def more(self, text: str) -> bytes:
        events = b"" if self._message else self._begin_message(0)
        return events + self._event("response.output_text.delta", **self._part(0), delta=text, logprobs=[])

    def end(self, turn: Turn, sent: str) -> bytes:
        # What has begun is the first item, also where the turn has reasoned behind it.
        items = sorted(_items(turn), key=lambda item: bool(self._message) and item["type"] != "message")
        events = b""
        for index, item in enumerate(items):
            if item["type"] == "message":
                if not self._message:
                    events += self._begin_message(index)
                item["id"] = self._message
                part, text = self._part(index), turn.message.content
                if rest := text[len(sent) :]:
                    events += self._event("response.output_text.delta", **part, delta=rest, logprobs=[])
                events += self._event("response.output_text.done", **part, text=text, logprobs=[])
                events += self._event("response.content_part.done", **part, part=item["content"][0])
            else:
                begun = {**item, "status": "in_progress"}
                if item["type"] == "function_call":
                    begun["arguments"] = ""
                events += self._event("response.output_item.added", output_index=index, item=begun)
            if item["type"] == "function_call":
                where = {"item_id": item["id"], "output_index": index}
                text = item["arguments"]
                events += self._event("response.function_call_arguments.delta", **where, delta=text)
                events += self._event(
                    "response.function_call_arguments.done", **where, arguments=text, name=item["name"]
                )
            events += self._event("response.output_item.done", output_index=index, item=item)
        whole = _response(self._id, turn, self._call, self._model, items)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return events + self._event(kind, response=whole)

    def error(self, error: ApiError) -> bytes:
        response = _response(self._id, None, self._call, self._model, [])
        failed = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**response, "status": "failed", "error": failed})

    def _begin_message(self, index: int) -> bytes:
        self._message = _id("msg")
        item = {"id": self._message, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        events = self._event("response.output_item.added", output_index=index, item=item)
        return events + self._event("response.content_part.added", **self._part(index), part=part)

    def _part(self, index: int) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": next(self._numbers), **fields})
        return f"event: {kind}\ndata: {body}\n\n".encode()


def stream(call: ModelCall, model: str) -> ResponseStream:
    """See `Dialect`."""
    return ResponseStream(call, model)


error = error_body


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _items(turn: Turn) -> Iterator[dict[str, Any]]:
    found = turn.message
    if found.reasoning:
        content = [{"type": "reasoning_text", "text": found.reasoning}]
        yield {"id": _id("rs"), "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    if found.content or not found.tool_calls:
        part = {"type": "output_text", "text": found.content, "annotations": [], "logprobs": []}
        head = {"id": _id("msg"), "type": "message", "status": "completed", "role": "assistant"}
        yield {**head, "content": [part]}
    for call in found.tool_calls:
        head = {"id": _id("fc"), "type": "function_call", "status": "completed", "call_id": call.id}
        yield {**head, "name": call.name, "arguments": call.arguments}


def _response(name: str, turn: Turn | None, call: ModelCall, model: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = turn is not None and turn.finish_reason == "length"
    found: dict[str, Any] = {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if turn is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }
    if turn is not None:
        prompt, sampled = turn.prompt_tokens, turn.completion_tokens
        found["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return found


def _messages(items: list[Any]) -> Iterator[Message]:
    """The items as messages; those of the assistant that follow one another are one."""
    content, calls, reasoning = "", list[ToolCall](), ""
    open_turn = False
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            reasoning, open_turn = reasoning + _reasoning(where, item), True
        elif kind == "function_call":
            calls.append(checked_call(where, item.get("name"), item.get("arguments"), item.get("call_id")))
            open_turn = True
        elif kind == "message" and item.get("role") == "assistant":
            content, open_turn = content + checked_text(f"{where}.content", item.get("content")), True
        else:
            if open_turn:
                yield Message("assistant", content, tuple(calls), reasoning=reasoning)
                content, calls, reasoning, open_turn = "", [], "", False
            yield _other(where, kind, item)
    if open_turn:
        yield Message("assistant", content, tuple(calls), reasoning=reasoning)


def _other(where: str, kind: Any, item: Any) -> Message:
    if kind == "function_call_output":
        call_id = checked_text(f"{where}.call_id", item.get("call_id"))
        return Message("tool", checked_text(f"{where}.output", item.get("output")), (), call_id)
    if kind != "message":
        known = "message, reasoning, function_call, function_call_output"
        raise wrong(where, f"an item of type {kind!r:.50}, expected one of {known}")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES or item.get("content") is None:
        raise wrong(where, f"expected a role of {', '.join(_ROLES)}, and content")
    return Message(_ROLES[role], checked_text(f"{where}.content", item["content"]))


def _reasoning(where: str, item: dict[str, Any]) -> str:
    parts = item.get("content") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(checked_text(f"{where}.content", text) for text in texts)


def _functions(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise wrong("tools", "expected a list of functions")
    functions = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise wrong(f"tools[{index}]", "expected an object with a type")
        if tool["type"] == "function":
            functions.append({name: tool.get(name) for name in ("name", "description", "parameters", "strict")})
    return functions
