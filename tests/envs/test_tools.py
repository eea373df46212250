"""Environments with tools: schemas and checks of functions, results in order, whole steps over a compaction."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from agents.tool_agents import Recording as Engine
from agents.tool_agents import call_text, check_books, configuration, sampled
from rollout.families import folder, templates
from scripted import Reply

from sao.envs import registry
from sao.envs.protocol import Message, StepResult, ToolCall, check_step, check_tools
from sao.envs.tools import Tools
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.chat import Renderer
from sao.rollout.episode import run_episode
from sao.rollout.recorder import Assignment, Recorder
from sao.trajectory import Trajectory

needs_trl = pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")


def look(city: str, days: int = 1) -> str:
    """The weather in a city.

    More about it, which no model has to know.
    """
    return f"{20 + days} degrees in {city}"


async def total(numbers: list[float]) -> float:
    """The sum of numbers."""
    if len(numbers) > 3:
        raise EnvironmentFailure("too_many", f"{len(numbers)} numbers")
    return sum(numbers) / (len(numbers) > 0)


class Weather:
    """Asks for the weather; the answer must hold it."""

    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self) -> None:
        self._tools = Tools(look, total)
        self.tools = self._tools.schemas
        self.turns: list[Message] = []

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        return (Message("user", "How warm is it in Bern?"),)

    async def act(self, turn: Message) -> StepResult:
        self.turns.append(turn)
        if not turn.tool_calls:
            return StepResult((), float("21" in turn.content), True)
        return StepResult(await self._tools.results(turn), None, False)

    async def close(self) -> None: ...


def parses(text: str) -> str:
    """As a function that was a program."""
    raise SystemExit(2)


def _positional(x: int, /) -> int:
    return x


def undefined(x: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    return ""


def test_a_function_that_leaves_the_process_or_blocks_is_the_calls_own_matter() -> None:
    blocked = threading.Event()

    def blocks() -> str:
        blocked.wait(60)
        return "late"

    async def main() -> list[str]:
        tools = Tools(parses, blocks)
        turn = Message("assistant", "", (ToolCall("parses", '{"text": "x"}', "a"),))
        (result,) = await tools.results(turn)
        waiting = asyncio.create_task(tools.results(Message("assistant", "", (ToolCall("blocks", "{}", "b"),))))
        await asyncio.sleep(0.05)  # the loop goes on
        assert not waiting.done()
        blocked.set()
        return [result.content, (await waiting)[0].content]

    assert asyncio.run(main()) == ["error: SystemExit: 2", "late"]


@pytest.mark.parametrize("function", [undefined, _positional, lambda *x: x], ids=["undefined", "positional", "star"])
def test_functions_that_no_call_can_name_arguments_of_are_refused(function: Any) -> None:
    function.__name__ = "f"
    with pytest.raises(ConfigError, match="tools: f: no schema of its parameters"):
        Tools(function)


def test_functions_become_schemas_and_calls_are_checked() -> None:
    tools = Tools(look, total)
    first, second = json.loads(tools.schemas)
    assert first["function"]["description"] == "The weather in a city."
    assert first["function"]["parameters"]["required"] == ["city"]
    assert second["function"]["parameters"]["properties"]["numbers"]["items"] == {"type": "number"}
    calls = [
        ToolCall("look", '{"city": "Bern"}', "a"),
        ToolCall("look", '{"city": "Bern", "days": "soon"}', "b"),
        ToolCall("nothing", "{}", "c"),
        ToolCall("total", '{"numbers": [1, 2]}', "d"),
        ToolCall("total", '{"numbers": []}', "e"),
        ToolCall("look", '{"town": "Bern"}', "f"),
        ToolCall("look", "[1]", "g"),
    ]
    found = asyncio.run(tools.results(Message("assistant", "", tuple(calls))))
    assert [message.tool_call_id for message in found] == list("abcdefg")
    assert [message.content for message in found[:1]] == ["21 degrees in Bern"] and found[3].content == "3.0"
    assert all(found[at].content.startswith("error: ") for at in (1, 2, 4, 5, 6))
    assert "look, total" in found[2].content and "days" in found[1].content
    with pytest.raises(EnvironmentFailure, match="4 numbers"):
        asyncio.run(tools.results(Message("assistant", "", (ToolCall("total", '{"numbers": [1, 2, 3, 4]}'),))))


def test_a_result_that_cannot_be_written_is_an_error_that_the_policy_sees() -> None:
    def circle() -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    (result,) = asyncio.run(Tools(circle).results(Message("assistant", "", (ToolCall("circle"),))))
    assert result.content.startswith("error: ValueError")


def test_half_of_a_character_in_a_result_does_not_fail_the_episode() -> None:
    def echo(x: str) -> str:
        return x

    calls = (ToolCall("echo", '{"x": "a\\ud800"}', "call00000"), ToolCall("no\ud800", "{}", "call00001"))
    results = asyncio.run(Tools(echo).results(Message("assistant", "", calls)))
    assert results[0].content == "a?" and "there is no tool" in results[1].content
    check_step(StepResult(results, None, False), (0.0, 1.0), calls)


@pytest.mark.parametrize("functions", [(look, look), (lambda: 1,), (3,)])
def test_what_is_no_tool_is_refused(functions: Any) -> None:
    with pytest.raises(ConfigError, match="tools: "):
        Tools(*functions)


@pytest.mark.parametrize("tools", ["", "{}", "[1]", '[{"type": "function"}]', None, [], '["\\ud800"]'])
def test_schemas_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="expected a JSON list of function schemas"):
        check_tools(tools)


def test_results_belong_to_the_calls_in_their_order() -> None:
    calls = (ToolCall("a", "{}", "1"), ToolCall("b", "{}", "2"))
    one, two = Message("tool", "x", (), "1"), Message("tool", "y", (), "2")
    more = Message("user", "and then?")
    assert check_step(StepResult((one, two, more), None, False), (0, 1), calls).messages == (one, two, more)
    for wrong in ((one,), (two, one), (more, one, two), (one, two, two)):
        with pytest.raises(EnvironmentFailure, match="in this order and first"):
            check_step(StepResult(wrong, None, False), (0, 1), calls)
    assert check_step(StepResult((), 1.0, True), (0, 1), calls).done  # the end needs no results


def played(path: Path, env: Any, turns: list[list[int]], **sections: Any) -> tuple[Trajectory, Engine]:
    engine = Engine(lambda request, number: Reply(turns[number]))
    config = configuration(path).model_copy(update=sections)
    recorder = Recorder(engine, Renderer(path), config, Assignment(0, 0, 1, "train"), 3)
    return asyncio.run(run_episode(recorder, env)), engine


@needs_trl
@pytest.mark.parametrize("family", ["qwen3", "gptoss", "llama3_2"])
def test_an_episode_with_tools(tmp_path: Path, family: str) -> None:
    renderer = Renderer(folder(tmp_path, family))
    calls = [call_text(renderer, ("look", {"city": "Bern", "days": days})) for days in (2, 1)]
    turns = [sampled(renderer, text) for text in (*calls, "It is 21.")]
    env = registry.make("envs.test_tools:Weather")
    trajectory, engine = played(tmp_path, env, turns)
    assert trajectory.reward == 1.0 and len(trajectory.segments) == 1
    assert [call.id for turn in env.turns for call in turn.tool_calls] == ["call00000", "call00001"]  # type: ignore[attr-defined]
    text = renderer._decode(trajectory.segments[0].token_ids)
    assert "22 degrees in Bern" in text and "21 degrees in Bern" in text and "The weather in a city." in text
    check_books(trajectory, engine)


@needs_trl
def test_a_model_whose_template_knows_no_tools_is_refused(tiny_model: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="knows no tools"):
        played(tiny_model, Weather(), [[2]])
