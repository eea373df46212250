"""Policy weights between hosts: the learner serves its newest files in chunks, a generator pulls the one it wants.

The connection is its own, beside the one to the broker: a large model on a slow link delays no sign of life. A pulled
file gets its name only when it is whole and has the fingerprint that the broker announced; until then, and whatever
fails on the way, the version before it stays. Why the learner serves: `docs/decisions/weights-between-hosts.md`.
"""

import logging
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final

from sao.config import addresses
from sao.errors import Error, TransportError, WeightsError
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.keys import GENERATOR, Keys
from sao.transport.mailbox import Peer, Request
from sao.transport.messages import (
    WEIGHTS_FILES,
    Buffer,
    CancelCall,
    Chunk,
    Message,
    Pull,
    WeightsRef,
    Welcome,
    weights_file,
)
from sao.transport.sockets import Limits

log = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 1 << 16  # of a chunk, on slow links
FIRST_BYTES: Final = 1 << 18
LARGEST_BYTES: Final = 1 << 22
WIDTH: Final = 8  # chunks asked for at once
QUICK_S, SLOW_S = 0.25, 1.0  # a chunk that takes less: the next ones are twice as large; more: half
TRIES: Final = 3  # of one chunk whose checksum is wrong
SERVED: Final = 3  # versions: the newest, and two before it that somebody may be pulling
MESSAGE_BYTES: Final = LARGEST_BYTES + (1 << 16)


class WeightsServer:
    """Serves published versions at `endpoint` from a thread of its own, to generators only."""

    def __init__(self, endpoint: str, limits: Limits, keys: Keys | None = None) -> None:
        """Listens at once; a host name is looked up, `*` is every interface. Raises `TransportError`."""
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}  # descriptors by version; the one published or asked for last comes last
        self.sent_bytes = 0
        self._actor = Actor(
            endpoint,
            on_join=self._join,
            on_leave=lambda peer, reason: None,
            limits=replace(limits, max_message_bytes=MESSAGE_BYTES),
            keys=keys,
        )
        self.endpoint = self._actor.endpoint
        self._announced = self.endpoint if endpoint.endswith(":0") else endpoint
        self._actor.on(Pull, self._pull, GENERATOR)
        self._actor.on(CancelCall, lambda request: None, GENERATOR)
        self._thread = threading.Thread(target=self._actor.run, name="sao-weights", daemon=True)
        self._thread.start()

    def publish(self, ref: WeightsRef) -> WeightsRef:
        """From now on `ref` is served, even when its file is removed; returns it with this server as its source.

        From any thread. Raises `WeightsError`.
        """
        try:
            file = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"weights of version {ref.version}: cannot be served: {error}") from None
        with self._lock:
            if ref.version in self._files:
                os.close(self._files.pop(ref.version))
            while len(self._files) >= SERVED:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[ref.version] = file
        return replace(ref, source=self._announced)

    def close(self) -> None:
        """Ends the thread and closes all files."""
        self._actor.stop()
        self._thread.join(5.0)
        self._actor.close(0)
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _join(self, peer: Peer) -> Welcome:
        if peer.role != GENERATOR:
            raise TransportError(f"weights are for generators, not for a {peer.role}")
        return Welcome()

    def _pull(self, request: Request[Pull]) -> Chunk:
        version, offset, size = request.message.version, request.message.offset, request.message.size
        with self._lock:
            if version not in self._files:
                raise WeightsError(f"version {version} is not served, only {sorted(self._files)}")
            file = self._files[version] = self._files.pop(version)
            total = os.fstat(file).st_size
            if not (offset < total and 0 < size <= LARGEST_BYTES):
                raise WeightsError(f"{size} bytes at {offset}: the file has {total}, a chunk {LARGEST_BYTES}")
            try:
                chunk = os.pread(file, size, offset)
            except OSError as error:  # of this version alone: the others are served on
                raise WeightsError(f"version {version} cannot be read: {error}") from None
        self.sent_bytes += len(chunk)
        return Chunk(version, offset, total, zlib.crc32(chunk), frames=(chunk,))


