"""What of an episode was sampled after each of its segments: the order in time, which credit follows.

Calls of an agent interleave: a side conversation lies between two turns of the main one, and several may be sampled at
once. What can depend on a turn is what was asked for after it had been sampled, and nothing else is its future. Nor are
turns that the agent threw away: of those that were sampled behind the same prompt, the one that it went on from last is
kept, with all that follows from it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn, in the order in which turns were over.

    segment: its number. tokens: that were sampled. asked: turns that were over when it was asked for. prompt: the same
    for turns behind the same prompt. behind: the turn that its conversation goes on from, if any.
    """

    segment: int
    tokens: int
    asked: int
    prompt: bytes
    behind: int | None = None


def after(turns: Sequence[Sampled]) -> tuple[tuple[int, int], ...]:
    """`Trajectory.after`: for each segment the action tokens sampled after its last one, and the segment that goes on.

    That is the one which the first turn of these opens; a turn of a segment that was open already is of a conversation
    that goes on beside this one, and gives it no next segment. Empty when all segments follow each other in order.
    """
    kept, first, last = _kept(turns), dict[int, int](), dict[int, int]()
    for number, turn in enumerate(turns):
        first.setdefault(turn.segment, number)
        last[turn.segment] = number
    tokens = [sum(turn.tokens for turn in turns if turn.segment == segment) for segment in range(len(last))]
    found, in_order = [], []
    for segment in range(len(last)):
        later = [n for n in kept if turns[n].asked > last[segment]]
        opens = min(later, key=lambda n: (turns[n].asked, n), default=None)
        following = -1 if opens is None or first[turns[opens].segment] != opens else turns[opens].segment
        found.append((sum(turns[n].tokens for n in later), following))
        in_order.append((sum(tokens[segment + 1 :]), segment + 1 if segment + 1 < len(tokens) else -1))
    return () if found == in_order else tuple(found)


def _kept(turns: Sequence[Sampled]) -> list[int]:
    """The turns that were not thrown away."""
    newest = list(range(len(turns)))  # turn that follows from each
    for number in reversed(range(len(turns))):
        if (behind := turns[number].behind) is not None:
            newest[behind] = max(newest[behind], newest[number])
    same: dict[bytes, list[int]] = defaultdict(list)
    for number, turn in enumerate(turns):
        same[turn.prompt].append(number)
    chosen = {max(group, key=newest.__getitem__) for group in same.values()}
    kept: set[int] = set()
    for number, turn in enumerate(turns):
        if number in chosen and (turn.behind is None or turn.behind in kept):
            kept.add(number)
    return sorted(kept)
