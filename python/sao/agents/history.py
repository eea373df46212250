"""The turns of a session, found again in the conversations that an agent sends.

A conversation is walked from its beginning. An assistant's message is a turn that was sampled here if it stands at the
same place, behind the same messages and tools, and is the same: by the ids of its calls, which this side gave out, with
arguments that are equal as JSON; else by its content without white space at the ends, with or without the text that
stopped it. Ids of calls are looked for in text, too, since some agents write calls as text. Reasoning does not count:
agents leave it out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import NamedTuple

import numpy as np

from sao.agents.request import Conversation, Turn
from sao.envs.protocol import Message, ToolCall
from sao.trajectory import SegmentBuilder

_CALL_ID = re.compile(r"call\d{5,}")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A conversation and its ids, which end with a turn of the policy.

    place: that of the conversation up to the turn and with it. segment: the one that begins with the ids. messages:
    with what agents leave out, the reasoning of the policy's turns.
    """

    place: bytes
    segment: SegmentBuilder
    messages: Conversation
    turn: Turn

    @property
    def n_tokens(self) -> int:
        return self.turn.prompt_tokens + self.turn.completion_tokens

    @property
    def ids(self) -> np.ndarray:
        """int32[n], made anew: one array a turn would be quadratic in the length of a conversation."""
        return self.segment.token_ids[: self.n_tokens]


class Found(NamedTuple):
    """A conversation that was looked up. point: the last sampled turn in it, the message `at`; None: there is none.

    place: of the whole conversation. last: place in the list of its last assistant message, -1 if there is none.
    """

    point: Point | None
    at: int
    place: bytes
    last: int


@dataclass(slots=True)
class _Walk:
    """The newest walk: what was found behind each message of a conversation, where the next one goes on."""

    tools: str = ""
    messages: Conversation = ()
    found: list[Found] = attribute(default_factory=list)  # the first one before any message


@dataclass
class History:
    """The sampled turns of a session by their place and form; a place is a digest of all that stands before."""

    _points: dict[tuple[bytes, bytes], Point] = attribute(default_factory=dict)
    _walk: _Walk = attribute(default_factory=_Walk)
    _turns: dict[str, Turn] = attribute(default_factory=dict)  # by the ids of their calls
    _n_calls: int = 0

    def named(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls with new ids: nine letters and digits, as some templates demand, and the same in a replay."""
        found = tuple(ToolCall(c.name, c.arguments, f"call{self._n_calls + i:05}") for i, c in enumerate(calls))
        self._n_calls += len(found)
        return found

    def gathered(self, messages: Conversation) -> Conversation:
        """The messages, in which calls of one turn that come one by one, each with its result, are one turn again."""
        found, last = list[Message](), -1  # the newest of the assistant
        for message in messages:
            if message.role == "assistant":
                turns = {self._turns.get(call.id) for call in message.tool_calls} if message.tool_calls else {None}
                before = found[last].tool_calls if last >= 0 else ()
                if None not in turns and not message.content and {self._turns.get(c.id) for c in before} == turns:
                    found[last] = replace(found[last], tool_calls=before + message.tool_calls)
                    continue
                last = len(found)
            elif message.role != "tool":
                last = -1
            found.append(message)
        return tuple(found)

    def find(self, messages: Conversation, tools: str) -> Found:
        """Looks up a conversation."""
        walk = self._walk
        if not walk.found or walk.tools != tools:
            walk = _Walk(tools, (), [Found(None, -1, _digest(b"", tools), -1)])
        known = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(walk.messages, messages, strict=False))
        found = walk.found[: 1 + sum(1 for _ in known)]
        for at in range(len(found) - 1, len(messages)):
            found.append(self._behind(found[at], at, messages[at]))
        self._walk = _Walk(tools, messages, found)
        return found[-1]

    def _behind(self, before: Found, at: int, message: Message) -> Found:
        """The same, one message further, which is number `at`."""
        place = before.place
        if message.role != "assistant":
            return before._replace(place=_digest(place, message.role, message.content, message.tool_call_id))
        for form in self._forms(message):
            if (known := self._points.get((place, form))) is not None:
                return Found(known, at, known.place, at)
        return before._replace(place=_digest(place, "assistant", _text_form(message).hex()), last=at)

    def add(self, place: bytes, segment: SegmentBuilder, messages: Conversation, turn: Turn) -> Point:
        """Takes a turn that was sampled behind the conversation of `place`; `segment` and `messages` end with it."""
        after = _digest(place, "turn", str(len(self._points)))
        point = Point(after, segment, messages, turn)
        self._turns |= dict.fromkeys((call.id for call in turn.message.tool_calls), turn)
        content = turn.message.content
        forms = {_text_form(turn.message), _text_form(Message("assistant", turn.text))}
        if turn.stopped_at is not None:
            forms.add(_text_form(Message("assistant", content + turn.stopped_at)))
        if turn.message.tool_calls:
            forms.add(_calls_form(turn.message.tool_calls))
        for form in forms:
            self._points[place, form] = point
        walk = self._walk  # what was found behind this place may be the new turn now
        at = next((at for at, found in enumerate(walk.found) if found.place == place), len(walk.found) - 1)
        self._walk = _Walk(walk.tools, walk.messages[:at], walk.found[: at + 1])
        return point

    def _forms(self, message: Message) -> Iterator[bytes]:
        """The forms under which a message may be known, the surest one first."""
        ids = [call.id for call in message.tool_calls] or _CALL_ID.findall(message.content)
        turns = {id(turn): turn for name in ids if (turn := self._turns.get(name)) is not None}
        if len(turns) == 1 and all(name in self._turns for name in ids):
            (turn,) = turns.values()
            made = turn.message.tool_calls
            if {call.id for call in made} <= set(ids) and (
                not message.tool_calls or {c.id: _same(c) for c in message.tool_calls} == {c.id: _same(c) for c in made}
            ):
                yield _calls_form(made)
        yield _text_form(message)


def _same(call: ToolCall) -> tuple[str, str]:
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments.strip()


def _calls_form(calls: Iterable[ToolCall]) -> bytes:
    return _digest(b"calls", *(call.id for call in calls))


def _text_form(message: Message) -> bytes:
    return _digest(b"text", message.content.strip(), *(part for call in message.tool_calls for part in _same(call)))


def _digest(before: bytes, *parts: str) -> bytes:
    found = hashlib.blake2b(before, digest_size=16)
    for part in parts:
        data = part.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()
