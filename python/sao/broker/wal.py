"""The broker's write-ahead log: what must survive its death and is not in the ledger, in files of the run folder.

Records are appended in memory and written together by `flush` (group commit), once a turn of the broker's loop and
before anything is said to anyone. The files are segments of about `segment_bytes`; a segment whose records are all
forgotten is deleted by `tidy`, and when what is dead outgrows what lives, the oldest segment's living records are moved
on, so that the disk is bounded by the living. Whether a record still counts at a restart is for the ledger to say.

Segment: records without a header. Record: 40 bytes head (magic, kind, ordinal, attempt, part, two lengths, crc32 of
the bodies, crc32 of the head; little endian), then the two bodies. Bytes at the end of the newest segment that are no
whole record are what a crash left of the last write and are cut off. Anything else that is no record is damage: it is
told by file and byte, and the records around it are kept.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from sao.errors import LedgerError
from sao.storage.failpoints import failpoint
from sao.transport.messages import Buffer

SEGMENT_BYTES: Final = 16 << 20
MAGIC: Final = b"SAOW"
_HEAD: Final = struct.Struct("<4sB3xQIIIII")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
MAX_BODY_BYTES: Final = (1 << 32) - 1  # what a record's head can say of each of its two
_SUFFIX: Final = ".wal"
_NUMBER: Final = re.compile(r"[0-9]{8,}")


class Kind(IntEnum):
    """What a record holds."""

    TRAJECTORY = 1  # a finished trajectory: its header, its payload
    TURN = 2  # one answer of the policy in a rollout that runs; `part` counts them from 0, empty: begun anew
    NOTE = 3  # the broker's state beside ledger and buffer; the last one counts
    ANSWERED = 4  # attempts whose end was heard, so that hearing it again changes nothing


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read; the bodies are views of the segment's bytes."""

    kind: int
    ordinal: int
    attempt: int
    part: int
    header: memoryview
    payload: memoryview
    n_bytes: int


@dataclass(slots=True)
class _Segment:
    path: Path
    n_bytes: int = 0
    live_bytes: int = 0


@dataclass(slots=True)
class Found:
    """What the log held when it was opened: records in the order of the files, and damage in words."""

    records: list[tuple[int, Record]] = field(default_factory=list)
    """Segment number and record."""
    damage: list[str] = field(default_factory=list)
    cut_bytes: int = 0


