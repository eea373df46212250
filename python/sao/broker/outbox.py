"""What the broker's state needs from the outside."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from sao.transport.messages import Buffer


class Wire(Protocol):
    """How decisions leave the broker."""

    def to_generator(self, name: str, kind: str, body: dict[str, Any], frames: tuple[Buffer, ...] = ()) -> None:
        """Pushes to one generator."""

    def to_learner(self, kind: str, body: dict[str, Any]) -> None:
        """Pushes to the learner."""

    def to_supervisor(self, kind: str, body: dict[str, Any]) -> None:
        """Pushes to the supervisor."""

    def batch(self, take: Hashable, body: dict[str, Any], frames: tuple[Buffer, ...]) -> None:
        """Answers a `take` that was waiting."""

    def no_batch(self, take: Hashable, reason: str) -> None:
        """Answers a `take` that was waiting: the run has ended."""
