"""Events of a connection below its messages: found, refused, cut; they give silence a reason."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from sao.errors import TransportError
from sao.transport.keys import Keys

_EVENTS: Final = (
    zmq.Event.CONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class Watch:
    """Of one connecting socket, in the thread that owns it. `socket` is to be polled for reading."""

    def __init__(self, watched: zmq.Socket[bytes], endpoint: str, keys: Keys | None) -> None:
        self._watched, self._endpoint, self._keys = watched, endpoint, keys
        self._found = self._faulty = False
        self.connected = False
        self.trouble = ""
        """Why nothing arrives, in words; empty while the connection stands."""
        self.fatal: TransportError | None = None
        """Set when trying again cannot help: this side is refused for its keys."""
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_EVENTS)

    def read(self) -> bool:
        """Takes what has happened since the last call; never waits. Returns whether a connection was made meanwhile."""
        made = False
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.socket, zmq.NOBLOCK)
                self._take(event)
                made |= event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
        return made

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, keys = event["event"], self._keys
        if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.trouble, self._faulty, self.connected = "", False, True
        elif kind == zmq.Event.CONNECTED:
            self._found = True
            if not self._faulty:
                self.trouble = "something listens there and has not answered the handshake yet"
        elif kind == zmq.Event.HANDSHAKE_FAILED_AUTH and keys is not None:
            text = f"the key {keys.name!r} of {keys.folder} is not known there"
            self.fatal = TransportError(f"{self._endpoint}: refused: {text}")
        elif (
            kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            and event["value"] == zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        ):
            text = "keys are needed there: set transport.keys, or pass --keys"
            if keys is not None:
                text = f"no keys are used there, but here (transport.keys = {str(keys.folder)!r})"
            self.fatal = TransportError(f"{self._endpoint}: refused: {text}")
        elif kind == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and keys is not None:
            self._faulty = True
            self.trouble = f"the handshake fails: what listens there has another key than {keys.folder} says, or none"
        elif kind in (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL):
            self._faulty = True
            self.trouble = "the handshake fails: what listens there needs keys, or does not speak this protocol"
        elif kind == zmq.Event.CONNECT_RETRIED and not self._found:
            self.trouble = "nothing can be reached there"
        elif kind == zmq.Event.DISCONNECTED:
            self.connected, self.trouble = False, self.trouble or "the connection was cut"

    def close(self) -> None:
        """Ends watching; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
