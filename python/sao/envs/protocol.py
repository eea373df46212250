"""The contract of environments: `reset` gives the first messages, `step` takes the policy's text, `close` ends it.

An environment fails by raising `EnvironmentFailure(reason, detail)`. A failure is never a reward: the episode is left
out of training and counted under its reason. The grader sees the policy's text only as text, so nothing a policy writes
can set a reward.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from sao.errors import ConfigError, EnvironmentFailure

T = TypeVar("T")

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "eval"]
_EVAL_SHARE = 8  # one task in 8 belongs to the held-out split


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: a JSON object, as text. id: what its result refers to; may be empty."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    tool_calls, reasoning: of an assistant turn, apart from its content. tool_call_id, name: of a tool's result.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The form that `tokenizer.apply_chat_template` takes: what is empty is left out, arguments are objects, and
        reasoning has each of the three names under which templates look for it."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _json_or_text(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.reasoning:
            found |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), self.reasoning)
        return found | {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key))}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. messages: the observations that follow the policy's turn; empty when `done`.

    reward: the episode's reward when `done`; before that, an optional reward of this turn alone (None: no reward).
    """

    messages: tuple[Message, ...]
    reward: float | None
    done: bool


@runtime_checkable
class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until `done`, then perhaps `reset` again; `close` exactly once.

    The same (seed, split) gives the same task, in every process; no task is in both splits. A call that cannot do its
    work raises `EnvironmentFailure`. The caller bounds every call by a deadline and may cancel it.
    """

    reward_range: tuple[float, float]
    """Smallest and largest reward, inclusive. A reward outside is a failure of the grader."""
    replayable: bool
    """Whether a lost episode may be played again with the same seed and answers (false: it has effects outside)."""

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """Starts the task of (seed >= 0, split "train" or "eval"); returns the first messages, at least one."""

    async def step(self, text: str) -> StepResult:
        """Takes the policy's turn as text, without the stop token."""

    async def close(self) -> None:
        """Frees what the environment holds; called once, also after a failure or a cancelled call."""


@runtime_checkable
class ToolEnvironment(Protocol):
    """An environment with tools: as `Environment`, but it takes the policy's turn as it was read.

    Each call of a turn has an id. A result that is not `done` begins with the results of the turn's calls, messages of
    role `tool` with these ids in this order (`sao.envs.tools.Tools` makes them), other messages behind.
    """

    reward_range: tuple[float, float]
    replayable: bool
    tools: str
    """A JSON list of function schemas, as the OpenAI API has them; read once, behind `reset`."""

    async def reset(self, seed: int, split: str) -> tuple[Message, ...]:
        """See `Environment`."""

    async def act(self, turn: Message) -> StepResult:
        """Takes the policy's turn: content, reasoning and calls. A call that could not be read is in the content."""

    async def close(self) -> None:
        """See `Environment`."""


@runtime_checkable
class Grader(Protocol):
    """An environment that can score an episode which a limit has ended: what was reached by then counts."""

    async def grade(self) -> float:
        """The reward as things stand, in range; called at most once, between `step` and `close`."""


class SingleTask(Generic[T]):
    """The common part of environments that hold nothing but the task that is played: rewards in [0, 1], replayable."""

    reward_range = (0.0, 1.0)
    replayable = True
    _task: T | None = None

    def _running(self) -> T:
        """The task that is played. Raises `EnvironmentFailure("not_running")` when there is none."""
        if self._task is None:
            raise EnvironmentFailure("not_running", "step before reset or after the end of the episode")
        return self._task

    def _end(self, reward: float) -> StepResult:
        """Ends the episode with this reward."""
        self._task = None
        return StepResult((), reward, True)

    async def close(self) -> None:
        """Forgets the task."""
        self._task = None


