"""`reasoning_gym`: the procedural datasets of the package reasoning-gym, scored by their own `score_answer`.

The policy is asked a question and to put its answer between tags; the content of the last complete pair is scored. With
`turns` above 1 a reply that is not fully right gets feedback, and the policy may try again; the last reply counts.
"""

import dataclasses
import difflib
import importlib
import random
import re
from typing import Any

from sao.envs.protocol import Message, SingleTask, StepResult, belongs, check_integer, check_reward, check_split
from sao.envs.threads import in_thread
from sao.errors import ConfigError, EnvironmentFailure

_DRAWS = 512  # after which a split is taken to be empty
SYSTEM_PROMPT = "Answer the question. Write your final answer as <{tag}>ANSWER</{tag}>."


class ReasoningGym(SingleTask[tuple[Any, dict[str, Any]]]):
    """The environment; see the module. Rewards in [0, 1].

    dataset: name of a reasoning-gym dataset, or a list of names (one is drawn for each task). params: the dataset's
    parameters; with several datasets a table of them by name. tag: of the tags around the answer; "" scores the whole
    reply. system: prompt, `{tag}` is replaced; "": none; default: a sentence that asks for the tags. example: question
    and answer that are shown before. turns: replies at most. exact: reward 1 for a full score and 0 for any other,
    instead of the dataset's partial scores. score_timeout_s: deadline of one draw and of one scoring, seconds.

    Raises `ConfigError` when reasoning-gym is not installed, or a name or parameter is not known to it.
    """

    def __init__(
        self,
        dataset: str | list[str],
        params: dict[str, Any] | None = None,
        *,
        tag: str = "answer",
        system: str | None = None,
        example: dict[str, str] | None = None,
        turns: int = 1,
        exact: bool = False,
        score_timeout_s: float = 10.0,
    ) -> None:
        try:
            self._gym = importlib.import_module("reasoning_gym")
        except ImportError as error:
            need = "'reasoning_gym' needs the package reasoning-gym: pip install 'sao[envs]'"
            raise ConfigError(f"env.name: {need} ({error})") from error
        self._names = [dataset] if isinstance(dataset, str) else list(dataset)
        params = dict(params or {})
        self._params = {self._names[0]: params} if isinstance(dataset, str) else params
        if not re.fullmatch(r"[A-Za-z][\w-]*|", tag):
            raise ConfigError(f"env.args.tag: {tag!r}, expected letters, digits, '_' or '-', or '' for the whole reply")
        if not score_timeout_s > 0:
            raise ConfigError(f"env.args.score_timeout_s: {score_timeout_s!r}, expected a number of seconds > 0")
        if example is not None and set(example) != {"question", "answer"}:
            raise ConfigError(f"env.args.example: keys {sorted(example)}, expected question and answer")
        self._check_datasets()
        self._tag, self._exact, self._limit_s, self._turn = tag, exact, score_timeout_s, 0
        self._turns = check_integer("turns", turns, 1)
        prompt = (SYSTEM_PROMPT if tag else "") if system is None else system
        self._opening: tuple[Message, ...] = (Message("system", prompt.replace("{tag}", tag)),) if prompt else ()
        if example is not None:
            self._opening += (Message("user", example["question"]), Message("assistant", example["answer"]))

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """Draws the question of (seed, split). Raises `EnvironmentFailure`: "reset_error", "timeout", "empty_split"."""
        check_split(seed, split)
        self._task, self._turn = None, 0
        self._task = _, entry = await in_thread(lambda: self._draw(seed, split), self._limit_s, "reset")
        return (*self._opening, Message("user", str(entry["question"])))

    async def step(self, text: str) -> StepResult:
        """Scores a reply. Raises `EnvironmentFailure`: "scorer_error", "timeout", "bad_reward", "not_running"."""
        dataset, entry = self._running()
        self._turn += 1
        answer, reward = extract(text, self._tag), 0.0
        if answer is not None:
            raw = await in_thread(lambda: dataset.score_answer(answer, entry), self._limit_s, "scorer")
            reward = check_reward(raw, self.reward_range)
        if self._turn >= self._turns or reward >= 1.0:
            return self._end(float(reward >= 1.0) if self._exact else reward)
        feedback = f"There is no <{self._tag}> in your reply." if answer is None else "That is not right."
        return StepResult((Message("user", f"{feedback} Try again."),), None, False)

    def _check_datasets(self) -> None:
        known, params = self._gym.factory.DATASETS, self._params
        if not self._names:
            raise ConfigError("env.args.dataset: empty, expected at least one name")
        if wrong := [name for name in params if name not in self._names or not isinstance(params[name], dict)]:
            raise ConfigError(f"env.args.params.{wrong[0]}: expected one table for each of {', '.join(self._names)}")
        for name in self._names:
            if name not in known:
                near = ", ".join(difflib.get_close_matches(name, known, n=3))
                hint = f"near: {near}" if near else f"it has {len(known)} datasets, such as chain_sum"
                raise ConfigError(f"env.args.dataset: {name!r} is unknown to reasoning-gym; {hint}")
            fields = {field.name for field in dataclasses.fields(known[name][1])} - {"seed", "size"}
            if unknown := params.get(name, {}).keys() - fields:
                raise ConfigError(f"env.args.params.{min(unknown)}: {name!r} takes {', '.join(sorted(fields))}")
            try:
                self._create(name, 0)
            except Exception as error:  # its validation raises what it likes, mostly AssertionError
                raise ConfigError(f"env.args.params: {name!r} refuses {params.get(name, {})}: {error}") from error

    def _create(self, name: str, seed: int) -> Any:
        return self._gym.create_dataset(name, seed=seed, size=1, **self._params.get(name, {}))

    def _draw(self, seed: int, split: str) -> tuple[Any, dict[str, Any]]:
        """The splits use disjoint dataset seeds too, beside the division of the questions."""
        rng = random.Random(seed)
        for _ in range(_DRAWS):
            name = rng.choice(self._names)
            dataset = self._create(name, 2 * rng.getrandbits(30) + (split == "eval"))
            entry = dataset[0]
            if belongs(str(entry["question"]), split):
                return dataset, entry
        raise EnvironmentFailure("empty_split", f"no question of split {split!r} in {_DRAWS} draws: too few questions")


def extract(text: str, tag: str) -> str | None:
    """The content of the last complete <tag>...</tag> (tag "": the whole text), stripped; None if it is empty."""
    if not tag:
        return text.strip() or None
    head, close, _ = text.rpartition(f"</{tag}>")
    _, opened, content = head.rpartition(f"<{tag}>")
    return (content.strip() or None) if close and opened else None
