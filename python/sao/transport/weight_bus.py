"""Policy weights between hosts: the learner serves its newest files in chunks, a generator pulls the one it wants.

The connection is its own, beside the one to the broker: a large model on a slow link delays no sign of life. A pulled
file gets its name only when it is whole and has the fingerprint that the broker announced; until then, and whatever
fails on the way, the version before it stays. Why the learner serves: `docs/decisions/weights-between-hosts.md`.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import zlib
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sao.errors import Error, TransportError, WeightsError
from sao.transport import fingerprint
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.keys import GENERATOR, ClientKeys, ServerKeys
from sao.transport.mailbox import Peer, Request
from sao.transport.messages import CancelCall, Chunk, Message, Pull, WeightsRef, Welcome
from sao.transport.sockets import Limits

log = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 1 << 16  # of a chunk, on slow links
FIRST_BYTES: Final = 1 << 18
LARGEST_BYTES: Final = 1 << 22
WIDEST: Final = 8  # chunks asked for at once
QUICK_S, SLOW_S = 0.25, 1.0  # a chunk that takes less: ask for more at once; more: for less
TRIES: Final = 3  # of one chunk whose checksum is wrong
SERVED: Final = 3  # versions: the newest, and two before it that somebody may be pulling
MESSAGE_BYTES: Final = LARGEST_BYTES + (1 << 16)


@dataclass
class _Open:
    file: int
    n_bytes: int
    used: float  # when it was published or asked for last


class WeightsServer:
    """Serves published versions at `endpoint` from a thread of its own, to generators only."""

    def __init__(self, endpoint: str, limits: Limits, keys: ServerKeys | None = None) -> None:
        """Listens at once; a host name is looked up, `*` is every interface. Raises `TransportError`."""
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self.sent_bytes = 0
        self._actor = Actor(
            endpoint,
            on_join=self._join,
            on_leave=lambda peer, reason: None,
            limits=replace(limits, max_message_bytes=MESSAGE_BYTES),
            keys=keys,
        )
        self._announced = self._actor.endpoint if endpoint.endswith(":0") else endpoint
        self._actor.on(Pull, self._pull, GENERATOR)
        self._actor.on(CancelCall, lambda request: None, GENERATOR)
        self._thread = threading.Thread(target=self._actor.run, name="sao-weights", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return self._actor.endpoint

    def publish(self, ref: WeightsRef) -> WeightsRef:
        """From now on `ref` is served, even when its file is removed; returns it with this server as its source.

        From any thread. Raises `WeightsError`.
        """
        try:
            file = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
            added = _Open(file, os.fstat(file).st_size, time.monotonic())
        except OSError as error:
            raise WeightsError(f"weights of version {ref.version}: cannot be served: {error}") from None
        with self._lock:
            if ref.version in self._open:
                os.close(self._open.pop(ref.version).file)
            while len(self._open) >= SERVED:  # what nobody has asked for the longest goes
                oldest = min(self._open, key=lambda version: self._open[version].used)
                os.close(self._open.pop(oldest).file)
            self._open[ref.version] = added
        return replace(ref, source=self._announced)

    def close(self) -> None:
        """Ends the thread and closes all files."""
        self._actor.stop()
        self._thread.join(5.0)
        self._actor.close(0)
        with self._lock:
            for served in self._open.values():
                os.close(served.file)
            self._open.clear()

    def _join(self, peer: Peer) -> Welcome:
        if peer.role != GENERATOR:
            raise TransportError(f"weights are for generators, not for a {peer.role}")
        return Welcome()

    def _pull(self, request: Request[Pull]) -> Chunk:
        version, offset, size = request.message.version, request.message.offset, request.message.size
        with self._lock:
            served = self._open.get(version)
            if served is None:
                raise WeightsError(f"version {version} is not served, only {sorted(self._open)}")
            if not (offset < served.n_bytes and 0 < size <= LARGEST_BYTES):
                raise WeightsError(f"{size} bytes at {offset}: the file has {served.n_bytes}, a chunk {LARGEST_BYTES}")
            served.used = time.monotonic()
            try:
                chunk = os.pread(served.file, size, offset)
            except OSError as error:  # of this version alone: the others are served on
                raise WeightsError(f"version {version} cannot be read: {error}") from None
        self.sent_bytes += len(chunk)
        return Chunk(version, offset, served.n_bytes, zlib.crc32(chunk), frames=(chunk,))


def source_of(ref: WeightsRef, broker: str) -> str:
    """The endpoint that serves `ref`; the host `*` stands for the broker's, as this side knows it."""
    host, _, port = ref.source.removeprefix("tcp://").rpartition(":")
    return f"{broker.rpartition(':')[0]}:{port}" if host in ("*", "0.0.0.0", "[::]") else ref.source


