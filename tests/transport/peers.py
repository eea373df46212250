"""An actor in a thread and clients for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sao.transport import LATER, Actor, Callbacks, Client, Limits, Peer, Request
from sao.transport.keys import Keys
from sao.transport.messages import Ack, CancelCall, FinishedRollout, Message, Slots, Take, Welcome
from sao.transport.sockets import private_folder


class Server:
    """Answers `slots` with what it got, `take` never (unless `answer_takes`), keeps what joins and leaves."""

    def __init__(self, endpoint: str, *, keys: Keys | None = None, **limits: Any) -> None:
        self.joined: list[Peer] = []
        self.left: list[tuple[str, str]] = []
        self.got: list[Any] = []
        self.cancelled: list[int] = []
        self.delay_s = 0.0
        self.version = 7
        self.actor = Actor(endpoint, on_join=self._join, on_leave=self._leave, limits=_limits(**limits), keys=keys)
        self.actor.on(Slots, self._slots)
        self.actor.on(FinishedRollout, self._rollout)
        self.actor.on(Take, lambda request: LATER, "learner")
        self.actor.on(CancelCall, lambda request: self.cancelled.append(request.message.call))
        self._thread = threading.Thread(target=self.actor.run, daemon=True)

    def start(self) -> Server:
        self._thread.start()
        return self

    def in_loop(self, call: Callable[[], Any]) -> Any:
        """Runs `call` in the actor's thread and returns what it returns."""
        done, result = threading.Event(), []
        self.actor.call(lambda: (result.append(call()), done.set()))
        assert done.wait(5)
        return result[0]

    def push(self, peer: Peer, message: Message) -> None:
        self.in_loop(lambda: self.actor.mailbox.push(peer, message))

    def stop(self) -> None:
        self.actor.stop()
        if self._thread.ident is not None:
            self._thread.join(5)
            assert not self._thread.is_alive()
        self.actor.close()

    def _join(self, peer: Peer) -> Welcome:
        self.joined.append(peer)
        return Welcome(self.version)

    def _leave(self, peer: Peer, reason: str) -> None:
        self.left.append((f"{peer.name}:{peer.incarnation}", reason))

    def _slots(self, request: Request[Slots]) -> Ack:
        if self.delay_s:
            time.sleep(self.delay_s)
        self.got.append(request.message)
        return Ack(reason=str(request.message.free))

    def _rollout(self, request: Request[FinishedRollout]) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        self.got.append([bytes(frame) for frame in request.message.frames])


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    """A started server on an ipc endpoint of its own."""
    folder = private_folder()
    server = Server(f"ipc://{folder}/server", **options).start()
    try:
        yield server
    finally:
        server.stop()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def client_of(
    server: Server | str,
    name: str = "c",
    role: str = "generator",
    incarnation: int = 0,
    keys: Keys | None = None,
    calls: Callbacks = Callbacks(),  # noqa: B008 - frozen
    **limits: Any,
) -> Client:
    """A client that has not joined yet."""
    endpoint = server if isinstance(server, str) else server.actor.endpoint
    limited = _limits(**limits)
    return Client(endpoint, role=role, name=name, incarnation=incarnation, limits=limited, keys=keys, calls=calls)


def _limits(**limits: Any) -> Limits:
    return Limits(**{"heartbeat_s": 0.1, "peer_timeout_s": 3.0, **limits})
