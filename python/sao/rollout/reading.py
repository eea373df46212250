"""Reading a sampled turn: into content, reasoning and calls of tools.

The tokenizer's own response format is taken where the model folder has one. Else the format of calls is found by
probing: the template writes a call, and the first format that gives it back is the one. There are no names of models,
so a fine-tune is read like its origin. What cannot be read stays text.
"""

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from sao.envs.protocol import Message, ToolCall, is_unicode
from sao.errors import EnvironmentFailure
from sao.rollout.chat_template import ChatTemplate

Field = dict[str, Any]

REASONING = (  # how reasoning begins and ends; the first is what a policy is read by whose template has none
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _tags(open_pattern: str, close_pattern: str, tag: str, value: str = "text", **args: Any) -> Field:
    """Calls whose arguments stand in tags of their own."""
    parser = {"name": value, "args": args}
    content = {"content": "xml-inline", "content_args": {"tag_pattern": tag, "value_parser": parser}}
    return {"open_pattern": open_pattern, "close_pattern": close_pattern, **content, "transform": _NAMED}


def _json(open_pattern: str, close_pattern: str, **args: Any) -> Field:
    """Calls whose arguments are a JSON object behind the name."""
    content = {"content": "json", "content_args": args, "transform": _NAMED}
    return {"open_pattern": open_pattern, "close_pattern": close_pattern, **content}


_FUNCTION = r"<tool_call>\s*<function=(?P<name>[^\n>]+)>"
# A value ends before the next one begins: else each opening without a close would search the whole turn.
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
_ATOM = r"[^\[\]{}'\"]|'[^']*'|\"[^\"]*\""
_NESTED = rf"{_ATOM}|[\[{{](?:{_ATOM}|[\[{{](?:{_ATOM})*[\]}}])*[\]}}]"  # lists and objects, three deep
_LITERAL = rf"(?P<key>\w+)=(?P<value>'[^']*'|[\[{{](?:{_NESTED})*[\]}}]|[^,)]*)"
# Formats of calls; most are those of transformers' and trl's templates. Some models also frame content and reasoning.
FORMATS: dict[str, dict[str, Field]] = {
    "json": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    },
    "xml": {"tool_calls": _tags(_FUNCTION, r"</tool_call>\s*", _PARAMETER)},
    "glm": {
        "tool_calls": _tags(
            r"<tool_call>(?P<name>[^\s<{]+)\n?",
            r"</tool_call>\s*",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_value>).)*?)</arg_value>",
        )
    },
    "llama": {"tool_calls": _json(r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', r"\}\s*$")},
    "harmony": {
        "tool_calls": _json(
            r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[^\s<]+?)(?:<\|channel\|>commentary)?"
            r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            r"<\|call\|>|$",
        ),
        "content": {"open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>", "close_pattern": r"<\|end\|>|$"},
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>|$"},
    },
    "python": {
        "tool_calls": _tags(
            r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
            r"\)(?:\]<\|tool_call_end\|>)?\s*",
            _LITERAL,
            "json",
            string_delims=[["'", "'"]],
            allow_non_json=True,
        )
    },
    "gemma": {
        "tool_calls": _json(
            r"<\|tool_call>call:(?P<name>\w+)",
            r"<tool_call\|>\s*",
            string_delims=[['<|"|>', '<|"|>']],
            unquoted_keys=True,
        )
    },
    "deepseek": {
        "tool_calls": _json(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            r"\n```<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        )
    },
    "atem": {
        "tool_calls": _tags(
            r'<atem:invoke name="(?P<name>[^"]+)">\n?',
            r"</atem:invoke>\s*(?:</atem:function_calls>)?",
            r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>(?:(?!<atem:parameter).)*?)</atem:parameter>',
        ),
        "content": {"open_pattern": r" to=user<\|message\|>", "close_pattern": r"<\|eom\|>|$"},
        "reasoning_content": {"open_pattern": r" to=self<\|message\|>", "close_pattern": r"<\|eom\|>|$"},
    },
}
NAMES = str(FORMATS).replace("\\", "") + str(REASONING)  # holds the name of every marker above
PROBE, THOUGHT = Message("user", "a"), "pondered"
# What the parser raises for calls that are none; the last one for lists in lists without end.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
MOST_CALLS = 256  # in a turn; each is looked for in all that is left of the turn
MOST_DEEP = 100  # lists and objects in the arguments of a call; all who read them do it by recursion
_ARGUMENTS: dict[str, Any] = {"city": "b c", "days": 7}
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
PROBE_TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look", "description": "d", "parameters": _SCHEMA}}]
)


