"""What the broker remembers on disk beside the ledger, and what an earlier broker of the same run has left.

Trajectories that are ready or with the learner, the turns of rollouts that run, which attempts have ended, and a note
of all else (versions, leases, evaluation, the last step's metrics). `commit` makes a turn of the loop durable: first
the log, then the ledger, which is the word that counts. What the log has and the ledger does not know of was never said
to anyone; at a restart it is brought in line with the ledger.
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from sao import _core
from sao.broker.wal import Kind, Log, Record
from sao.config import Config
from sao.storage.failpoints import failpoint
from sao.transport.messages import Buffer

ANSWERED: Final = 1 << 14  # attempts that are remembered to have ended; more than all generators have slots


@dataclass
class Past:
    """What an earlier broker has left, as far as the ledger confirms it."""

    trajectories: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Task -> header, payload, sidecars."""
    note: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    """Whether its generators and its learner are still there."""
    damage: list[str] = field(default_factory=list)
    n_bytes: int = 0


@dataclass(slots=True)
class Prefix:
    """The turns of a rollout that runs: (header, payload) of each, their tokens, the newest version in them. mark: a
    checksum over all of them.
    """

    turns: list[tuple[bytes, bytes]] = field(default_factory=list)
    n_tokens: int = 0
    version: int = 0
    n_bytes: int = 0
    mark: int = 0


