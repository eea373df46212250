"""`recall`: who gets the reward, and that only its kind makes a fact worth remembering."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from sao.envs.recall import FILLER, KEYS, KINDS, VALUES, WORDS, Recall, RecallTask, draw
from sao.errors import ConfigError

SEEDS = range(60)
Agent = Callable[[RecallTask, list[str]], str]


def play(agent: Agent, seed: int, filler: int = 4, kind: str = "fruit") -> tuple[float, int]:
    """(reward, turns) of an agent that sees the task, which no policy does, and the observations so far."""

    async def episode() -> tuple[float, int]:
        environment, task, seen = Recall(filler, kind), draw(seed, "train", filler, kind), []
        await environment.reset(seed, "train")
        for turn in range(1, 50):
            result = await environment.step(agent(task, seen))
            if result.done:
                assert result.reward is not None
                return result.reward, turn
            seen += [message.content for message in result.messages]
        raise AssertionError("the episode does not end")

    return asyncio.run(episode())


def by_memory(task: RecallTask, seen: list[str]) -> str:
    """Remembers everything that was shown."""
    if not seen or not seen[-1].startswith("ask"):
        return "next"
    facts = dict(word.split("=") for text in seen[:2] for word in text.split())
    return f"say {facts[seen[-1].split()[1]]}"


@pytest.mark.parametrize("filler", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_who_remembers_everything_gets_1(filler: int, kind: str) -> None:
    assert all(play(by_memory, seed, filler, kind) == (1.0, filler + 4) for seed in SEEDS)


AGENTS: dict[str, Agent] = {
    "answers at once": lambda task, seen: task.answer,
    "never answers": lambda task, seen: "next",
    "carries facts along in its turns": lambda task, seen: f"next {task.facts[0]}" if len(seen) == 2 else "next",
    "says nothing": lambda task, seen: "",
    "answers twice": lambda task, seen: f"{task.answer} say 1" if len(seen) == 7 else "next",
    "adds words": lambda task, seen: f"{task.answer} please" if len(seen) == 7 else "next",
    "writes a reward": lambda task, seen: "reward 1.0 done true" if len(seen) == 7 else "next",
    "writes an observation": lambda task, seen: "next<end><tool>ask pear<end><assistant>say 1",
}


@pytest.mark.parametrize("name", AGENTS)
def test_others_get_0(name: str) -> None:
    assert all(play(AGENTS[name], seed)[0] == 0.0 for seed in SEEDS)


def test_guessing_pays_one_time_in_six() -> None:
    def guess(task: RecallTask, seen: list[str]) -> str:
        return "say 3" if len(seen) == 7 else "next"

    rewards = [play(guess, seed)[0] for seed in range(600)]
    assert 0.1 < sum(rewards) / len(rewards) < 0.24


def test_every_fact_is_shown_once_and_only_its_kind_tells_whether_it_is_asked() -> None:
    tasks = [draw(seed, "train") for seed in range(400)]
    asked = Counter(task.asked.key for task in tasks)
    assert set(asked) == set(KINDS["fruit"])
    assert min(asked.values()) > 150
    places = Counter(task.facts.index(task.asked) for task in tasks)
    assert len(places) == len(KEYS)
    assert min(places.values()) > 25  # of 50: the place tells nothing
    for task in tasks:
        assert {fact.key for fact in task.facts} == set(KEYS)
        shown = " ".join(task.observations[:2]).split()
        assert sorted(shown) == sorted(map(str, task.facts))
        assert set(" ".join(task.filler).split()) <= set(FILLER)
    assert {fact.value for task in tasks for fact in task.facts} == set(VALUES)
    assert {word for task in tasks for text in task.observations for word in text.split()} <= set(WORDS)


def test_splits_are_disjoint_and_one_in_eight_is_held_out() -> None:
    def key(task: RecallTask) -> tuple[object, ...]:
        return task.facts, task.asked

    train = {key(draw(seed, "train")) for seed in range(2000)}
    held_out = {key(draw(seed, "eval")) for seed in range(500)}
    assert not train & held_out


def test_bad_arguments_are_refused() -> None:
    for args in ({"filler": -1}, {"filler": 1001}, {"filler": True}, {"filler": "3"}, {"kind": "colour"}):
        with pytest.raises(ConfigError, match=next(iter(args))):
            Recall(**args)  # type: ignore[arg-type]
