"""What a generator needs of its line to the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from sao.errors import Error
from sao.transport.client import Client
from sao.transport.messages import Message

log = logging.getLogger(__name__)


class ClientFactory(Protocol):
    """Makes the line to the broker; `Client` itself, or a double in tests."""

    def __call__(
        self,
        *,
        on_push: Callable[[Message], None],
        on_lost: Callable[[Error], None],
        on_greet: Callable[[], dict[str, Any]],
        on_rejoin: Callable[[dict[str, Any]], None],
    ) -> Client: ...


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], argument: Any) -> None:
    """Has the loop call this; for the line's thread. Without effect when the loop has ended."""
    try:
        loop.call_soon_threadsafe(call, argument)
    except RuntimeError:  # the loop has ended, and with it everyone who could care
        log.debug("after the end: %r", argument)
