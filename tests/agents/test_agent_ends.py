"""How an agent's episode ends: limits truncate it, failures are no rewards, and a fault of the engine is never lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agents.test_agents import END, Post, Scripted, ask, played, user
from scripted import Reply, ScriptedEngine

from sao.engines.base import Request
from sao.envs.agent import Access
from sao.errors import EngineError, EnvironmentFailure
from sao.rollout.chat import Renderer


def test_limits_end_an_episode_as_truncated(tiny_model: Path) -> None:
    async def greedy(access: Access, post: Post) -> None:
        for number in range(9):
            status, body = await post("/v1/chat/completions", {"messages": [user("a")]})
            assert status == (200 if number < 6 else 400), body
        assert body["error"]["code"] == "max_turns"
        raise EnvironmentFailure("agent_exit", "it gives up")

    trajectory = played(tiny_model, Scripted(greedy))
    assert (trajectory.termination.reason, trajectory.reward, trajectory.n_actions) == ("max_turns", 0.0, 18)

    async def wordy(access: Access, post: Post) -> float:
        await ask(post, user("a"))
        status, body = await post("/v1/chat/completions", {"messages": [user("a " * 80)]})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        return 0.25

    trajectory = played(tiny_model, Scripted(wordy))
    assert (trajectory.termination.reason, trajectory.reward) == ("context", 0.25)

    async def slow(access: Access, post: Post) -> float:
        await ask(post, user("a"))
        await asyncio.sleep(60)
        return 1.0

    trajectory = played(tiny_model, Scripted(slow), env={"episode_timeout_s": 0.5})
    assert (trajectory.termination.kind, trajectory.termination.reason) == ("truncated", "time_limit")


def test_an_agent_cut_by_a_limit_is_graded_by_its_environment(tiny_model: Path) -> None:
    class Graded(Scripted):
        async def grade(self) -> float:
            return 0.75

    async def slow(access: Access, post: Post) -> None:
        await ask(post, user("a"))
        await asyncio.sleep(60)

    cut = {"episode_timeout_s": 0.5}
    trajectory = played(tiny_model, Graded(slow), env=cut)
    assert (trajectory.termination.reason, trajectory.reward) == ("time_limit", 0.75)
    with pytest.raises(EnvironmentFailure, match="time_limit: not done within"):
        played(tiny_model, Graded(slow), env={**cut, "at_time_limit": "drop"})


async def nothing(access: Access, post: Post) -> None: ...


async def one_call(access: Access, post: Post) -> None:
    await ask(post, user("a"))


async def too_much(access: Access, post: Post) -> float:
    await ask(post, user("a"))
    return 3.0


async def crash(access: Access, post: Post) -> float:
    raise ZeroDivisionError("oh")


@pytest.mark.parametrize(
    ("script", "reason"),
    [(nothing, "no_turn"), (one_call, "no_reward"), (too_much, "bad_reward"), (crash, "agent_error")],
)
def test_failures_are_no_rewards(tiny_model: Path, script: Any, reason: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        played(tiny_model, Scripted(script))
    assert caught.value.reason == reason


def test_an_engine_that_fails_fails_the_episode(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        status, body = await post("/v1/chat/completions", {"messages": [user("a")]})
        assert status == 503 and body["error"]["type"] == "server_error"
        return 1.0

    with pytest.raises(EngineError, match="no_token_capture"):
        played(tiny_model, Scripted(script), ScriptedEngine(lambda *_: Reply([20, END], [-1.0])))


@pytest.mark.parametrize("then", ["hangs", "raises"])
def test_a_fault_of_the_engine_is_what_fails_the_episode_whatever_the_agent_does(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("sao.agents.host.GRACE_S", 0.3)

    async def script(access: Access, post: Post) -> float:
        await ask(post, user("a"))
        assert (await post("/v1/chat/completions", {"messages": [user("b")]}))[0] == 503
        assert (await post("/v1/chat/completions", {"messages": [user("c")]}))[0] == 401
        if then == "raises":
            raise EnvironmentFailure("agent_exit", "it gives up")
        await asyncio.sleep(60)
        return 1.0

    def fails(request: Request, number: int) -> Reply:
        return Reply([20, END], None if number != 1 else [float("nan")] * 2)

    with pytest.raises(EngineError, match="bad_logprob"):
        played(tiny_model, Scripted(script), ScriptedEngine(fails), env={"episode_timeout_s": 20.0})


def test_a_fault_of_the_engine_is_not_lost_when_time_is_over(tiny_model: Path) -> None:
    async def script(access: Access, post: Post) -> float:
        await ask(post, user("a"))
        assert (await post("/v1/chat/completions", {"messages": [user("b")]}))[0] == 503
        await asyncio.sleep(60)
        return 1.0

    engine = ScriptedEngine(lambda _, number: Reply([20, END], error=EngineError("boom") if number else None))
    with pytest.raises(EngineError, match="boom"):
        played(tiny_model, Scripted(script), engine, env={"episode_timeout_s": 0.5})


def test_a_call_that_fails_before_it_is_sampled_is_no_turn(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Renderer.conversation

    def fails(self: Renderer, messages: Any, tools: str = "") -> Any:
        if messages[-1].content == "b":
            raise ZeroDivisionError("a fault of ours")
        return encode(self, messages)

    monkeypatch.setattr(Renderer, "conversation", fails)

    async def script(access: Access, post: Post) -> float:
        for _ in range(3):
            status, body = await post("/v1/chat/completions", {"messages": [user("b")]})
            assert (status, body["error"]["type"]) == (500, "server_error")
        await ask(post, user("a"))
        return 1.0

    assert played(tiny_model, Scripted(script), env={"max_turns": 1}).termination.kind == "finished"