class Memory:
    """The log of a broker, or none (`log` is None): then only what helps while the process lives is remembered."""

    def __init__(self, log: Log | None, ledger: Any, *, goes_on: bool = False, prefix_bytes: int = 1 << 26) -> None:
        """`goes_on`: the broker before this one was killed, its generators and its learner are still there.
        `prefix_bytes`: of all turns that are kept; a rollout that finds no room is begun anew should it be lost.
        """
        self.prefixes: dict[int, Prefix] = {}
        self.prefix_bytes, self._prefix_limit = 0, prefix_bytes
        self.log, self._ledger = log, ledger
        self._answered: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._new_answers: list[int] = []
        self._note = b""
        self._settling, self._wait = False, log is not None and log.sync
        self.past = Past() if log is None else self._read(log)
        self.past.goes_on = goes_on and log is not None and (bool(self.past.note) or bool(ledger.last_step))

    def trajectory(self, ordinal: int, attempt: int, frames: Sequence[Buffer]) -> None:
        """A finished trajectory was taken: header, payload, sidecars; its turns are in it."""
        if self.log is not None:
            self.log.append(Kind.TRAJECTORY, ordinal, attempt, 0, *frames, lives=True)
        self._drop_turns(ordinal)

    def turn(
        self, ordinal: int, attempt: int, part: int, n_tokens: int, version: int, header: Buffer, payload: Buffer
    ) -> None:
        """Turn number `part` of a rollout that runs; one that does not follow the last one is left out."""
        if part == 0:
            self._drop_turns(ordinal)
        known = len(self.prefixes[ordinal].turns) if ordinal in self.prefixes else 0
        if part != known:
            return
        if self.prefix_bytes + memoryview(header).nbytes + memoryview(payload).nbytes > self._prefix_limit:
            self.begin_anew(ordinal, attempt)
            return
        behind = self._behind(ordinal)
        self._keep_turn(ordinal, n_tokens, version, bytes(header), bytes(payload))
        if self.log is not None:
            head = msgpack.packb([n_tokens, version, bytes(header), behind])
            self.log.append(Kind.TURN, ordinal, attempt, part, head, payload, lives=True)

    def begin_anew(self, ordinal: int, attempt: int) -> int:
        """What was kept of this rollout does not count any more; returns its tokens."""
        n_tokens = self.prefix_tokens(ordinal)
        self._drop_turns(ordinal)
        if n_tokens and self.log is not None:
            self.log.append(Kind.TURN, ordinal, attempt, 0, b"", lives=True)
        return n_tokens

    def prefix_tokens(self, ordinal: int) -> int:
        """Sampled tokens in the turns that are kept of this rollout."""
        return self.prefixes[ordinal].n_tokens if ordinal in self.prefixes else 0

    def gone(self, ordinal: int, *, turns: bool = True) -> None:
        """The task is finished, or what was sampled for it does not count any more; `turns`: those neither."""
        if self.log is not None:
            self.log.forget(Kind.TRAJECTORY, ordinal)
        if turns:
            self._drop_turns(ordinal)

    def answered(self, ordinal: int, attempt: int) -> bool:
        """Notes that this attempt has ended; false when that was heard before."""
        if (ordinal, attempt) in self._answered:
            return False
        self._answered[ordinal, attempt] = None
        while len(self._answered) > ANSWERED:
            self._answered.popitem(last=False)
        self._new_answers += (ordinal, attempt)
        return True

    def settle(self) -> None:
        """Has the ledger wait for the disk: now, or with the next `commit` where there is a log, which is first."""
        self._settling = True
        if self.log is None:
            self._bring_down()

    def commit(self, note: dict[str, Any]) -> None:
        """Makes all of this durable, and the ledger with it: one write each. Raises `LedgerError` when it cannot."""
        if self.log is None:
            self._new_answers.clear()
            return
        packed = msgpack.packb(note)
        if self._new_answers:
            self._append(Kind.ANSWERED, msgpack.packb(self._new_answers))
            self._new_answers.clear()
        if packed != self._note:
            self._append(Kind.NOTE, packed)
            self._note = packed
        if self.log.due:
            self.log.flush()
        self._bring_down()
        self.log.tidy()
        if self.log.full:  # a new segment begins with all that counts of older ones, which may be deleted then
            self.log.roll()
            self._append(Kind.NOTE, packed)
            self._append(Kind.ANSWERED, msgpack.packb(list(itertools.chain.from_iterable(self._answered))))

    def _bring_down(self) -> None:
        settling, self._settling = self._settling, False
        if settling:
            failpoint("ledger.append")
        if settling or self._wait:
            self._ledger.sync()
        else:
            self._ledger.flush()
        if settling:
            failpoint("ledger.synced")

    def close(self, *, remove: bool = False) -> None:
        """Closes the log; `remove`: nobody needs it any more."""
        if self.log is not None:
            self.log.close(remove=remove)

    def _keep_turn(self, ordinal: int, n_tokens: int, version: int, header: bytes, payload: bytes) -> None:
        prefix = self.prefixes.setdefault(ordinal, Prefix())
        prefix.turns.append((header, payload))
        prefix.n_tokens, prefix.version = prefix.n_tokens + n_tokens, max(prefix.version, version)
        prefix.n_bytes += len(header) + len(payload)
        prefix.mark = zlib.crc32(payload, zlib.crc32(header, prefix.mark))
        self.prefix_bytes += len(header) + len(payload)

    def _behind(self, ordinal: int) -> int:
        """Of which turns the next one is a continuation: a number over all that are kept of the rollout. A record that
        continues others, of the same attempt before it was begun anew, is told by it and does not count.
        """
        return self.prefixes[ordinal].mark if ordinal in self.prefixes else 0

    def _drop_turns(self, ordinal: int) -> None:
        prefix = self.prefixes.pop(ordinal, None)
        if prefix is not None:
            self.prefix_bytes -= prefix.n_bytes
        if self.log is not None:
            self.log.forget(Kind.TURN, ordinal)

    def _append(self, kind: Kind, body: bytes) -> None:
        assert self.log is not None
        self.log.append(kind, 0, 0, 0, body, lives=False)

    def _read(self, log: Log) -> Past:
        found, past = log.found, Past(damage=log.found.damage)
        unfinished = {ordinal: (attempt, phase) for ordinal, attempt, phase in self._ledger.unfinished()}
        notes: list[memoryview] = []
        turns: defaultdict[int, dict[int, tuple[int, Record]]] = defaultdict(dict)
        trajectories: dict[int, tuple[int, Record]] = {}
        for segment, record in found.records:
            attempt, phase = unfinished.get(record.ordinal, (-1, ""))
            if record.kind == Kind.NOTE:
                notes.append(record.header)
            elif record.kind == Kind.ANSWERED:
                numbers = msgpack.unpackb(record.header)
                for pair in zip(numbers[::2], numbers[1::2], strict=True):
                    self._answered[pair] = None
            elif record.kind == Kind.TRAJECTORY:
                turns.pop(record.ordinal, None)  # they are in it, whatever becomes of it
                if record.attempt == attempt and phase != "requeued":
                    trajectories[record.ordinal] = (segment, record)
                    past.trajectories[record.ordinal] = whole(bytes(record.header), record.payload)
            elif record.kind == Kind.TURN and attempt >= 0:
                known = turns[record.ordinal].get(record.part)
                if known is None or known[1].attempt <= record.attempt:
                    turns[record.ordinal][record.part] = (segment, record)
        for segment, record in trajectories.values():
            log.keep(segment, record)
            self._answered[record.ordinal, record.attempt] = None
        for ordinal, parts in turns.items() if self._prefix_limit else ():
            for segment, record in _chain(parts) if ordinal not in trajectories else ():
                if record.header.nbytes:
                    n_tokens, version, header, behind = msgpack.unpackb(record.header)
                    if behind != self._behind(ordinal):
                        break
                    self._keep_turn(ordinal, n_tokens, version, header, bytes(record.payload))
                log.keep(segment, record)
        for ordinal, (attempt, phase) in unfinished.items():
            if phase in ("issued", "generating") and ordinal not in trajectories:
                self._answered.pop((ordinal, attempt), None)  # of this end the ledger has not heard
        while len(self._answered) > ANSWERED:
            self._answered.popitem(last=False)
        # Once more into the newest segment: those that they were read from may be deleted after the first commit.
        self._new_answers += itertools.chain.from_iterable(self._answered)
        past.note = self._last_note(notes)
        past.n_bytes = sum(record.n_bytes for _, record in found.records)
        log.found = type(found)()
        return past

    def _last_note(self, notes: list[memoryview]) -> dict[str, Any]:
        """The newest note that does not run ahead of the ledger."""
        last_step = self._ledger.last_step or 0
        for body in reversed(notes):
            note: dict[str, Any] = msgpack.unpackb(body, strict_map_key=False)
            if note.get("ledger_step") == last_step:
                return note
        return {}


