"""`recall`: remember what will be asked for, through more observations than a context window holds; over 73 words.

The policy says `next` and sees one observation after another. The first two hold eight facts, `pear=5 wolf=2 ...`: a
value for each of two fruits, animals, tools and towns. Then comes filler, and at the end a question, `ask pear`; the
answer `say 5` earns 1. In `examples/compaction/run.toml` the whole is more than four context windows long.

Writing a summary is a decision here, not a copy: it has room for a quarter of the facts, and only facts of one kind are
ever asked for; only the reward tells which. A turn other than `next` before the question ends the episode with reward
0, so nothing can be carried along in turns.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

from sao.envs.protocol import Message, SingleTask, StepResult, belongs, check_choice, check_integer, check_split

KINDS = {"fruit": ("pear", "plum"), "animal": ("wolf", "bear"), "tool": ("saw", "axe"), "town": ("rome", "oslo")}
KEYS = tuple(key for keys in KINDS.values() for key in keys)
VALUES = tuple("012345")
FILLER = ("rain", "wind", "snow", "fog", "hail", "sun")
_PAIRS = tuple(f"{key}={value}" for key in KEYS for value in VALUES)
WORDS = ("begin", "next", "ask", "say", "sum", *KEYS, *VALUES, *FILLER, *_PAIRS)
"""Every word that the environment writes or accepts, and `sum`, the example's request for a summary."""

WORDS_PER_OBSERVATION = 4


class Fact(NamedTuple):
    """A key and the value to be remembered of it."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, slots=True)
class RecallTask:
    """Facts and filler, in the order in which they are shown, and the fact that is asked for."""

    facts: tuple[Fact, ...]
    filler: tuple[str, ...]
    asked: Fact

    @property
    def observations(self) -> tuple[str, ...]:
        """The observation after each `next`; the last one is the question."""
        half, words = len(self.facts) // 2, [str(fact) for fact in self.facts]
        return (" ".join(words[:half]), " ".join(words[half:]), *self.filler, f"ask {self.asked.key}")

    @property
    def answer(self) -> str:
        """The right last turn."""
        return f"say {self.asked.value}"


def draw(seed: int, split: str, filler: int = 17, kind: str = "fruit") -> RecallTask:
    """The task of (seed, split)."""
    check_split(seed, split)
    rng = random.Random(seed)
    while True:
        facts = tuple(Fact(key, rng.choice(VALUES)) for key in rng.sample(KEYS, len(KEYS)))
        asked = rng.choice([fact for fact in facts if fact.key in KINDS[kind]])
        if belongs(f"{' '.join(map(str, facts))} {asked}", split):
            lines = tuple(" ".join(rng.choices(FILLER, k=WORDS_PER_OBSERVATION)) for _ in range(filler))
            return RecallTask(facts, lines, asked)


class Recall(SingleTask[RecallTask]):
    """The environment; see the module. Reward 0 or 1.

    filler: observations between the last fact and the question, 0 to 1000.
    kind: of the facts that are asked for, "fruit", "animal", "tool" or "town".
    """

    def __init__(self, filler: int = 17, kind: str = "fruit") -> None:
        self._filler = check_integer("filler", filler, 0, 1000)
        self._kind = check_choice("kind", kind, KINDS)
        self._seen = 0

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        self._task, self._seen = draw(seed, split, self._filler, self._kind), 0
        return (Message("user", "begin"),)

    async def step(self, text: str) -> StepResult:
        """Takes `next`, or `say VALUE` after the question. Raises `EnvironmentFailure("not_running")` otherwise."""
        task = self._running()
        turn, observations = " ".join(text.split()), task.observations
        asked = self._seen == len(observations)
        if asked or turn != "next":
            return self._end(1.0 if asked and turn == task.answer else 0.0)
        self._seen += 1
        return StepResult((Message("tool", observations[self._seen - 1]),), None, False)