class Log:
    """The segments in `folder`, open for appending. `sync`: `flush` waits for the disk too.

    Raises `LedgerError` when the files cannot be used; a write that has failed is repeated by nobody, every later
    `flush` raises.
    """

    def __init__(self, folder: Path, *, sync: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self.sync, self._segment_bytes = folder, sync, segment_bytes
        self._segments: dict[int, _Segment] = {}
        self._live: dict[tuple[int, int], dict[int, int]] = {}
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._file = -1
        self._failure: LedgerError | None = None
        self._current = 0
        self.flushes = self.written_bytes = 0
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.found = self._open()
        except OSError as error:
            raise LedgerError(f"{folder}: the log cannot be opened: {error}") from error

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.n_bytes for segment in self._segments.values())

    @property
    def live_bytes(self) -> int:
        """Bytes of the records that were not forgotten."""
        return sum(segment.live_bytes for segment in self._segments.values())

    @property
    def n_segments(self) -> int:
        """Files."""
        return len(self._segments)

    def keep(self, segment: int, record: Record) -> None:
        """A record that was found counts; those that nobody keeps are dead."""
        self._count(record.kind, record.ordinal, segment, record.n_bytes)

    def append(
        self, kind: Kind, ordinal: int, attempt: int, part: int, header: Buffer, *payload: Buffer, lives: bool
    ) -> None:
        """Adds a record, to be written by `flush`; the bodies must not change until then. `lives`: until `forget`.

        Several payloads lie one behind the other in the record and are read as one. Raises `LedgerError` for one that
        is too long for a record.
        """
        bodies = [memoryview(body).cast("B") for body in (header, *payload)]
        crc, second = 0, sum(body.nbytes for body in bodies[1:])
        if second > MAX_BODY_BYTES:
            raise LedgerError(f"{Kind(kind).name.lower()} of task {ordinal}: {second} bytes, at most {MAX_BODY_BYTES}")
        for body in bodies:
            crc = zlib.crc32(body, crc)
        head = _HEAD.pack(MAGIC, kind, ordinal, attempt, part, bodies[0].nbytes, second, crc)
        n_bytes = HEAD_BYTES + bodies[0].nbytes + second
        self._pending += [head + _CRC.pack(zlib.crc32(head)), *bodies]
        self._pending_bytes += n_bytes
        self._segments[self._current].n_bytes += n_bytes
        if lives:
            self._count(kind, ordinal, self._current, n_bytes)

    def forget(self, kind: Kind, ordinal: int) -> None:
        """The records of this kind and task no longer count. They stay on disk until `tidy` after the next `flush`."""
        for segment, n_bytes in self._live.pop((kind, ordinal), {}).items():
            self._segments[segment].live_bytes -= n_bytes

    @property
    def due(self) -> bool:
        """Whether anything waits for `flush`."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether the next records belong into a new segment: call `roll`."""
        return self._segments[self._current].n_bytes >= self._segment_bytes

    def flush(self) -> None:
        """Writes what was appended, and waits for the disk if asked to."""
        if self._failure is not None:
            raise self._failure
        if not self._pending:
            return
        failpoint("log.append")
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        try:
            for start in range(0, len(pending), 512):
                _write_all(self._file, pending[start : start + 512])
            if self.sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.close(self._file)
            self._file = -1
            self._failure = LedgerError(f"{self._segments[self._current].path}: cannot be written: {error}")
            raise self._failure from error
        self.flushes += 1
        self.written_bytes += sum(memoryview(part).nbytes for part in pending)
        failpoint("log.written")

    def roll(self) -> None:
        """Begins a new segment; for the start of a turn, when nothing is pending."""
        self.flush()
        if self._file >= 0:
            os.close(self._file)
        self._current = max(self._segments, default=0) + 1
        path = self._folder / f"{self._current:08d}{_SUFFIX}"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self.sync:
                _sync_folder(self._folder)
        except OSError as error:
            raise LedgerError(f"{path}: cannot be made: {error}") from error
        self._segments[self._current] = _Segment(path)

    def tidy(self) -> None:
        """Deletes segments in which nothing lives; moves the oldest one's living records on when too much is dead.

        Only after the ledger is on disk: what it says is why records were forgotten.
        """
        for number in [n for n, segment in self._segments.items() if n != self._current and segment.live_bytes == 0]:
            self._delete(number)
        oldest = min(self._segments)
        if oldest != self._current and self.n_bytes > 2 * self.live_bytes + 4 * self._segment_bytes:
            self._move_on(oldest)

    def close(self, *, remove: bool = False) -> None:
        """Flushes and closes; `remove`: deletes all files, too."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1
        if remove:
            for segment in self._segments.values():
                segment.path.unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()

    def _count(self, kind: int, ordinal: int, segment: int, n_bytes: int) -> None:
        places = self._live.setdefault((kind, ordinal), defaultdict(int))
        places[segment] += n_bytes
        self._segments[segment].live_bytes += n_bytes

    def _delete(self, number: int) -> None:
        segment = self._segments.pop(number)
        for key in [key for key, places in self._live.items() if number in places] if segment.live_bytes else []:
            del self._live[key][number]
        segment.path.unlink(missing_ok=True)

    def _move_on(self, number: int) -> None:
        found = Found()
        for record in _read(self._segments[number].path, found):
            places = self._live.get((record.kind, record.ordinal), {})
            if number in places:
                kind = Kind(record.kind)
                self.append(
                    kind, record.ordinal, record.attempt, record.part, record.header, record.payload, lives=True
                )
        self.flush()
        self._delete(number)

    def _open(self) -> Found:
        found = Found()
        paths = sorted(path for path in self._folder.glob(f"*{_SUFFIX}") if _NUMBER.fullmatch(path.stem))
        for path in paths:
            number = int(path.stem)
            self._segments[number] = _Segment(path, path.stat().st_size)
            last = path == paths[-1]
            found.records += [(number, record) for record in _read(path, found, may_be_torn=last)]
            if last and found.cut_bytes:
                self._segments[number].n_bytes -= found.cut_bytes
                os.truncate(path, self._segments[number].n_bytes)
        self.roll()
        return found


def _read(path: Path, found: Found, *, may_be_torn: bool = False) -> Iterator[Record]:
    """The whole records of a segment; what is damaged goes to `found` in words."""
    data = memoryview(path.read_bytes())
    at, size = 0, len(data)
    while at < size:
        head = _head(data, at)
        end = at + HEAD_BYTES + head[4] + head[5] if head else size + 1
        if head and end <= size:
            middle = at + HEAD_BYTES + head[4]
            header, payload = data[at + HEAD_BYTES : middle], data[middle:end]
            if zlib.crc32(payload, zlib.crc32(header)) == head[6]:
                yield Record(head[0], head[1], head[2], head[3], header, payload, end - at)
                at = end
                continue
        after = _next(data, at + 1)
        if after is None and may_be_torn:
            found.cut_bytes = size - at
            return
        what = f"{_name(head[0])} of task {head[1]} attempt {head[2]}" if head else "a record"
        found.damage.append(f"{path} byte {at}: {what} is damaged")
        if after is None:
            return
        at = after


def _head(data: memoryview, at: int) -> tuple[int, int, int, int, int, int, int] | None:
    """Kind, ordinal, attempt, part, two lengths and crc; None when there is no whole head."""
    if at + HEAD_BYTES > len(data) or data[at : at + 4] != MAGIC:
        return None
    head = data[at : at + _HEAD.size]
    if zlib.crc32(head) != _CRC.unpack_from(data, at + _HEAD.size)[0]:
        return None
    _, kind, ordinal, attempt, part, first, second, crc = _HEAD.unpack(head)
    return kind, ordinal, attempt, part, first, second, crc


def _next(data: memoryview, at: int) -> int | None:
    """Where the next whole head is."""
    raw = bytes(data[at:])
    place = raw.find(MAGIC)
    while place >= 0:
        if _head(data, at + place) is not None:
            return at + place
        place = raw.find(MAGIC, place + 1)
    return None


def _name(kind: int) -> str:
    return Kind(kind).name.lower() if kind in list(Kind) else f"record of kind {kind}"


def _write_all(file: int, parts: list[Buffer]) -> None:
    left = [memoryview(part) for part in parts if memoryview(part).nbytes]
    while left:
        written = os.writev(file, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left and written:
            left[0] = left[0][written:]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
