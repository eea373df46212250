"""The dialect of the OpenAI chat API, as far as it is served: requests read strictly, answers and errors in its form.

A field that would change what is sampled is refused unless it has the value that holds anyway; nothing is silently
ignored but what has no influence on the answer (`IGNORED`).
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sao.agents.session import ApiError, Turn
from sao.envs.protocol import Message, is_unicode

IGNORED = frozenset(
    {"model", "user", "metadata", "store", "seed", "service_tier", "parallel_tool_calls", "safety_identifier"}
)
_READ = frozenset({"messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options"})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIXED: dict[str, tuple[Any, ...]] = {  # field -> values that change nothing
    "n": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_WHY = {
    "tools": "the policy's turns are plain text; describe tools in the system message",
    "functions": "the policy's turns are plain text; describe tools in the system message",
    "n": "one completion a call; call again for another",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A chat completion that was asked for. max_tokens: None: the run's own limit."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool


def parse(body: dict[str, Any], temperature: float) -> Call:
    """Reads a request's JSON. temperature: that of this session. Raises `ApiError` (400) that names the field."""
    asked = body.get("temperature")
    if asked is not None and asked != temperature:
        text = f"{asked!r}, but this session is sampled at {temperature:g}: leave it out"
        raise _wrong("temperature", text, "unsupported_value")
    for name, value in body.items():
        if name in _READ or name in IGNORED or value is None:
            continue
        if name not in _FIXED:
            raise ApiError(400, f"unknown field: {name}", param=name, code="unknown_parameter")
        if value not in _FIXED[name]:
            why = _WHY.get(name, "only the temperature of the run may shape what is trained on")
            raise _wrong(name, f"{value!r} is not supported: {why}", "unsupported_value")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise _wrong("stream_options", f"{options!r}, expected include_usage")
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise _wrong("max_tokens", f"{limits!r}, expected an integer of at least 1")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "expected a list of at least one message")
    messages = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(given))
    if messages[-1].role == "assistant":
        raise _wrong("messages", "the last one is the assistant's; a turn cannot be begun for the policy")
    stream, include_usage = bool(body.get("stream")), bool(options.get("include_usage"))
    return Call(messages, min(limits, default=None), stream, include_usage)


def completion(turn: Turn, model: str) -> dict[str, Any]:
    """The JSON body of a `chat.completion`."""
    message = {"role": "assistant", "content": turn.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(turn)}


def chunks(turn: Turn, model: str, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The JSON bodies of a stream: the turn in one piece, then why it ended, then its usage."""
    head = _head("chat.completion.chunk", model)
    delta = {"role": "assistant", "content": turn.text}
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish_reason, "logprobs": None}]}
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(turn)}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body of a refusal."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _usage(turn: Turn) -> dict[str, int]:
    prompt, sampled = turn.prompt_tokens, turn.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(where: str, given: Any) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(where, f"expected an object with a role of {', '.join(_ROLES)}")
    if given.get("tool_calls") or given.get("function_call"):
        raise _wrong(f"{where}.tool_calls", _WHY["tools"])
    content = given.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str) or not is_unicode(content):
        raise _wrong(f"{where}.content", "expected text, without half of a surrogate pair")
    return Message(_ROLES[role], content)


def _wrong(field: str, text: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{field}: {text}", param=field, code=code)
