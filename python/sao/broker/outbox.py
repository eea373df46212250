"""The outbox of the broker: every decision that leaves it, as the message that says so.

Owners call it with plain values; `push` and `answer` are what carries the messages: the server's sockets, a test's
list, a simulator's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sao.broker.tasks import Assignment
from sao.transport.messages import Buffer

log = logging.getLogger(__name__)
MAX_FRAMES: Final = 1 << 14  # of a message, from which on further tasks are another; peers read four times as many
_LEVELS: Final = {"warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Address:
    """Whom a push is for: a role, and the one peer of that name (None: all of the role)."""

    role: str
    name: str | None = None


SUPERVISOR, LEARNER, GENERATORS = Address("supervisor"), Address("learner"), Address("generator")
Push = Callable[[Address, str, dict[str, Any], tuple[Buffer, ...]], None]
Answer = Callable[[Hashable, str, dict[str, Any], tuple[Buffer, ...]], None]


class Outbox:
    """`push(address, kind, body, frames)` sends unasked; `answer(take, kind, body, frames)` answers a `take` that
    waits.
    """

    def __init__(self, push: Push, answer: Answer) -> None:
        self._push, self._answer = push, answer

    def tasks(self, generator: str, tasks: Sequence[Assignment]) -> None:
        """Attempts for a generator, those with many turns in several messages."""
        bodies: list[dict[str, Any]] = []
        frames: list[Buffer] = []
        for index, task in enumerate(tasks, 1):
            body = {"ordinal": task.ordinal, "attempt": task.attempt, "seed": task.seed, "split": task.split}
            bodies.append({**body, "turns": len(task.turns)} if task.turns else body)
            frames += [part for turn in task.turns for part in turn]
            if len(frames) >= MAX_FRAMES or index == len(tasks):
                self._push(Address("generator", generator), "tasks", {"tasks": bodies}, tuple(frames))
                bodies, frames = [], []

    def cancel(self, generator: str, ordinal: int, attempt: int) -> None:
        """An attempt that a generator is to leave."""
        self._push(Address("generator", generator), "cancel", {"ordinal": ordinal, "attempt": attempt}, ())

    def version(self, weights: dict[str, Any]) -> None:
        """New weights, to all generators."""
        self._push(GENERATORS, "version", weights, ())

    def batch(self, take: Hashable, body: dict[str, Any], frames: tuple[Buffer, ...]) -> None:
        """The answer to a `take`; the frames are views of the buffer's memory and are not copied."""
        self._answer(take, "batch", body, frames)

    def no_batch(self, take: Hashable, reason: str) -> None:
        """The answer to a `take` when the run has ended."""
        self._answer(take, "stop", {"reason": reason}, ())

    def event(self, level: str, text: str) -> None:
        """What a user should see, to the log and the supervisor. `level`: info, warning or error."""
        log.log(_LEVELS.get(level, logging.INFO), "%s", text)
        self._push(SUPERVISOR, "event", {"level": level, "text": text}, ())

    def step(self, body: dict[str, Any]) -> None:
        """A learner's step with its metrics, to the supervisor."""
        self._push(SUPERVISOR, "step", body, ())

    def evaluation(self, body: dict[str, Any]) -> None:
        """The result of a held-out round, to the supervisor."""
        self._push(SUPERVISOR, "eval", body, ())

    def done(self, body: dict[str, Any]) -> None:
        """The end of the run, to everyone."""
        self._push(SUPERVISOR, "done", body, ())
        for address in (LEARNER, GENERATORS):
            self._push(address, "stop", {"reason": body["reason"]}, ())
