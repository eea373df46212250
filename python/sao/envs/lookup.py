"""`lookup`: a two-turn tool-use task for a tiny model, over 48 words.

The user asks `c f plus 4`. The value at `c f` is known to the tool only: the policy has to call `get c f`, read the
value in the observation `c f 5`, and answer `say 9`. The reward is 1 if the answer is right and its key was fetched,
else 0: a guess without the call earns nothing.

A turn that is neither a call nor an answer gets the observation `error` and counts as a turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from sao.envs.protocol import Message, SingleTask, StepResult, belongs, check_integer, check_split

LETTERS = tuple("abcdefghijklmnopqrstuvwx")
NUMBERS = tuple(str(number) for number in range(13))
WORDS = ("get", "say", "plus", "error", *NUMBERS, *LETTERS)
"""Every word that the environment writes or accepts; with 7 special tokens a vocabulary of 48."""

_VALUES = 7  # values and operands are 0 to 6, so that a sum is one word


@dataclass(frozen=True, slots=True)
class LookupTask:
    """One question and what the tool knows.

    rows: the pairs (key, value) that the tool shows when asked for `key`: its own and those of distractors, shuffled.
    question, call, observation, answer: the messages of a perfect episode.
    """

    key: str
    operand: int
    value: int
    rows: tuple[tuple[str, int], ...]
    question = property(lambda task: f"{task.key} plus {task.operand}")
    call = property(lambda task: f"get {task.key}")
    observation = property(lambda task: _show(task.rows))
    answer = property(lambda task: f"say {task.value + task.operand}")


def draw(seed: int, split: str, distractors: int = 0) -> LookupTask:
    """The task of (seed, split); 28,224 tasks without distractors."""
    check_split(seed, split)
    rng = random.Random(seed)
    while True:
        rows = _rows(rng, distractors + 1)
        (key, value), operand = rows[0], rng.randrange(_VALUES)
        rng.shuffle(rows)
        task = LookupTask(key, operand, value, tuple(rows))
        if belongs(f"{task.question} {task.observation}", split):
            return task


def _rows(rng: random.Random, count: int, *first: str, never: str = "") -> list[tuple[str, int]]:
    """Distinct keys, the first given or drawn, with their values."""
    keys = [*first]
    while len(keys) < count:
        key = f"{rng.choice(LETTERS)} {rng.choice(LETTERS)}"
        if key not in keys and key != never:
            keys.append(key)
    return [(key, rng.randrange(_VALUES)) for key in keys]


def _show(rows: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{key} {value}" for key, value in rows)


class Lookup(SingleTask[LookupTask]):
    """The environment; see the module. Reward 0 or 1.

    distractors: rows of other keys in an observation, 0 to 7.
    turns: policy turns after which the episode ends with reward 0, at least 2.
    """

    def __init__(self, distractors: int = 0, turns: int = 3) -> None:
        self._distractors = check_integer("distractors", distractors, 0, 7)
        self._turns = check_integer("turns", turns, 2)
        self._rng, self._turn, self._fetched = random.Random(), 0, False

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        self._task = draw(seed, split, self._distractors)
        # What a wrong call shows is part of the task, so replays agree.
        self._rng, self._turn, self._fetched = random.Random(seed), 0, False
        return (Message("user", self._task.question),)

    async def step(self, text: str) -> StepResult:
        """Takes `get KEY` or `say NUMBER`. Raises `EnvironmentFailure("not_running")` before reset or after the end."""
        task = self._running()
        self._turn += 1
        match text.split():
            case ["say", number] if number in NUMBERS:
                return self._end(1.0 if self._fetched and f"say {number}" == task.answer else 0.0)
            case ["get", row, column] if f"{row} {column}" == task.key:
                self._fetched, observation = True, task.observation
            case ["get", row, column] if row in LETTERS and column in LETTERS:  # it must not reveal the right value
                rows = _rows(self._rng, self._distractors + 1, f"{row} {column}", never=task.key)
                self._rng.shuffle(rows)
                observation = _show(rows)
            case _:
                observation = "error"
        if self._turn >= self._turns:
            return self._end(0.0)
        return StepResult((Message("tool", observation),), None, False)
