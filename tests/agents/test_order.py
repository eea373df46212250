"""What was sampled after each segment of an agent's episode: by hand, and through the endpoint."""

from __future__ import annotations

from pathlib import Path

from agents.test_agents import END, Scripted, ask, ours, played, says, user
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine

from sao.agents.order import Sampled, after
from sao.envs.agent import Access


def turns(*given: tuple[int, int, int | None] | tuple[int, int, int | None, int | str]) -> list[Sampled]:
    """Of (segment, tokens, behind[, prompt]); each is asked for when the one before is over."""
    return [Sampled(s, n, i, str(*(rest or [f"p{i}"])).encode(), b) for i, (s, n, b, *rest) in enumerate(given)]


def test_a_side_call_between_two_turns_of_the_main_conversation() -> None:
    assert after(turns((0, 5, None), (1, 100, None), (0, 5, 0))) == ((0, -1), (5, -1))


def test_segments_in_order_need_no_note() -> None:
    assert after(turns((0, 5, None), (0, 5, 0))) == ()
    assert after(turns((0, 5, None), (1, 7, None), (1, 2, 1), (2, 3, None))) == ()  # a conversation that is summarised


def test_a_retry_that_was_thrown_away_is_no_future() -> None:
    # A first turn, the second one twice behind the same prompt, and the answer behind the newer of both.
    found = turns((0, 4, None), (1, 10, None, "same"), (2, 20, None, "same"), (2, 3, 2))
    assert after(found) == ((23, 2), (23, 2), (0, -1))
    # The older one is gone on from: the newer one is thrown away, with what follows from it.
    found = turns((0, 4, None), (1, 10, None, "same"), (2, 20, None, "same"), (2, 6, 2), (1, 3, 1))
    assert after(found) == ((13, 1), (0, -1), (3, -1))


def test_calls_at_once_are_not_each_others_future() -> None:
    found = [Sampled(0, 4, 0, b"a"), Sampled(1, 10, 1, b"b"), Sampled(2, 20, 1, b"c"), Sampled(0, 3, 3, b"d", 0)]
    assert after(found) == ((0, -1), (3, -1), (3, -1))


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
def test_one_conversation_after_another_is_in_order(drawn: list[tuple[int, bool]]) -> None:
    segment, found = 0, []
    for number, (tokens, new) in enumerate(drawn):
        segment += bool(found) and new
        found.append(Sampled(segment, tokens, number, str(number).encode(), None if new or not number else number - 1))
    assert after(found) == ()


def test_the_endpoint_notes_it(tiny_model: Path) -> None:
    async def script(access: Access, post: object) -> float:
        first = await ask(post, user("a b"))
        await ask(post, user("d"))
        await ask(post, user("e"))
        await ask(post, user("a b"), ours(first), user("c"))
        await ask(post, user("a b"), ours(first), user("c"))  # again: the last one counts
        return 1.0

    trajectory = played(tiny_model, Scripted(script), ScriptedEngine(says(20, 21, END)))
    assert [segment.n_actions for segment in trajectory.segments] == [6, 3, 3, 3]
    assert trajectory.after == ((3, 3), (6, 2), (3, 3), (0, -1))


def test_the_endpoint_notes_nothing_where_segments_are_in_order(tiny_model: Path) -> None:
    async def script(access: Access, post: object) -> float:
        first = await ask(post, user("a b"))
        await ask(post, user("a b"), ours(first), user("c"))
        await ask(post, user("what was said: d"))
        return 1.0

    assert played(tiny_model, Scripted(script), ScriptedEngine(says(20, 21, END))).after == ()