def source_of(ref: WeightsRef, broker: str) -> str:
    """The endpoint that serves `ref`; the host `*` stands for the broker's, as this side knows it."""
    host, _, port = ref.source.removeprefix("tcp://").rpartition(":")
    return f"{broker.rpartition(':')[0]}:{port}" if host in addresses.EVERY_INTERFACE else ref.source


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
        keys: Keys | None = None,
    ) -> None:
        self.endpoint, self._folder, self._patience_s = endpoint, folder, limits.peer_timeout_s
        timeout_s = max(self._patience_s, 3 * limits.heartbeat_s)
        self._limits = Limits(MESSAGE_BYTES, limits.heartbeat_s, timeout_s, outage_s=self._patience_s)
        self._name, self._incarnation, self._keys = name, incarnation, keys
        self._client: Client | None = None
        self._chunk_bytes = FIRST_BYTES

    def pull(self, ref: WeightsRef) -> WeightsRef:
        """Brings the file of `ref`, in place of older ones in the folder; returns a reference to it.

        Raises `WeightsError` that names version, endpoint and place when no chunk arrives in time, a chunk stays wrong,
        there is no room, or the whole does not have the fingerprint; then the folder is as it was.
        """
        from sao.transport.weights import load  # here, because torch is heavier than the rest of this module

        what = f"weights of version {ref.version} from {self.endpoint}"
        final = self._folder / weights_file(ref.version)
        part = self._folder / f".{final.name}.part"
        began = time.monotonic()
        try:
            with part.open("wb") as file:
                for chunk in self._chunks(ref.version):
                    file.write(chunk)
                n_bytes = file.tell()
            seconds = max(time.monotonic() - began, 1e-9)
            load(replace(ref, path=str(part)))
            part.replace(final)
        except (Error, OSError) as error:
            raise WeightsError(f"{what}: {error}") from None
        finally:
            part.unlink(missing_ok=True)
        for old in self._folder.glob(WEIGHTS_FILES):
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

    def _chunks(self, version: int) -> Iterator[Buffer]:
        """The bytes of a file in order: the first chunk carries their number, then several are asked for at once,
        larger ones while they come quickly, smaller ones while they are slow.
        """
        client, asked = self._joined(), deque[tuple[Pull, float, Future[Message]]]()
        end = total = 0
        try:
            while asked or end < (total or 1):
                while end < (total or 1) and len(asked) < WIDTH:
                    pull = Pull(version, end, self._chunk_bytes)
                    asked.append((pull, time.monotonic(), client.call(pull)))
                    end += pull.size
                pull, began, future = asked[0]
                chunk = self._chunk(client, pull, future, total)
                asked.popleft()
                total = chunk.total
                seconds = time.monotonic() - began
                if seconds > SLOW_S:
                    self._chunk_bytes = max(SMALLEST_BYTES, pull.size // 2)
                elif seconds < QUICK_S:
                    self._chunk_bytes = min(LARGEST_BYTES, 2 * pull.size)
                yield chunk.frames[0]
        finally:
            for _, _, future in asked:  # nobody waits for what is still on its way
                future.cancel()

    def _chunk(self, client: Client, pull: Pull, future: Future[Message], total: int) -> Chunk:
        """The answer to `pull`, checked; it is asked for again while its checksum is wrong. total: 0 at the first."""
        for _ in range(TRIES):
            try:
                chunk = future.result(self._patience_s)
            except TimeoutError:
                future.cancel()
                text = f"waited {self._patience_s:g} s for the chunk at byte {pull.offset} of {total or '?'}"
                raise WeightsError(text) from None
            if not isinstance(chunk, Chunk):
                raise WeightsError(f"an answer of kind {chunk.kind!r} is no chunk")
            if not total:
                total, free = chunk.total, shutil.disk_usage(self._folder).free
                if not 0 < total <= free:
                    raise WeightsError(f"a file of {total} bytes; {free} bytes are free in {self._folder}")
            size, n_bytes = min(pull.size, total - pull.offset), len(chunk.frames[0])
            if (chunk.version, chunk.offset, chunk.total, n_bytes) != (pull.version, pull.offset, total, size):
                got = f"{n_bytes} bytes at {chunk.offset} of {chunk.total} of version {chunk.version}"
                raise WeightsError(f"expected {size} bytes at {pull.offset} of {total}, got {got}")
            if zlib.crc32(chunk.frames[0]) == chunk.crc32:
                return chunk
            log.warning("the chunk at byte %d has a wrong checksum", pull.offset)
            future = client.call(pull)
        raise WeightsError(f"the chunk at byte {pull.offset} has a wrong checksum, {TRIES} times")
