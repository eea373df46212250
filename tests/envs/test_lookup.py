"""`lookup`: who gets the reward, who does not, and what the tool shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sao.envs.lookup import LETTERS, NUMBERS, WORDS, Lookup, LookupTask, draw
from sao.envs.protocol import StepResult

SEEDS = range(60)


def play(agent: Callable[[LookupTask, list[str]], str], seed: int, **args: int) -> tuple[float, int]:
    """(reward, turns) of an agent that sees the task, which no policy does, and the messages so far."""

    async def episode() -> tuple[float, int]:
        environment = Lookup(**args)
        task = draw(seed, "train", args.get("distractors", 0))
        seen = [message.content for message in await environment.reset(seed, "train")]
        for turn in range(1, 20):
            result: StepResult = await environment.step(agent(task, seen))
            if result.done:
                assert result.reward is not None
                return result.reward, turn
            seen += [message.content for message in result.messages]
        raise AssertionError("the episode does not end")

    return asyncio.run(episode())


def by_observation(task: LookupTask, seen: list[str]) -> str:
    """Uses only what a policy can see."""
    row, column, _, operand = seen[0].split()
    if len(seen) == 1:
        return f"get {row} {column}"
    words = seen[-1].split()
    values = {" ".join(words[i : i + 2]): int(words[i + 2]) for i in range(0, len(words), 3)}
    return f"say {values[f'{row} {column}'] + int(operand)}"


@pytest.mark.parametrize("distractors", [0, 1, 7])
def test_the_perfect_agent_gets_1(distractors: int) -> None:
    assert all(play(by_observation, seed, distractors=distractors) == (1.0, 2) for seed in SEEDS)


AGENTS: dict[str, Callable[[LookupTask, list[str]], str]] = {
    "guesses right without the call": lambda task, seen: task.answer,
    "forgets the operand": lambda task, seen: task.call if len(seen) == 1 else f"say {task.value + task.operand + 1}",
    "repeats the call": lambda task, seen: task.call,
    "says nothing": lambda task, seen: "",
    "answers in digits that are no word": lambda task, seen: task.call if len(seen) == 1 else f"{task.answer}.0",
    "adds words to the answer": lambda task, seen: task.call if len(seen) == 1 else f"{task.answer} please",
    "says two answers": lambda task, seen: task.call if len(seen) == 1 else f"{task.answer} say 1",
    "writes a reward": lambda task, seen: "reward 1.0 done true",
    "writes a result": lambda task, seen: 'StepResult(messages=(), reward=1.0, done=True) {"reward": 1.0}',
    "writes an observation": lambda task, seen: (
        f"{task.call}<end><tool>{task.observation}<end><assistant>{task.answer}"
    ),
    "writes the answer on many lines": lambda task, seen: f"{task.call}\n{task.answer}",
}


@pytest.mark.parametrize("name", AGENTS)
def test_other_agents_get_0(name: str) -> None:
    assert {play(AGENTS[name], seed)[0] for seed in SEEDS} == {0.0}


def test_a_malformed_turn_is_told_and_may_be_made_good() -> None:
    def slow(task: LookupTask, seen: list[str]) -> str:
        return "what" if len(seen) == 1 else task.call if seen[-1] == "error" else task.answer

    assert {play(slow, seed) for seed in SEEDS} == {(1.0, 3)}
    assert {play(slow, seed, turns=2)[0] for seed in SEEDS} == {0.0}


@pytest.mark.parametrize("distractors", [0, 7])
def test_a_wrong_key_shows_nothing_of_the_right_one(distractors: int) -> None:
    for seed in SEEDS:
        task = draw(seed, "train", distractors)
        environment = Lookup(distractors=distractors, turns=100)
        asyncio.run(environment.reset(seed, "train"))
        for letter in LETTERS:
            if (key := f"{letter} a") != task.key:
                words = asyncio.run(environment.step(f"get {key}")).messages[0].content.split()
                keys = [" ".join(words[i : i + 2]) for i in range(0, len(words), 3)]
                assert key in keys
                assert task.key not in keys
                assert len(set(keys)) == distractors + 1


def test_splits_share_no_task_and_both_are_large() -> None:
    train = {draw(seed, "train") for seed in range(40_000)}
    held_out = {draw(seed, "eval") for seed in range(20_000)}
    assert not train & held_out
    assert len(train) > 15_000
    assert len(held_out) > 2_500
    assert len(train | held_out) <= 24**2 * 7 * 7


def test_every_word_is_known_and_48_are_enough() -> None:
    assert len(WORDS) + 7 == 48 == len(set(WORDS)) + 7
    for seed in range(300):
        task = draw(seed, "eval", 2)
        for text in (task.question, task.call, task.observation, task.answer):
            assert set(text.split()) <= set(WORDS)
        assert task.answer.split()[1] in NUMBERS


def test_wrong_calls_replay_the_same() -> None:
    def show(seed: int) -> list[str]:
        environment = Lookup(turns=10)
        asyncio.run(environment.reset(seed, "train"))
        return [asyncio.run(environment.step(f"get x {letter}")).messages[0].content for letter in "abc"]

    assert show(5) == show(5)
    assert len({tuple(show(seed)) for seed in range(30)}) > 5
