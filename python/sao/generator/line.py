"""What a generator needs of its line to the broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sao.errors import Error
from sao.transport.client import Client
from sao.transport.messages import Message


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