def _chain(parts: dict[int, tuple[int, Record]]) -> list[tuple[int, Record]]:
    """The turns from number 0 on, as long as none is missing or of an older attempt than the one before it. An empty
    number 0 has none behind it: the rollout was begun anew.
    """
    chain: list[tuple[int, Record]] = []
    for part in range(len(parts)):
        found = parts.get(part)
        if found is None or (chain and found[1].attempt < chain[-1][1].attempt):
            break
        chain.append(found)
        if not found[1].header.nbytes:
            break
    return chain


def whole(header: bytes, bodies: memoryview) -> tuple[bytes, ...]:
    """Header, payload and sidecars, copied out of the bodies that lie one behind the other."""
    facts = _core.summary(header)
    sizes = (facts["payload_bytes"], *facts["sidecars"].values())
    ends = list(itertools.accumulate(sizes, initial=0))
    return (header, *(bytes(bodies[a:b]) for a, b in itertools.pairwise(ends)))


def open_log(config: Config, run_folder: Path) -> Log | None:
    """The log of the run in this folder, None where the configuration wants none. Raises `LedgerError`."""
    durability = config.buffer.durability
    return None if durability == "off" else Log(run_folder / "wal", sync=durability == "machine")


def last_line(log: Log) -> int | None:
    """The number of the last return to an earlier step that a broker of this log has finished."""
    notes = [record.header for _, record in log.found.records if record.kind == Kind.NOTE]
    return msgpack.unpackb(notes[-1], strict_map_key=False).get("line") if notes else None