def check_integer(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """The argument of an environment. Raises `ConfigError` unless it is an integer (no truth value) in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        expected = f">= {low}" if high == math.inf else f"from {low} to {high}"
        raise ConfigError(f"env.args.{name}: {value!r}, expected an integer {expected}")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """The argument of an environment. Raises `ConfigError` unless it is one of the choices."""
    if value not in choices:
        raise ConfigError(f"env.args.{name}: {value!r}, expected one of {', '.join(choices)}")
    return str(value)


def check_range(value: Any) -> tuple[float, float]:
    """The argument `reward_range`. Raises `ConfigError` unless it is two finite numbers."""
    try:
        low, high = value
        right = all(type(one) in (int, float) and math.isfinite(one) for one in (low, high))
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ConfigError(f"env.args.reward_range: {value!r}, expected two numbers")
    return float(low), float(high)


def belongs(text: str, split: str) -> bool:
    """Whether the task of this text belongs to the split. A digest of the text decides, so no task is in both splits,
    whatever the seeds; one in 8 is held out."""
    held_out = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % _EVAL_SHARE == 0
    return held_out == (split == "eval")


def check_split(seed: int, split: str) -> None:
    """Raises `EnvironmentFailure("bad_task")` unless seed >= 0 and split is "train" or "eval"."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise EnvironmentFailure("bad_task", f"seed: {seed!r}, expected an integer >= 0")
    if split not in get_args(Split):
        raise EnvironmentFailure("bad_task", f"split: {split!r}, expected 'train' or 'eval'")


def check_reward(reward: Any, reward_range: tuple[float, float]) -> float:
    """The reward as a float. Raises `EnvironmentFailure("bad_reward")` unless it is a finite number in range."""
    low, high = reward_range
    try:
        value: Any = float(reward) if isinstance(reward, Real) else reward
    except OverflowError:  # an integer beyond all floats
        value = math.inf
    if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high:
        raise EnvironmentFailure("bad_reward", f"reward: {value!r}, expected a number in [{low}, {high}]")
    return value


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: what Python decodes with `surrogateescape`, and some JSON, cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def as_unicode(text: str) -> str:
    """The same text, with a question mark for each half of a surrogate pair."""
    return text if is_unicode(text) else text.encode(errors="replace").decode()


def _texts(message: Message) -> list[Any]:
    calls = message.tool_calls if isinstance(message.tool_calls, tuple) else (None,)
    parts = [message.content, message.tool_call_id, message.name, message.reasoning]
    return parts + [getattr(call, name, None) for call in calls for name in ("name", "arguments", "id")]


def check_messages(messages: Any, what: str) -> tuple[Message, ...]:
    """The messages as a tuple. Raises `EnvironmentFailure("bad_messages")` unless they are at least one `Message`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise EnvironmentFailure("bad_messages", f"{what}: {messages!r}, expected at least one Message")
    for index, message in enumerate(messages):
        known = isinstance(message, Message) and message.role in get_args(Role)
        if not known or not all(isinstance(text, str) and is_unicode(text) for text in _texts(message)):
            expected = f"a Message of role {', '.join(get_args(Role))}, all in it text without half surrogate pairs"
            raise EnvironmentFailure("bad_messages", f"{what}[{index}]: {message!r:.300}, expected {expected}")
    return tuple(messages)


def check_tools(tools: Any) -> str:
    """The schemas of an environment's tools. Raises `EnvironmentFailure("bad_tools")` unless they are a JSON list of
    functions with names.
    """
    try:
        found = json.loads(tools) if isinstance(tools, str) else None
        named = [one["function"]["name"] for one in found or () if one["type"] == "function"]
    except (ValueError, TypeError, KeyError):
        found, named = None, []
    if not isinstance(found, list) or len(named) != len(found) or not is_unicode(tools):
        raise EnvironmentFailure("bad_tools", f"tools: {tools!r:.300}, expected a JSON list of function schemas")
    return tools if found else ""


def check_step(result: Any, reward_range: tuple[float, float], calls: Sequence[ToolCall] | None = None) -> StepResult:
    """A step's result, checked: reward present when done and in range always, messages present unless done, first of
    them the results of `calls`, if these are given.

    Raises `EnvironmentFailure` with reason "bad_result", "bad_reward" or "bad_messages".
    """
    if not isinstance(result, StepResult) or not isinstance(result.done, bool):
        raise EnvironmentFailure("bad_result", f"step returned {result!r}, expected a StepResult")
    reward = result.reward
    if result.done or reward is not None:
        reward = check_reward(reward, reward_range)
    messages = () if result.done else check_messages(result.messages, "step.messages")
    if messages and calls is not None:
        wanted, got = [call.id for call in calls], [m.tool_call_id for m in messages if m.role == "tool"]
        if got != wanted or any(message.role != "tool" for message in messages[: len(wanted)]):
            text = f"step.messages: results of the calls {got}, expected {wanted}, in this order and first"
            raise EnvironmentFailure("bad_messages", text)
    return StepResult(messages, reward, result.done)
