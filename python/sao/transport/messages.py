"""Every message between the processes of a run, as a class: its fields, their types and their ranges.

A message from outside is checked against all of that while it is decoded (see `encoding`); handlers need not.
"""

from __future__ import annotations

import re as regex
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from sao import _core

MAX_FRAMES: Final = 1 << 16
WEIGHTS_FILES: Final = "weights-*.safetensors"  # of all versions in a folder
KEPT_VERSIONS: Final = 3  # of them

Buffer = bytes | bytearray | memoryview
Frames = Annotated[tuple[Any, ...], Meta(max_length=0)]  # of Buffer; they travel beside the body, never in it
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]  # tokens, slots, versions, steps: far beyond any that is real
Metrics = dict[str, int | float | None]
Tree = dict[str, Any]  # of plain values, at most `encoding.MAX_DEPTH` levels


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Where the weights of one policy version lie and what they must hash to (32 hex digits)."""

    version: Count
    path: str
    fingerprint: str
    source: str = ""
    """Endpoint that serves the file to hosts that do not see `path`; empty: none does."""


def weights_file(version: int) -> str:
    """The name of the file that holds the weights of this version."""
    return WEIGHTS_FILES.replace("*", f"{version:010d}")


class Message(Struct, kw_only=True, omit_defaults=True):
    """Base of all messages. `frames` are the payload: read-only views, valid as long as they are held."""

    n_frames: ClassVar[tuple[int, int]] = (0, 0)
    """The least and the most payload frames that a message of this kind has."""

    frames: Frames = ()

    @property
    def kind(self) -> str:
        """The name of its class on the wire."""
        return NAMES[type(self)]


# -- both ways


class Ack(Message):
    """The answer to what needs no other; also whether a rollout or result was `accepted`, else the `reason`."""

    accepted: bool = True
    reason: str = ""
    more: tuple[Number, ...] = ()
    """Further messages that this one acknowledges."""


class Refusal(Message):
    """The answer to a message that failed. `error` names the class in `sao.errors`."""

    text: str
    error: str = ""
    gone: bool = False
    """The connection is over: this peer may not join, or has been replaced."""
    unknown: bool = False
    """This peer has not joined, or has been given up; it may join again."""


class Stop(Message):
    """The end of the run: to peers, from the supervisor, and in answer to a `Take`."""

    reason: str


class Ping(Message):
    """A sign of life of a peer."""


class Pong(Message):
    """A sign of life of a listener."""


class Bye(Message):
    """The last message of a peer that leaves."""


class CancelCall(Message):
    """The sender no longer waits for the answer to its message `call`."""

    call: Number


# -- joining


class Hello(Message):
    """The first message of a peer on each connection: who it is and where it stands."""

    role: str
    name: str
    incarnation: Number
    """A later process of the same name has a higher one and fences those before it."""
    session: str
    """Names the process: the same in all its greetings."""
    step: Count | None = None
    """Learner: the step that it continues after. Supervisor: the last one that it knows."""
    weights: WeightsRef | None = None
    tasks: tuple[tuple[Number, Number], ...] = ()
    """Ordinal and attempt of each rollout in flight at a generator."""


class Welcome(Message):
    """The answer to `Hello`: the current policy version and its weights."""

    version: Count = 0
    weights: WeightsRef | None = None
    step: Count = 0
    conversation: Number = 0
    """Another for each time that a peer joins, set by the mailbox; the same when only the connection was made anew."""


# -- generator to broker


class Slots(Message):
    """Free places for episodes, counted after `received` tasks in all."""

    free: Count
    received: Count | None = None


class FinishedRollout(Message):
    """A trajectory: header, payload and sidecars as frames."""

    n_frames = (2, 2 + _core.MAX_SIDECARS)


class FailedRollout(Message):
    """A rollout that ended without a trajectory."""

    ordinal: Number
    attempt: Number
    reason: str
    sampled_tokens: Count
    detail: str = ""


class EvalResult(Message):
    """The end of a held-out episode; without `reward` it failed. `success`: a verdict beside the reward."""

    ordinal: Number
    version: Count
    reward: float | None = None
    attempt: Number = 0
    reason: str = ""
    detail: str = ""
    success: bool | None = None


class KeptTurn(Message):
    """Turn number `part` of a rollout in flight, so that another generator can go on after it: header and payload."""

    n_frames = (2, 2)

    ordinal: Number
    attempt: Number
    part: Count
    tokens: Count
    version: Count


class Diverged(Message):
    """The kept turns of this rollout did not fit and it began anew; `sampled_tokens` of them are lost."""

    ordinal: Number
    attempt: Number
    sampled_tokens: Count


class Loaded(Message):
    """The weights that a generator serves now."""

    version: Count
    fingerprint: str


class Stats(Message):
    """How busy a generator was since its last message of this kind. `kv_use`: share of the KV cache."""

    busy_share: float = 0.0
    tokens_per_s: float = 0.0
    kv_use: float = 0.0
    episode_limit: Count = 0


# -- broker to generator


class TaskEntry(Struct, omit_defaults=True):
    """One task for a generator; the next `2 * turns` frames of its message are the turns that are kept of it."""

    ordinal: Number
    attempt: Number
    seed: int
    split: Literal["train", "eval"]
    turns: Count = 0


class Tasks(Message):
    """Tasks for free slots."""

    n_frames = (0, MAX_FRAMES)

    tasks: tuple[TaskEntry, ...]


class CancelTask(Message):
    """Nobody waits for the end of this training task. One of evaluation with the same number goes on."""

    ordinal: Number
    attempt: Number


class NewWeights(Message):
    """A policy version was published."""

    weights: WeightsRef


# -- generator and learner


class Pull(Message):
    """Asks for `size` bytes of the weights of a version; answered by `Chunk`."""

    version: Count
    offset: Number
    size: Count


class Chunk(Message):
    """Bytes of weights, in one frame, with their checksum; `total` bytes is the whole file."""

    n_frames = (1, 1)

    version: Count
    offset: Number
    total: Number
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


# -- learner and broker


class Take(Message):
    """Asks for `n` trajectories; answered by `Batch` when there are as many, by `Stop` at the end of the run."""

    n: Annotated[int, Meta(ge=1, lt=1 << 31)]


class Batch(Message):
    """Leased trajectories: for each, header, payload and sidecars as frames. `ages_s`: since they were finished.
    `ended`: every task below this ordinal was trained or dropped.
    """

    n_frames = (0, MAX_FRAMES)

    lease: Number
    version: Count
    ordinals: tuple[Number, ...]
    attempts: tuple[Number, ...]
    step: Count = 0
    ages_s: tuple[float, ...] = ()
    ended: Number = 0


class Commit(Message):
    """A training step used up a lease; answered by `Position`. `weights`: those it made, if any; `done`: why it is the
    last.
    """

    lease: Number
    step: Count
    version: Count
    trained_tokens: Count
    masked_tokens: Count
    metrics: Metrics
    weights: WeightsRef | None = None
    done: str = ""


class Position(Message):
    """Where the run is: the last step that counts and the current policy version."""

    step: Count
    version: Count


class WorkerError(Message):
    """Why a worker cannot go on; from the learner this ends the run."""

    text: str


# -- supervisor, visitors and broker


class Left(Message):
    """The process of a peer ended; answered by `Position`."""

    role: str
    name: str
    incarnation: Number
    reason: str


class StepReport(Message):
    """The metrics of a training step."""

    step: Count
    metrics: Metrics


class LearnerBehind(Message):
    """The learner is back and goes on after `step`, with weights of `version`: the steps after it are lost with it."""

    step: Count
    version: Count
    lost_steps: Count


class EvalReport(Message):
    """The result of a held-out round. `versions_used`: the lowest and highest policy version of its episodes."""

    version: Count
    n: Count
    failed: Count
    success: float | None = None
    mean_reward: float | None = None
    step: Count = 0
    versions_used: tuple[int, ...] = ()
    failed_by_reason: dict[str, Count] = {}
    seconds: float = 0.0


class Event(Message):
    """Something that a user should see."""

    level: Literal["info", "warning", "error"]
    text: str


class Done(Message):
    """How the run ended."""

    reason: str
    failed: bool = False
    step: Count = 0
    tokens: dict[str, int | dict[str, int]] = {}


class GetSnapshot(Message):
    """Asks how the run stands; answered by `Snapshot`."""


class Snapshot(Message):
    """Sizes of all queues and maps, where tasks and tokens are, and what is waited for."""

    tree: Tree


class GetConfig(Message):
    """Asks for the configuration of the run; answered by `RunConfig`."""


class RunConfig(Message):
    """The configuration of the run, as `config.json` has it."""

    tree: Tree


NAMES: Final[dict[type[Message], str]] = {
    kind: regex.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in Message.__subclasses__()
}
