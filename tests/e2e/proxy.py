"""A connection that can be cut: listens at one Unix socket and forwards to another, unless it is told to hold still."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Proxy:
    """Forwards every connection to `path` to wherever `target()` says then. While it holds, not a byte passes in any
    direction and new connections are not answered, as on a cut link; nothing is told to either end.
    """

    def __init__(self, path: Path, target: Callable[[], str]) -> None:
        self.path, self._target = path, target
        self._until = 0.0
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(64)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self, seconds: float) -> None:
        """Cuts the link for so long."""
        self._until = time.monotonic() + seconds

    def close(self) -> None:
        """Ends all connections."""
        self._ended = True
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended:
            if time.monotonic() < self._until:
                time.sleep(0.02)
                continue
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._pass_on(key.fileobj, key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.connect(self._target())
        except OSError:
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            one.settimeout(10)
            self._selector.register(one, selectors.EVENT_READ, other)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                sink.sendall(data)
                return
        except OSError:
            pass
        for one in (source, sink):
            with suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
