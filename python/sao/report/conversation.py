"""A segment as a conversation: who said which tokens, and what of it is reasoning or a call of a tool.

Messages are not recorded, tokens are. Who speaks is read from the template's markers: a token that is none of the
text's (`<|user|>`), or the word between two of them (`<|im_start|>user`). What the policy sampled is known by the
action mask alone. This is for people to look at; nothing is trained on it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from sao.telemetry.texts import Texts
from sao.trajectory import Segment

_ROLES = "system|developer|user|human|assistant|model|tool|function|observation|environment|ipython|ai"
_WORD = re.compile(rf"(?<![a-z])({_ROLES})(?![a-z])")
_HEADER = 24  # tokens, and characters, between two markers at most

# What is inside of a turn, by its markers; one that is not closed goes to the turn's end.
_PARTS = {
    "reasoning": r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<\|channel\|?>(?:analysis|thought).*?(?:<\|end\|>|<channel\|>|(?=<\|channel)|\Z)",
    "call": r"<tool_call>.*?(?:</tool_call>|\Z)|\[TOOL_CALLS\].*?\Z|<\|tool_call>.*?(?:<tool_call\|>|\Z)"
    r"|<\|python_tag\|>.*?\Z|<function=.*?(?:</function>|\Z)",
}
_PART = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PARTS.items()), re.DOTALL)
_OPENED = re.compile(r"\A(?:(?!<think(?:ing)?>).)*?</think(?:ing)?>", re.DOTALL)  # by the prompt, before the turn


class Block(NamedTuple):
    """Tokens `start` to `stop` of a segment, which one side said. role: "" where no marker tells it.

    part: "text", "reasoning" or "call"; "header" for what only opens the turn that follows. sampled: by the policy.
    """

    role: str
    part: str
    sampled: bool
    start: int
    stop: int


def blocks(segment: Segment, texts: Texts, pieces: list[str]) -> list[Block]:
    """The blocks of a segment, in order, without a gap. pieces: the text of each of its tokens."""
    found: list[Block] = []
    mask, at = segment.action_mask, 0
    while at < segment.n_tokens:
        end = at + 1
        while end < segment.n_tokens and mask[end] == mask[at]:
            end += 1
        found += _sampled(pieces, at, end) if mask[at] else _given(segment, texts, pieces, at, end)
        at = end
    return found


def _sampled(pieces: list[str], start: int, stop: int) -> Iterator[Block]:
    text, ends = "".join(pieces[start:stop]), list(accumulate(map(len, pieces[start:stop])))
    marks = [("reasoning", *match.span())] if (match := _OPENED.match(text)) else []
    begin = marks[0][2] if marks else 0
    marks += [(str(match.lastgroup), *match.span()) for match in _PART.finditer(text, begin)]
    part_of = ["text"] * (stop - start)
    for part, first, last in marks:
        inside = range(bisect_right(ends, first), min(bisect_left(ends, last) + 1, len(ends)))
        part_of[inside.start : inside.stop] = [part] * len(inside)
    at = 0
    for index in range(1, stop - start + 1):
        if index == stop - start or part_of[index] != part_of[at]:
            yield Block("assistant", part_of[at], True, start + at, start + index)
            at = index


def _given(segment: Segment, texts: Texts, pieces: list[str], start: int, stop: int) -> Iterator[Block]:
    ids = segment.token_ids[start:stop].tolist()
    markers = [index for index, token in enumerate(ids) if token in texts.special]
    turns: list[tuple[int, str]] = []
    for place, index in enumerate(markers):
        word = _WORD.search(texts.special[ids[index]].lower())
        if word is None:
            after = markers[place + 1] if place + 1 < len(markers) else len(ids)
            header = "".join(pieces[start + index + 1 : start + min(after, index + 1 + _HEADER)]).lower()
            line = header.lstrip().partition("\n")[0]
            word = _WORD.match(line) if len(line) < _HEADER else None
        if word is not None:
            turns.append((index, word[1]))
    if not turns or "".join(pieces[start : start + turns[0][0]]).strip():
        turns.insert(0, (0, ""))
    turns[0] = 0, turns[0][1]  # with the blanks before it
    ends = [*(index for index, _ in turns[1:]), len(ids)]
    for (index, role), end in zip(turns, ends, strict=True):
        said = "".join(pieces[start + at] for at in range(index, end) if ids[at] not in texts.special).lower()
        opens = end == len(ids) and stop < segment.n_tokens and bool(role) and said.replace(role, "", 1).strip() == ""
        yield Block(role, "header" if opens else "text", False, start + index, start + end)
