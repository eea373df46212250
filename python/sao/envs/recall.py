"""`recall`: remember what will be asked for, through more observations than a context window holds; over 73 words.

The policy says `next` and sees one observation after another. The first two hold eight facts, `pear=5 wolf=2 ...`: a
value for each of two fruits, animals, tools and towns. Then comes filler, and at the end a question, `ask pear`; the
answer `say 5` earns 1. With the lengths of `examples/compaction/run.toml` the whole is more than four context windows
long, so that everything depends on the summaries that the policy writes on its way.

Writing a summary is a decision here, not a copy: it has room for a quarter of the facts, and only facts of one kind are
ever asked for. No message says which kind; only the reward tells, and the last turn teaches nothing about it. A turn
other than `next` before the question ends the episode with reward 0, so nothing can be carried along in turns.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from sao.envs.protocol import Message, StepResult, check_split
from sao.errors import ConfigError, EnvironmentFailure

KINDS = {
    "fruit": ("pear", "plum"),
    "animal": ("wolf", "bear"),
    "tool": ("saw", "axe"),
    "town": ("rome", "oslo"),
}
KEYS = tuple(key for keys in KINDS.values() for key in keys)
VALUES = tuple("012345")
FILLER = ("rain", "wind", "snow", "fog", "hail", "sun")
WORDS = (
    *("begin", "next", "ask", "say", "sum"),
    *KEYS,
    *VALUES,
    *FILLER,
    *(f"{key}={value}" for key in KEYS for value in VALUES),
)
"""Every word that the environment says or accepts, and `sum`, the example's request for a summary."""

WORDS_PER_OBSERVATION = 4
_EVAL_SHARE = 8  # one task in 8 belongs to the held-out split


@dataclass(frozen=True, slots=True)
class Fact:
    """What is to be remembered of a key."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, slots=True)
class Task:
    """What is shown, in this order, and what is asked."""

    facts: tuple[Fact, ...]
    filler: tuple[str, ...]
    asked: Fact

    @property
    def observations(self) -> tuple[str, ...]:
        """What the policy sees after each `next`; the last one is the question."""
        half = len(self.facts) // 2
        first, second = (" ".join(map(str, facts)) for facts in (self.facts[:half], self.facts[half:]))
        return (first, second, *self.filler, f"ask {self.asked.key}")

    @property
    def answer(self) -> str:
        """The right last turn."""
        return f"say {self.asked.value}"


def draw(seed: int, split: str, filler: int = 17, kind: str = "fruit") -> Task:
    """The task of (seed, split).

    Train and eval are disjoint: a digest of the facts and the question decides where a task belongs, whatever the seed.
    """
    check_split(seed, split)
    rng = random.Random(seed)
    while True:
        facts = tuple(Fact(key, rng.choice(VALUES)) for key in rng.sample(KEYS, len(KEYS)))
        asked = rng.choice([fact for fact in facts if fact.key in KINDS[kind]])
        text = f"{' '.join(map(str, facts))} {asked}"
        held_out = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % _EVAL_SHARE == 0
        if held_out == (split == "eval"):
            lines = tuple(" ".join(rng.choices(FILLER, k=WORDS_PER_OBSERVATION)) for _ in range(filler))
            return Task(facts, lines, asked)


class Recall:
    """The environment; see the module. Reward 0 or 1.

    filler: observations between the last fact and the question, 0 to 1000.
    kind: of the facts that are asked for, "fruit", "animal", "tool" or "town".
    """

    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, filler: int = 17, kind: str = "fruit") -> None:
        if type(filler) is not int or not 0 <= filler <= 1000:
            raise ConfigError(f"env.args.filler: {filler!r}, expected an integer from 0 to 1000")
        if kind not in KINDS:
            raise ConfigError(f"env.args.kind: {kind!r}, expected one of {', '.join(KINDS)}")
        self._filler, self._kind = filler, kind
        self._task: Task | None = None
        self._seen = 0

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """Draws the task of (seed, split)."""
        self._task = draw(seed, split, self._filler, self._kind)
        self._seen = 0
        return (Message("user", "begin"),)

    async def step(self, text: str) -> StepResult:
        """Takes `next`, or `say VALUE` after the question. Raises `EnvironmentFailure("not_running")` otherwise."""
        task = self._task
        if task is None:
            raise EnvironmentFailure("not_running", "step before reset or after the end of the episode")
        said, observations = " ".join(text.split()), task.observations
        asked = self._seen == len(observations)
        if asked or said != "next":
            self._task = None
            return StepResult((), 1.0 if asked and said == task.answer else 0.0, True)
        self._seen += 1
        return StepResult((Message("tool", observations[self._seen - 1]),), None, False)

    async def close(self) -> None:
        """Frees nothing: the environment holds no resource."""
        self._task = None
