"""The dialect of Anthropic's `/v1/messages`.

Results of tools stand in a user's message there, and are messages of their own here, before the text that came with
them. A demanded tool is not enforced; `thinking` is what the model does anyway; images and documents are
refused. Tools that a provider would run are left out and noted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

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
    stop_texts,
    token_limit,
    wrong,
)
from sao.envs.protocol import Message

_READ = frozenset(
    {"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "temperature"}
)
_HARMLESS = frozenset({"model", "metadata", "service_tier", "thinking", "cache_control", "betas"})
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def parse(body: dict[str, Any], temperature: float) -> ModelCall:
    """See `Dialect`."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "expected a list of at least one message")
    messages = [message for index, one in enumerate(given) for message in _messages(f"messages[{index}]", one)]
    if not messages or messages[-1].role == "assistant":
        raise wrong("messages", "the last one is the assistant's; a turn cannot be begun for the policy")
    if system := checked_text("system", body.get("system")):
        messages.insert(0, Message("system", system))
    notes: dict[str, Note] = dict(sampling_notes(body, temperature))
    choice = body.get("tool_choice") or {}
    chosen = choice.get("type") if isinstance(choice, dict) else choice
    if chosen not in (None, "auto", "none"):
        notes["tool_choice"] = "unforced"
    functions = _functions(body.get("tools") or [])
    if len(functions) < len(body.get("tools") or []):
        notes["tools"] = "ignored"
    known = _READ | _HARMLESS | notes.keys()
    notes |= {name: "ignored" for name, value in body.items() if name not in known and value is not None}
    return ModelCall(
        named_results(messages),
        function_schemas("tools", functions),
        reads_calls=chosen != "none",
        stops=stop_texts("stop_sequences", body.get("stop_sequences")),
        max_tokens=token_limit(body, "max_tokens"),
        stream=bool(body.get("stream")),
        notes=notes,
    )


def answer(turn: Turn, call: ModelCall, model: str) -> dict[str, Any]:
    """See `Dialect`: a `message`."""
    usage = {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens}
    return {**_head(model), "content": list(_blocks(turn)), **_ending(turn), "usage": usage}


class MessageStream:
    """See `Stream`: the events of a message; text as it comes, thinking and calls whole."""

    def __init__(self, call: ModelCall, model: str) -> None:
        self._head, self._index = _head(model), 0
        self._open = False  # the text block

    def begin(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def more(self, text: str) -> bytes:
        events = b"" if self._open else self._start({"type": "text", "text": ""})
        self._open = True
        return events + self._delta("text_delta", text=text)

    def end(self, turn: Turn, sent: str) -> bytes:
        # What has begun is the first block, also where the turn has thought behind it.
        blocks = sorted(_blocks(turn), key=lambda block: self._open and block["type"] != "text")
        events = b""
        for block in blocks:
            kind = block["type"]
            if kind == "text":
                if rest := block["text"][len(sent) :]:
                    events += self.more(rest)
                elif not self._open:
                    events += self._start(block)
            elif kind == "thinking":
                events += self._start({**block, "thinking": ""}) + self._delta(
                    "thinking_delta", thinking=block["thinking"]
                )
            else:
                text = json.dumps(block["input"], ensure_ascii=False)
                events += self._start({**block, "input": {}}) + self._delta("input_json_delta", partial_json=text)
            events += _event("content_block_stop", index=self._index)
            self._index += 1
        usage = {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens}
        return events + _event("message_delta", delta=_ending(turn), usage=usage) + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return _event("error", error=error_body(error)["error"])

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def stream(call: ModelCall, model: str) -> MessageStream:
    """See `Dialect`."""
    return MessageStream(call, model)


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body of a refusal, in Anthropic's form and words."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = error.message
    if error.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}}


error = error_body


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}


def _ending(turn: Turn) -> dict[str, Any]:
    reason = "stop_sequence" if turn.stopped_at is not None else _REASONS[turn.finish_reason]
    return {"stop_reason": reason, "stop_sequence": turn.stopped_at}


def _blocks(turn: Turn) -> Iterator[dict[str, Any]]:
    found = turn.message
    if found.reasoning:
        yield {"type": "thinking", "thinking": found.reasoning, "signature": ""}
    if found.content:
        yield {"type": "text", "text": found.content}
    for call in found.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _messages(where: str, given: Any) -> Iterator[Message]:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant", "system"):
        raise wrong(where, "expected an object with a role of user, assistant")
    content = given.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "expected text or a list of blocks")
    text, calls, reasoning, rest = "", [], "", 0
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text, rest = text + checked_text(f"{at}.text", block.get("text")), rest + 1
        elif kind == "tool_result" and role == "user":
            call_id = checked_text(f"{at}.tool_use_id", block.get("tool_use_id"))
            yield Message("tool", checked_text(f"{at}.content", block.get("content")), (), call_id)
        elif kind == "tool_use" and role == "assistant":
            calls.append(checked_call(at, block.get("name"), block.get("input"), block.get("id")))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            reasoning += checked_text(f"{at}.thinking", block.get("thinking"))
        else:
            raise wrong(at, f"a block of type {kind!r:.50} is not supported in a message of the {role}")
    if rest or role == "assistant":
        yield Message(role, text, tuple(calls), reasoning=reasoning)


def _functions(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise wrong("tools", "expected a list")
    functions = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise wrong(f"tools[{index}]", "expected a tool with name and input_schema")
        if tool.get("type") in (None, "custom"):
            more = {"description": tool.get("description"), "parameters": tool.get("input_schema")}
            functions.append({"name": tool.get("name"), **more})
    return functions