class Reader:
    """Reads turns of the model that a template is for.

    calls: name of the format of its calls, "own" for the folder's; empty: calls are not known, they stay text.
    opens: the marker with which its reasoning begins.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, ends: Iterable[str]) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = _any_of(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.opens, self._closes = self._reasoning()
        self._compiled: dict[str, Any] = {}
        self._own = getattr(tokenizer, "response_template", None)
        self.calls = "own" if self._own else self._format(_any_of(ends))

    def read(self, turn: str, prompt: str, tools: str = "") -> Message:
        """The turn; `turn` with its markers, without the token that ended it. prompt: the end of what stood before it.

        Without `tools` calls are not read. A call that is malformed, cut off, or not JSON (NaN, half of a surrogate
        pair) is text like the rest of the turn.
        """
        given = json.loads(tools) if tools else []
        for calls in (self.calls, "") if given else ("",):
            try:
                return self._message(self._parse(turn, prompt, calls, given))
            except MALFORMED:
                continue  # a malformed call: once more, without a look for calls
        return Message("assistant", self._visible(turn))

    def _message(self, parsed: dict[str, Any]) -> Message:
        calls = tuple(_call(found) for found in parsed.get("tool_calls") or ())
        names = ("reasoning_content", "reasoning", "thinking")
        reasoning = next((str(parsed[name]) for name in names if parsed.get(name)), "")
        content = self._visible(str(parsed.get("content") or ""))
        if calls or reasoning:
            content = content.strip()
        return Message("assistant", content, calls, reasoning=self._visible(reasoning).strip())

    def _visible(self, text: str) -> str:
        return self._special.sub("", text)

    def _parse(self, turn: str, prompt: str, calls: str, tools: list[Any]) -> dict[str, Any]:
        if calls == "own":
            return dict(self._tokenizer.parse_response(turn, self._schema(calls), prefix=prompt, tools=tools))
        at = prompt.rfind(self.opens)
        behind = prompt[at + len(self.opens) :] if at >= 0 else self._closes
        opened = not (self._closes in behind or self._template.pattern.search(behind))
        thought, closed, _ = turn.partition(self._closes)
        opened = opened or bool(closed and self.opens not in thought)
        if calls and sum(1 for _ in _opening(calls).finditer(turn)) > MOST_CALLS:
            raise ValueError(f"more than {MOST_CALLS} calls")
        schema = self._schema(calls)
        found = dict(self._tokenizer.parse_response(turn, schema, prefix=self.opens if opened else "", tools=tools))
        if made := found.get("tool_calls"):
            close = FORMATS[calls]["tool_calls"]["close_pattern"]
            if len(re.findall(close, turn)) < len(made):
                raise ValueError("the last call is cut off")
        if turn.strip() and not found.keys() & {"content", "reasoning_content", "tool_calls"}:
            return {"content": turn}  # the turn holds none of the frames that its format has for everything
        return found

    def _schema(self, calls: str) -> Any:
        """A response format as `tokenizer.parse_response` takes it; compiled once, which takes longer than to parse."""
        if calls not in self._compiled:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            described: Any = self._own if calls == "own" else self._described(calls)
            self._compiled[calls] = load_response_template(described)
        return self._compiled[calls]

    def _described(self, calls: str) -> dict[str, Any]:
        """The same as a table of fields."""
        text = {"content": "text", "repeats": True, "join": ""}
        whole = {"content_args": {"strip": False}}
        fields: dict[str, Field] = {
            "reasoning_content": {**text, "open": self.opens, "close_pattern": re.escape(self._closes) + r"\s*"},
            "content": {**text, **whole},
        }
        for name, field in FORMATS.get(calls or self.calls, {}).items():
            if name != "tool_calls":
                fields[name] = {**text, **(whole if name == "content" else {}), **field}
            elif calls:
                fields[name] = {"repeats": True, **field}
        return {"start_anchor": "\0", "fields": fields}

    def _reasoning(self) -> tuple[str, str]:
        turn = Message("assistant", "answer", reasoning=THOUGHT)
        try:
            text = self._template.text([PROBE, turn], prompt=False)
        except EnvironmentFailure:
            return REASONING[0]
        before, found, behind = text.partition(THOUGHT)
        for opens, closes in REASONING:
            if found and before.rstrip().endswith(opens.rstrip()) and closes in behind:
                return opens, closes
        return next((pair for pair in REASONING if pair[1] in self._template.marks), REASONING[0])

    def _format(self, ends: re.Pattern[str]) -> str:
        """The name of the format in which the template writes calls."""
        call = ToolCall("look", json.dumps(_ARGUMENTS), "call00000")
        try:
            text = self._template.text([PROBE, Message("assistant", "", (call,))], PROBE_TOOLS, prompt=False)
            start = self._template.text([PROBE], PROBE_TOOLS, prompt=False)
        except EnvironmentFailure:
            return ""
        turn = text.removeprefix(start)
        end = ends.search(turn, max(0, turn.rfind(_ARGUMENTS["city"])))
        for name in FORMATS:
            with contextlib.suppress(*MALFORMED):
                read = self._message(self._parse(turn[: end and end.start()], "", name, json.loads(PROBE_TOOLS)))
                if [(one.name, json.loads(one.arguments)) for one in read.tool_calls] == [("look", _ARGUMENTS)]:
                    return name
        return ""


def _opening(calls: str) -> re.Pattern[str]:
    """What begins a call of the format."""
    field = FORMATS[calls]["tool_calls"]
    return re.compile(field.get("open_pattern") or re.escape(field["open"]))


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) for name in names if name) or r"(?!)")


def _call(found: Any) -> ToolCall:
    function = found["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError(f"not a call: {found!r}")
    if _depth(arguments) > MOST_DEEP:
        raise ValueError(f"more than {MOST_DEEP} lists and objects in one another")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not is_unicode(name + text):
        raise ValueError("half of a surrogate pair")
    return ToolCall(name.strip(), text)


def _depth(value: Any) -> int:
    """Lists and objects in one another."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth
