"""Turns of a rollout that outlive the generator that sampled them.

After each turn that is not the last, what the policy has sampled (ids, log-probs, versions, fingerprints) and a digest
of the observation go to the broker. When the generator dies, another one plays the environment again with the recorded
answers, checks that it observes the same, and samples on: tokens, log-probs and versions are those of the first.
Everything the policy is asked passes here in order, so a rollout with compactions is replayed like any other.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from sao.engines.base import Completion
from sao.envs.protocol import Message
from sao.errors import Error, WireError
from sao.transport.messages import Buffer

Send = Callable[[int, int, int, bytes, bytes], None]


class DivergedError(Error):
    """The environment, played again, did not repeat itself; `sampled_tokens` recorded tokens are lost."""

    def __init__(self, turn: int, sampled_tokens: int) -> None:
        super().__init__(
            f"turn {turn}: the environment did not repeat itself; {sampled_tokens} recorded tokens are lost"
        )
        self.sampled_tokens = sampled_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """The completions between two observations, and digests of these.

    first: of the environment's first messages. observed: of its answer to this turn. foreign_tokens: of a fixed
    summariser; they are context, not sampled by the policy.
    """

    completions: tuple[Completion, ...]
    first: bytes
    observed: bytes
    foreign_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that the policy has sampled."""
        return sum(completion.token_ids.size for completion in self.completions) - self.foreign_tokens

    @property
    def max_version(self) -> int:
        """The newest version that sampled one of them; 0 when there are none."""
        return max((int(c.version_spans[-1, 2]) for c in self.completions if c.version_spans.size), default=0)


def pack(turn: Turn) -> tuple[bytes, bytes]:
    """Header (msgpack) and payload (per completion: ids int32, log-probs float32, spans int64; little endian)."""
    shapes = [
        [c.token_ids.size, len(c.version_spans), c.stop_reason, {str(v): mark for v, mark in c.fingerprints.items()}]
        for c in turn.completions
    ]
    parts = [
        array.astype(kind).tobytes()
        for c in turn.completions
        for array, kind in ((c.token_ids, "<i4"), (c.logprobs, "<f4"), (c.version_spans, "<i8"))
    ]
    return msgpack.packb([turn.first, turn.observed, shapes, turn.foreign_tokens]), b"".join(parts)


def unpack(header: Buffer, payload: Buffer) -> Turn:
    """The turn that `pack` has packed. Raises `WireError` for anything else."""
    try:
        first, observed, shapes, foreign = msgpack.unpackb(header)
        if type(foreign) is not int:
            raise ValueError(f"foreign tokens: {foreign!r}, expected an integer")
        completions, at = [], 0
        for n_tokens, n_spans, stop_reason, marks in shapes:
            arrays = []
            for kind, count in (("<i4", n_tokens), ("<f4", n_tokens), ("<i8", 3 * n_spans)):
                arrays.append(np.frombuffer(payload, kind, count, at))
                at += arrays[-1].nbytes
            ids, logprobs, spans = arrays
            fingerprints = {int(version): str(mark) for version, mark in marks.items()}
            completions.append(Completion(ids, logprobs, spans.reshape(-1, 3), stop_reason, fingerprints))
    except Exception as error:  # msgpack raises a dozen classes
        raise WireError(f"turn: not a valid record: {type(error).__name__}: {error}") from None
    return Turn(tuple(completions), first, observed, foreign)


def digest(messages: Sequence[Message], reward: float | None = None) -> bytes:
    """16 bytes over an answer of an environment: its messages and the reward of the turn."""
    parts = []
    for m in messages:
        calls = [[call.name, call.arguments, call.id] for call in m.tool_calls]
        more = [calls, m.tool_call_id, m.name, m.reasoning]
        parts.append([m.role, m.content, *(more if any(more) else ())])
    packed = msgpack.packb([parts, None if reward is None else float(reward)])
    return hashlib.blake2b(packed, digest_size=16).digest()


class Turns:
    """The turns of one episode: the recorded ones first, then new ones, which go to `send` (part, tokens, version,
    header, payload) when they are over; `send` None: they are not kept.
    """

    def __init__(self, recorded: Sequence[Turn] = (), send: Send | None = None) -> None:
        self.send = send
        self._recorded = recorded
        self._index = self._asked = 0
        self._fresh: list[Completion] = []
        self._foreign = 0
        self._first = self._observed = b""

    def opened(self, messages: Sequence[Message]) -> None:
        """The environment's first messages. Raises `DivergedError`, as all here."""
        self._first = digest(messages)
        if self._recorded and self._recorded[0].first != self._first:
            raise self._diverged()

    def next(self) -> Completion | None:
        """The recorded answer to what the policy is asked now; None when it is to be sampled."""
        if self._index >= len(self._recorded):
            return None
        completions = self._recorded[self._index].completions
        if self._asked >= len(completions):
            raise self._diverged()
        self._asked += 1
        return completions[self._asked - 1]

    def sampled(self, completion: Completion, *, foreign: bool = False) -> None:
        """An answer that was sampled now; `foreign`: by a fixed summariser."""
        if self.send is not None:
            self._fresh.append(completion)
            self._foreign += completion.token_ids.size if foreign else 0

    def observed(self, messages: Sequence[Message], reward: float | None, *, done: bool) -> None:
        """The environment's answer to a turn."""
        self._observed = digest(messages, reward)
        if self._index < len(self._recorded) and (done or self._recorded[self._index].observed != self._observed):
            raise self._diverged()

    def over(self) -> None:
        """The turn is over and the episode goes on."""
        if self._index < len(self._recorded):
            if self._asked != len(self._recorded[self._index].completions):
                raise self._diverged()
        elif self.send is not None:
            turn = Turn(tuple(self._fresh), self._first, self._observed, self._foreign)
            self._fresh, self._foreign = [], 0
            self.send(self._index, turn.n_tokens, turn.max_version, *pack(turn))
        self._index, self._asked = self._index + 1, 0

    def _diverged(self) -> DivergedError:
        return DivergedError(self._index, sum(turn.n_tokens for turn in self._recorded))
