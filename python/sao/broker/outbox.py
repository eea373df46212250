"""The outbox of the broker: where its decisions leave as messages."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sao.transport.messages import Event, Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outbox:
    """The carrier of messages: the server's sockets, a test's list, a simulator's clock."""

    push: Callable[[str, str, Message], None]
    """Sends unasked to the peer of this role and name; without a name to all of the role."""
    answer: Callable[[Any, Message], None]
    """Answers the request of this key that waits."""

    def event(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """Sends a line that a user should see to the log and the supervisor."""
        log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
        self.push("supervisor", "", Event(level=level, text=text))
