"""Endpoints, limits and socket options, in one place.

`ipc` endpoints live in a private folder (mode 0700); `tcp` endpoints are loopback unless the configuration says
otherwise.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from sao.config import addresses
from sao.config.sections import TransportSection
from sao.errors import TransportError
from sao.transport.keys import DOMAIN, Keys, check_private
from sao.transport.messages import Buffer

IPC_PATH_LIMIT: Final = 107  # bytes of sockaddr_un.sun_path without the terminating zero
STALLED_MS: Final = 5000  # a TCP connection whose other end acknowledges nothing for so long is made anew
_NOW: Final = int(zmq.NOBLOCK)  # plain numbers: flags of an enum are slow to combine
_MORE: Final = int(zmq.SNDMORE)
HIGH_WATER: Final = 4096  # messages per peer and direction; what does not fit waits in the layer above


def private_folder(prefix: str = "sao-", base: str | None = None) -> Path:
    """A new folder that only this user may enter (mode 0700), short enough for an ipc path by default."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base or "/tmp"))


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that both ends of a connection share; as in the section `transport` of the configuration."""

    max_message_bytes: int = 1 << 28
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 15.0
    outage_s: float = 0.0
    """How long a client waits for a broker that is away; 0: as long as `peer_timeout_s`, and it does not join again."""

    @classmethod
    def of(cls, section: TransportSection) -> Limits:
        """Those of a run."""
        return cls(section.max_message_bytes, section.heartbeat_s, section.peer_timeout_s, section.outage_s)


def check_endpoint(endpoint: str) -> Path | None:
    """The socket path of an `ipc://` endpoint, `None` for `tcp://HOST:PORT`. Raises `TransportError` that names the
    fault.
    """
    scheme, separator, rest = endpoint.partition("://")
    if scheme == "tcp" and separator:
        try:
            addresses.split(rest)
        except ValueError as error:
            raise TransportError(f"endpoint {endpoint!r}: expected tcp://HOST:PORT: {error}") from None
        return None
    if scheme != "ipc" or not rest:
        raise TransportError(f"endpoint {endpoint!r}: expected ipc://PATH or tcp://HOST:PORT")
    length = len(os.fsencode(rest))
    if length > IPC_PATH_LIMIT:
        raise TransportError(
            f"endpoint {endpoint!r}: path of {length} bytes exceeds the limit of {IPC_PATH_LIMIT} bytes"
        )
    return Path(rest)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limits: Limits, keys: Keys | None = None
) -> tuple[zmq.Socket[bytes], str]:
    """A listening ROUTER and its endpoint (the port is filled in when 0 was asked for). Raises `TransportError`.

    With `keys` everything is encrypted and a `Gate` of the same context says who may connect.
    """
    path = check_endpoint(endpoint)
    if path is not None:
        check_private(path.parent, 0o700, TransportError)
        if path.is_symlink() or (path.exists() and not path.is_socket()):
            raise TransportError(f"{path}: exists and is not a socket; it is not removed")
        with socket.socket(socket.AF_UNIX) as probe:  # ZeroMQ takes the place of any socket, also of a live one
            probe.settimeout(1.0)
            if probe.connect_ex(str(path)) not in (errno.ENOENT, errno.ECONNREFUSED):
                raise TransportError(f"{path}: another process listens here")
    router = context.socket(zmq.ROUTER)
    _options(router, limits, endpoint)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error, not a silent loss
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its identity at once
    if keys is not None:
        router.curve_server = True
        router.curve_secretkey = keys.secret
        router.zap_domain = DOMAIN.encode()
    try:
        router.bind(_numeric(endpoint))
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise TransportError(f"endpoint {endpoint!r}: cannot listen: {error.strerror}") from None
    return router, router.getsockopt_string(zmq.LAST_ENDPOINT)


def _numeric(endpoint: str) -> str:
    """The endpoint with its host name looked up: ZeroMQ listens at addresses and interfaces only."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host == "*" or host.startswith("["):
        return endpoint
    family = socket.AF_INET6 if addresses.is_ipv6(host) else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return endpoint  # an interface, or what the bind itself will name
    return f"tcp://[{found}]:{port}" if family == socket.AF_INET6 else f"tcp://{found}:{port}"


def make_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    limits: Limits,
    keys: Keys | None = None,
) -> zmq.Socket[bytes]:
    """A DEALER for `endpoint`, to be connected by `connect`. Raises `TransportError`."""
    check_endpoint(endpoint)
    dealer = context.socket(zmq.DEALER)
    _options(dealer, limits, endpoint)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that is yet to be made
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # Not at the listening end: to that, a connection that was closed means that the process behind it is gone.
    dealer.setsockopt(zmq.TCP_MAXRT, STALLED_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, STALLED_MS)
    if keys is not None:
        dealer.curve_serverkey = keys.server
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
    return dealer


def connect(dealer: zmq.Socket[bytes], endpoint: str) -> None:
    """Connects, and reconnects from then on; the listener need not exist yet. Raises `TransportError`."""
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close(linger=0)
        raise TransportError(f"endpoint {endpoint!r}: cannot connect: {error.strerror}") from None


def receive(sock: zmq.Socket[bytes], max_frames: int) -> list[zmq.Frame]:
    """The frames of the next message, one more than `max_frames` at most; what is beyond is not kept.

    Never waits. Raises `zmq.Again`.
    """
    frame: zmq.Frame = sock.recv(_NOW, False)
    frames = [frame]
    while frame.more:
        frame = sock.recv(_NOW, False)
        if len(frames) <= max_frames:
            frames.append(frame)
    return frames


def send(sock: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Sends the frames of a message; large ones are not copied and must not change. Never waits; `zmq.ZMQError`."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        small = type(frame) is bytes and len(frame) < zmq.COPY_THRESHOLD
        sock.send(frame, _NOW if index == last else _NOW | _MORE, small)


def _options(sock: zmq.Socket[bytes], limits: Limits, endpoint: str) -> None:
    if endpoint.startswith("tcp://"):
        sock.setsockopt(zmq.IPV6, addresses.is_ipv6(addresses.split(endpoint)[0]))
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    sock.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    sock.setsockopt(zmq.LINGER, 0)
