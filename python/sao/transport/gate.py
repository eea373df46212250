"""The gate of a listening socket with keys: ZeroMQ asks it at every handshake whether the other side may come in."""

from __future__ import annotations

import logging

import zmq
from zmq.auth.thread import ThreadAuthenticator

from sao.transport.keys import ServerKeys

log = logging.getLogger(__name__)
DOMAIN = "sao"


class Gate(ThreadAuthenticator):
    """Answers handshakes of all sockets of `context`; who is let in is known by the name of its key (`User-Id`)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        super().__init__(context, log=log)
        self._keys, self._name = keys, ""
        self.configure_curve_callback(DOMAIN, self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key may come in."""
        try:
            name = self._keys.who(key)
        except Exception as error:  # who cannot be judged stays outside; the gate stays there for the others
            log.error("a handshake could not be judged, nobody is let in: %s", error)
            return False
        if name is None:
            log.warning("a peer with a key that is not in %s is refused", self._keys.folder)
            return False
        self._name = name
        return True

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The name of the key that `callback` has just let in."""
        return self._name
