"""The dialect of `/v1/chat/completions`.

Refused is only what would make several turns or other content of one: `n` above 1, `logit_bias`, images and audio, the
old `functions`. Tools may be called or not, whatever `tool_choice` demands; a `response_format` is not enforced.
"""

from __future__ import annotations

import json
import secrets
import time
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
from sao.envs.protocol import Message, ToolCall

_READ = frozenset(
    {"messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options", "tools", "stop"}
    | {"tool_choice", "response_format", "logprobs", "top_logprobs", "n", "logit_bias", "functions", "modalities"}
)
_HARMLESS = frozenset(
    {"model", "user", "metadata", "store", "seed", "service_tier", "parallel_tool_calls", "safety_identifier"}
)
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {  # field -> values that change nothing, and why no others are served
    "n": ((1,), "one completion a call; call again for another"),
    "logit_bias": (({},), "it would change what the log-probs mean"),
    "functions": (([],), "give them as tools"),
    "modalities": ((["text"],), "the policy writes text"),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def parse(body: dict[str, Any], temperature: float) -> ModelCall:
    """See `Dialect`."""
    for name, (same, why) in _ONLY.items():
        if (value := body.get(name)) is not None and value not in same:
            raise wrong(name, f"{value!r:.100} is not supported: {why}", "unsupported_value")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", f"{options!r:.100}, expected an object")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "expected a list of at least one message")
    messages = named_results(_message(f"messages[{index}]", message) for index, message in enumerate(given))
    if messages[-1].role == "assistant":
        raise wrong("messages", "the last one is the assistant's; a turn cannot be begun for the policy")
    notes: dict[str, Note] = dict(sampling_notes(body, temperature))
    choice, shape = body.get("tool_choice"), body.get("response_format")
    if choice not in (None, "auto", "none"):
        notes["tool_choice"] = "unforced"
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        notes["response_format"] = "unforced"
    known = _READ | _HARMLESS | notes.keys()
    notes |= {name: "ignored" for name, value in body.items() if name not in known and value is not None}
    return ModelCall(
        messages,
        _tools(body.get("tools")),
        reads_calls=choice != "none",
        stops=stop_texts("stop", body.get("stop")),
        max_tokens=token_limit(body, "max_tokens", "max_completion_tokens"),
        stream=bool(body.get("stream")),
        logprobs=bool(body.get("logprobs")),
        include_usage=bool(options.get("include_usage")),
        notes=notes,
    )


def answer(turn: Turn, call: ModelCall, model: str) -> dict[str, Any]:
    """See `Dialect`: a `chat.completion`."""
    found = turn.message
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.tool_calls:
        message |= {"content": found.content or None, "tool_calls": [_call(one) for one in found.tool_calls]}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": _logprobs(turn, call)}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(turn)}


class ChatStream:
    """See `Stream`: content as it comes, then reasoning and calls whole, then why the turn ended, then its usage."""

    def __init__(self, call: ModelCall, model: str) -> None:
        self._call, self._head = call, _head("chat.completion.chunk", model)

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def more(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def end(self, turn: Turn, sent: str) -> bytes:
        found, last = turn.message, dict[str, Any]()
        if found.reasoning:
            last["reasoning_content"] = found.reasoning
        if rest := found.content[len(sent) :]:
            last["content"] = rest
        if found.tool_calls:
            last["tool_calls"] = [{"index": index, **_call(one)} for index, one in enumerate(found.tool_calls)]
        events = self._chunk(last, logprobs=_logprobs(turn, self._call)) if last or self._call.logprobs else b""
        events += self._chunk({}, turn.finish_reason)
        if self._call.include_usage:
            events += _event({**self._head, "choices": [], "usage": _usage(turn)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return _event(error_body(error))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _event({**self._head, "choices": [choice]})


def stream(call: ModelCall, model: str) -> ChatStream:
    """See `Dialect`."""
    return ChatStream(call, model)


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body of a refusal, in OpenAI's form."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


error = error_body


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _usage(turn: Turn) -> dict[str, int]:
    prompt, sampled = turn.prompt_tokens, turn.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(turn: Turn, call: ModelCall) -> dict[str, Any] | None:
    """Of the sampled tokens; no others are known."""
    if not call.logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in turn.logprobs
        ],
        "refusal": None,
    }


def _tools(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, list):
        raise wrong("tools", "expected a list of functions")
    functions = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong(f"tools[{index}]", 'expected an object of type "function"')
        functions.append(tool.get("function"))
    return function_schemas("tools", functions)


def _message(where: str, given: Any) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(where, f"expected an object with a role of {', '.join(_ROLES)}")
    content = checked_text(f"{where}.content", given.get("content"))
    if role == "tool":
        call_id, name = given.get("tool_call_id") or "", given.get("name") or ""
        return Message("tool", content, (), checked_text(f"{where}.tool_call_id", call_id), checked_text(where, name))
    if role != "assistant":
        if given.get("content") is None:
            raise wrong(f"{where}.content", "expected text, without half of a surrogate pair")
        return Message(_ROLES[role], content)
    calls = given.get("tool_calls") or []
    if given.get("function_call") or not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "expected a list of calls")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        at = f"{where}.tool_calls[{index}]"
        if not isinstance(function, dict):
            raise wrong(at, "expected a call of a function")
        read.append(checked_call(at, function.get("name"), function.get("arguments"), call.get("id")))
    reasoning = next((given[name] for name in ("reasoning_content", "reasoning") if given.get(name)), "")
    if not isinstance(reasoning, str):
        reasoning = ""  # in a form of another server's; what was sampled here is known without it
    return Message("assistant", content, tuple(read), reasoning=checked_text(f"{where}.reasoning", reasoning))
