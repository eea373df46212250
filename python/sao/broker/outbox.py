"""The outbox of the broker: where its decisions leave as messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Literal

from sao.transport.messages import Event, Message

log = logging.getLogger(__name__)
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Address:
    """The peers that a message is for: all of a role, or the one of that name."""

    role: str
    name: str | None = None


SUPERVISOR: Final = Address("supervisor")
LEARNER: Final = Address("learner")
GENERATORS: Final = Address("generator")


@dataclass(frozen=True, slots=True)
class Outbox:
    """What carries the messages: the server's sockets, a test's list, a simulator's clock."""

    push: Callable[[Address, Message], None]
    """Sends unasked."""
    answer: Callable[[Hashable, Message], None]
    """Answers the request of this key that waits."""

    def event(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """What a user should see, to the log and the supervisor."""
        log.log(_LEVELS[level], "%s", text)
        self.push(SUPERVISOR, Event(level, text))
