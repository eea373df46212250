"""A call of the policy by an agent, and its answer, in no API's dialect.

A dialect is a module that reads requests of one API into a `ModelCall` and writes a `Turn` in that API's form. It sees
messages and text; token ids never leave the endpoint.

A field of a request that asks for other sampling than the run's is not followed, since only what the run itself samples
may be trained on: it is noted in the call and counted; with `strict` the call is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from sao.envs.protocol import Message, ToolCall, is_unicode

Note = Literal["overruled", "unforced", "ignored"]
"""Why a field is not followed: the run's own sampling rules; it would mask tokens; it is not known here."""
FinishReason = Literal["stop", "length", "tool_calls"]
Conversation = tuple[Message, ...]
MAX_STOPS, MAX_STOP = 16, 1000  # texts, and characters of one; each is looked for at every token
_EMPTY = {"description": "", "parameters": {"type": "object", "properties": {}}}  # some templates read both unasked
_SAMPLING = {  # fields that shape sampling, and the values that change nothing
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}


class ApiError(Exception):
    """A call that is refused: an HTTP status, why, the field that is wrong and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A turn of the policy that was asked for.

    tools: a JSON list of function schemas as the chat API has them; empty: none. reads_calls: calls of the turn are to
    be read (tool_choice is not none). stops: texts at which the turn ends. max_tokens: None: the run's own limit.
    notes: fields that are not followed.
    """

    messages: Conversation
    tools: str = ""
    reads_calls: bool = True
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = True
    notes: dict[str, Note] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """The sampled turn that answers a call.

    message: content, reasoning and calls, each with an id that is unique in the session. text: all that was sampled,
    without special tokens. stopped_at: the text of `stops` that ended it, which is not in the content; or None.
    logprobs: per sampled token (its text, its log-prob).
    """

    message: Message
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stopped_at: str | None = None
    logprobs: tuple[tuple[str, float], ...] = ()


class Stream(Protocol):
    """An answer in pieces, as bytes of server-sent events."""

    def begin(self) -> bytes:
        """Before anything is sampled."""

    def more(self, text: str) -> bytes:
        """More of the turn's content, as it is sampled."""

    def end(self, turn: Turn, sent: str) -> bytes:
        """The rest of the turn, whose content began with `sent`."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""


class Dialect(Protocol):
    """One API's form of calls, answers and errors."""

    def parse(self, body: dict[str, Any], temperature: float) -> ModelCall:
        """Reads a request's JSON. temperature: of the session. Raises `ApiError` (400) that names the field."""

    def answer(self, turn: Turn, call: ModelCall, model: str) -> dict[str, Any]:
        """The JSON body of an answer."""

    def stream(self, call: ModelCall, model: str) -> Stream: ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """The JSON body of a refusal."""


def wrong(name: str, text: str, code: str | None = None) -> ApiError:
    """A refusal of the field `name`."""
    return ApiError(400, f"{name}: {text}", param=name, code=code)


def sampling_notes(body: dict[str, Any], temperature: float) -> Iterator[tuple[str, Note]]:
    """The fields of a request that ask for other sampling than the run's."""
    if (asked := body.get("temperature")) is not None and asked != temperature:
        yield "temperature", "overruled"
    for name, same in _SAMPLING.items():
        if (value := body.get(name)) is not None and value not in same:
            yield name, "overruled"


def token_limit(body: dict[str, Any], *names: str) -> int | None:
    """The smallest of these fields, each an integer of at least 1; None when there is none."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, limit in found.items():
        if type(limit) is not int or limit < 1:
            raise wrong(name, f"{limit!r:.100}, expected an integer of at least 1")
    return min(found.values(), default=None)


def stop_texts(name: str, given: Any) -> tuple[str, ...]:
    """The texts of a `stop` field: none, one, or a list."""
    texts = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(texts, list) and len(texts) <= MAX_STOPS
    if not fits or not all(isinstance(one, str) and len(one) <= MAX_STOP for one in texts):
        expected = f"text or a list of at most {MAX_STOPS} texts, each of at most {MAX_STOP} characters"
        raise wrong(name, f"{given!r:.200}, expected {expected}")
    return tuple(one for one in texts if one)


def checked_text(where: str, given: Any) -> str:
    """A text, or the text of a list of text parts; None is none."""
    if given is None:
        return ""
    if isinstance(given, list):
        kinds = ("text", "input_text", "output_text", "refusal")
        parts = [part if isinstance(part, dict) else {} for part in given]
        if any(part.get("type") not in kinds for part in parts):
            raise wrong(where, "expected text or a list of text parts")
        texts = [part.get("refusal" if part["type"] == "refusal" else "text") for part in parts]
        given = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(given, str) or not is_unicode(given):
        raise wrong(where, "expected text, without half of a surrogate pair")
    return given


def checked_call(where: str, name: Any, arguments: Any, call_id: Any) -> ToolCall:
    """A call in an assistant's message. Arguments that are no text are written as JSON."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False) if arguments is not None else "{}"
    call_id = "" if call_id is None else call_id
    texts = (name, arguments, call_id)
    if not name or not all(isinstance(text, str) and is_unicode(text) for text in texts):
        raise wrong(where, "expected a name, arguments and an id, all of them text")
    return ToolCall(name, arguments or "{}", call_id)


def function_schemas(where: str, functions: Iterable[Any]) -> str:
    """`ModelCall.tools` from objects with name, description and parameters. Raises `ApiError` for anything else."""
    tools = []
    for index, function in enumerate(functions):
        at = f"{where}[{index}]"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
            raise wrong(at, "expected a function with a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise wrong(f"{at}.parameters", "expected a JSON schema")
        given = {key: value for key, value in function.items() if value is not None}
        tools.append({"type": "function", "function": _EMPTY | given})
    text = json.dumps(tools, ensure_ascii=False) if tools else ""
    if not is_unicode(text):
        raise wrong(where, "expected text without half of a surrogate pair")
    return text


def named_results(messages: Iterable[Message]) -> Conversation:
    """The conversation, in which a tool's result has the name of the tool that was called."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id in names:
            message = Message("tool", message.content, (), message.tool_call_id, names[message.tool_call_id])
        found.append(message)
    return tuple(found)


def token_logprobs(texts: Iterable[str], logprobs: np.ndarray) -> tuple[tuple[str, float], ...]:
    """Pairs of a token's text and its log-prob."""
    return tuple(zip(texts, logprobs.tolist(), strict=True))
