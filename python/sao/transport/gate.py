"""The gate of a listening socket with keys: ZeroMQ asks it at every handshake whether the other side may come in."""

from __future__ import annotations

import logging
import threading
from typing import Final

import zmq
from zmq.utils import z85

from sao.errors import ConfigError, TransportError
from sao.transport.keys import ServerKeys

log = logging.getLogger(__name__)
_ADDRESS: Final = "inproc://zeromq.zap.01"  # where ZeroMQ looks for the handler (RFC 27)
_VERSION: Final = b"1.0"
_CLOSE_S: Final = 5.0


class Gate:
    """Answers handshakes of all sockets of `context`; who is let in is known by the name of its key (`User-Id`)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._context, self._keys = context, keys
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(_ADDRESS)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransportError(f"gate: cannot listen at {_ADDRESS}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="sao-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Call it before the context is destroyed."""
        with self._context.socket(zmq.REQ) as ask:
            ask.setsockopt(zmq.LINGER, 0)
            ask.connect(_ADDRESS)
            ask.send(b"")  # no handshake has a single frame
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._socket as socket:
            while True:
                frames = socket.recv_multipart()
                if len(frames) == 1:
                    return
                try:
                    answer = self._judge(frames)
                except Exception:  # who cannot be judged stays outside; the gate stays there for the others
                    log.exception("a handshake could not be judged: it is refused")
                    answer = [_VERSION, frames[1], b"500", b"internal error", b"", b""]
                socket.send_multipart(answer)

    def _judge(self, frames: list[bytes]) -> list[bytes]:
        version, request, _domain, address, _identity, mechanism, *credentials = frames
        name: str | None = None
        if version == _VERSION and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            try:
                name = self._keys.who(z85.encode(credentials[0]))
            except ConfigError as error:
                log.error("nobody is let in: %s", error)
        if name is None:
            log.warning("a peer at %s with a key that is not in %s is refused", address.decode(), self._keys.folder)
            return [_VERSION, request, b"400", b"unknown key", b"", b""]
        return [_VERSION, request, b"200", b"OK", name.encode(), b""]