class Puller:
    """Brings weights from `endpoint` into `folder`, over a connection that is made at the first pull and kept. It waits
    for each chunk for `limits.peer_timeout_s`.
    """

    def __init__(
        self,
        endpoint: str,
        folder: Path,
        limits: Limits,
        *,
        name: str,
        incarnation: int = 0,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint, self._folder, self._patience_s = endpoint, folder, limits.peer_timeout_s
        timeout_s = max(self._patience_s, 3 * limits.heartbeat_s)
        self._limits = Limits(MESSAGE_BYTES, limits.heartbeat_s, timeout_s, outage_s=self._patience_s)
        self._name, self._incarnation, self._keys = name, incarnation, keys
        self._pace = Pace()
        self._client: Client | None = None

    def pull(self, ref: WeightsRef) -> WeightsRef:
        """Brings the file of `ref`, in place of older ones in the folder; returns a reference to it.

        Raises `WeightsError` that names version, endpoint and place when no chunk arrives in time, a chunk stays wrong,
        there is no room, or the whole does not have the fingerprint; then the folder is as it was.
        """
        what = f"weights of version {ref.version} from {self.endpoint}"
        final = self._folder / f"weights-{ref.version:010d}.safetensors"
        part = self._folder / f".{final.name}.part"
        try:
            began = time.monotonic()
            n_bytes = _Transfer(self._joined(), ref.version, part, self._patience_s, self._pace).run()
            seconds = max(time.monotonic() - began, 1e-9)
            found = fingerprint.of_file(part)
            if found != ref.fingerprint:
                raise WeightsError(f"fingerprint {found}, expected {ref.fingerprint}")
            part.replace(final)
        except (Error, OSError) as error:
            raise WeightsError(f"{what}: {error}") from None
        finally:
            part.unlink(missing_ok=True)
        for old in self._folder.glob("weights-*.safetensors"):
            if old != final:
                old.unlink(missing_ok=True)
        log.info("%s: %d bytes in %.2f s, %.1f MB/s", what, n_bytes, seconds, n_bytes / seconds / 1e6)
        return replace(ref, path=str(final))

    def close(self) -> None:
        """Ends the connection; the next pull makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _joined(self) -> Client:
        if self._client is not None and self._client.lost is not None:
            self.close()
        if self._client is None:
            self._client = Client(
                self.endpoint,
                role=GENERATOR,
                name=self._name,
                incarnation=self._incarnation,
                limits=self._limits,
                keys=self._keys,
            )
            self._client.connect(deadline_s=self._patience_s)
        return self._client


@dataclass
class Pace:
    """Chunks that are asked for at once and their size: more while they come quickly, less when one is slow."""

    width: int = 2
    n_bytes: int = FIRST_BYTES

    def took(self, seconds: float) -> None:
        """One chunk took so long."""
        if seconds > SLOW_S:
            self.width, self.n_bytes = max(1, self.width // 2), max(SMALLEST_BYTES, self.n_bytes // 2)
        elif seconds < QUICK_S and self.width < WIDEST:
            self.width += 1
        elif seconds < QUICK_S:
            self.n_bytes = min(LARGEST_BYTES, 2 * self.n_bytes)


class _Transfer:
    """One file, chunk by chunk: the first tells how long it is, then several are asked for at once."""

    def __init__(self, client: Client, version: int, part: Path, patience_s: float, pace: Pace) -> None:
        self._client, self._version, self._part, self._patience_s = client, version, part, patience_s
        self._pace = pace
        self._asked: dict[Future[Message], tuple[int, int, float]] = {}
        self._again: deque[tuple[int, int]] = deque()
        self._wrong = Counter[int]()
        self._next = self._got = 0
        self._total: int | None = None

    def run(self) -> int:
        """Returns the number of bytes written. Raises `WeightsError` and `OSError`."""
        try:
            with self._part.open("wb") as file:
                self._ask()
                while self._asked:
                    done, _ = wait(self._asked, timeout=self._patience_s, return_when=FIRST_COMPLETED)
                    if not done:
                        first = min(offset for offset, _, _ in self._asked.values())
                        text = f"waited {self._patience_s:g} s for the chunk at byte {first} of {self._total}"
                        raise WeightsError(text)
                    for future in done:
                        self._take(file.fileno(), *self._asked.pop(future), future.result())
                    self._ask()
            return self._got
        finally:
            for future in self._asked:  # nobody waits for what is still on its way
                future.cancel()

    def _ask(self) -> None:
        while len(self._asked) < (1 if self._total is None else self._pace.width):
            if self._again:
                offset, size = self._again.popleft()
            elif self._total is None or self._next < self._total:
                offset, size = self._next, self._pace.n_bytes
                if self._total is not None:
                    size = min(size, self._total - offset)
                self._next += size
            else:
                return
            self._asked[self._client.call(Pull(self._version, offset, size))] = offset, size, time.monotonic()

    def _take(self, file: int, offset: int, size: int, asked: float, chunk: Message) -> None:
        if not isinstance(chunk, Chunk):
            raise WeightsError(f"an answer of kind {chunk.kind!r} is no chunk")
        if self._total is None:
            self._begin(file, chunk.total)
            size = self._next = min(size, chunk.total)
        data = memoryview(chunk.frames[0])
        if (chunk.version, chunk.offset, chunk.total, data.nbytes) != (self._version, offset, self._total, size):
            got = f"{data.nbytes} bytes at {chunk.offset} of {chunk.total} of version {chunk.version}"
            raise WeightsError(f"expected {size} bytes at {offset} of {self._total}, got {got}")
        if zlib.crc32(data) != chunk.crc32:
            self._wrong[offset] += 1
            if self._wrong[offset] >= TRIES:
                raise WeightsError(f"the chunk at byte {offset} has a wrong checksum, {TRIES} times")
            log.warning("the chunk at byte %d has a wrong checksum; it is asked for again", offset)
            self._again.append((offset, size))
            return
        os.pwrite(file, data, offset)
        self._got += size
        self._pace.took(time.monotonic() - asked)

    def _begin(self, file: int, total: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if not 0 < total <= free:
            raise WeightsError(f"a file of {total} bytes; {free} bytes are free in {self._part.parent}")
        self._total = total
        with suppress(AttributeError):
            os.posix_fallocate(file, 0, total)
