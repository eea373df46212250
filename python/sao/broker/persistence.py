"""The broker's persistence: its ledger, and beside it in the same journal what else must outlive the broker.

That is the trajectories that are ready or with the learner, the turns of rollouts that run, which attempts have ended,
and a note of all else (versions, leases, evaluation, the last step's metrics). A turn of the broker's loop is one
transaction, `commit`: a broker that was killed is found as it was after a turn, never in the middle of one. Frames live
as long as the ledger's task needs them; nobody has to delete any.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from sao import _core
from sao.config import Config
from sao.errors import LedgerError
from sao.storage import checkpoints
from sao.storage.failpoints import failpoint
from sao.transport.messages import Buffer

log = logging.getLogger(__name__)
JOURNAL: Final = "journal"  # the folder in the run folder


@dataclass
class Found:
    """What an earlier broker has left."""

    trajectories: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Task -> header, payload, sidecars."""
    note: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    """Whether its generators and its learner are still there."""
    damage: list[str] = field(default_factory=list)
    """What cannot be read, by file and byte."""
    resumed: int | None = None
    """The step that the learner goes on after, when it has lost later ones."""
    taken_back: list[dict[str, Any]] = field(default_factory=list)
    """Those steps, newest first."""


@dataclass(slots=True)
class Prefix:
    """The turns of a rollout that runs: (header, payload) of each, their tokens, the newest version in them."""

    turns: list[tuple[bytes, bytes]] = field(default_factory=list)
    n_tokens: int = 0
    version: int = 0
    n_bytes: int = 0


class Persistence:
    """The ledger of a broker, and what is kept beside it."""

    def __init__(self, ledger: Any, *, frames: bool = False, sync: bool = False, prefix_bytes: int = 1 << 26) -> None:
        """`frames`: trajectories and turns are written, too. `sync`: every turn of the loop waits for the disk.
        `prefix_bytes`: of all turns that are kept; a rollout that finds no room is begun anew should it be lost.
        """
        self.ledger, self.found = ledger, Found()
        self.prefixes: dict[int, Prefix] = {}
        self.prefix_bytes, self._prefix_limit = 0, prefix_bytes
        self._frames, self._sync, self._settling = frames, sync, False
        self._note = b""
        self._checkpoints: Path | None = None

    @classmethod
    def open(
        cls, config: Config, run_folder: Path, resume_step: int | None = None, line: int | None = None
    ) -> Persistence:
        """The journal of the run in this folder, and what is found in it.

        `resume_step`: the learner has lost later steps, which are taken back, unless a broker before this one has done
        so already for the same `line`, which numbers such returns. Raises `LedgerError`.
        """
        limits = config.buffer
        size = {"segment_bytes": limits.ledger_growth_bytes} if limits.ledger_growth_bytes else {}
        ledger = _core.Ledger(run_folder / JOURNAL, **size)
        durable = limits.durability != "off"
        self = cls(ledger, frames=durable, sync=limits.durability == "machine", prefix_bytes=limits.prefix_bytes)
        try:
            if limits.ledger_growth_bytes:
                self._checkpoints = run_folder / "checkpoints"
            found = self.found
            found.note = msgpack.unpackb(ledger.note, strict_map_key=False) if ledger.note and durable else {}
            found.resumed = None if found.note and found.note["line"] == line else resume_step
            if found.resumed is not None:
                found.taken_back = ledger.rewind(found.resumed)
                ledger.flush()
                failpoint("ledger.rewound")
            found.goes_on = found.resumed is None and bool(found.note)
            found.damage = ledger.damage
            self._read()
        except BaseException:
            ledger.close()
            raise
        return self

    def _read(self) -> None:
        for ordinal, _, phase in self.ledger.unfinished():
            frames = self.ledger.frames(ordinal)
            if frames and phase in ("ready", "leased"):
                self.found.trajectories[ordinal] = frames[0]
            elif self._prefix_limit:
                for numbers, header, payload in frames:
                    n_tokens, version = msgpack.unpackb(numbers)
                    self._keep_turn(ordinal, n_tokens, version, header, payload)

    # -- what is kept

    def trajectory(self, ordinal: int, frames: Sequence[Buffer]) -> None:
        """A finished trajectory was taken: header, payload, sidecars; its turns are in it."""
        if self._frames:
            self.ledger.trajectory(ordinal, frames)
        self.forget_turns(ordinal)

    def turn(self, ordinal: int, part: int, n_tokens: int, version: int, header: Buffer, payload: Buffer) -> None:
        """Turn number `part` of a rollout that runs; one that does not follow the last one is left out."""
        turn = bytes(header), bytes(payload)
        kept = self.prefixes.get(ordinal)
        if part == 0 and kept and kept.turns[0] != turn:
            self.begin_anew(ordinal)
        n_turns = len(self.prefixes[ordinal].turns) if ordinal in self.prefixes else 0
        if part != n_turns:
            return
        if self.prefix_bytes + len(turn[0]) + len(turn[1]) > self._prefix_limit:
            self.begin_anew(ordinal)
            return
        self._keep_turn(ordinal, n_tokens, version, *turn)
        if self._frames:
            self.ledger.turn(ordinal, part, (msgpack.packb((n_tokens, version)), *turn))

    def begin_anew(self, ordinal: int) -> int:
        """What was kept of this rollout does not count any more; returns its tokens."""
        n_tokens = self.prefix_tokens(ordinal)
        if ordinal in self.prefixes:
            self.ledger.begin_anew(ordinal)
        self.forget_turns(ordinal)
        return n_tokens

    def prefix_tokens(self, ordinal: int) -> int:
        """Sampled tokens in the turns that are kept of this rollout."""
        return self.prefixes[ordinal].n_tokens if ordinal in self.prefixes else 0

    def forget_turns(self, ordinal: int) -> None:
        """The rollout is over."""
        if prefix := self.prefixes.pop(ordinal, None):
            self.prefix_bytes -= prefix.n_bytes

    def _keep_turn(self, ordinal: int, n_tokens: int, version: int, header: bytes, payload: bytes) -> None:
        prefix = self.prefixes.setdefault(ordinal, Prefix())
        prefix.turns.append((header, payload))
        prefix.n_tokens, prefix.version = prefix.n_tokens + n_tokens, max(prefix.version, version)
        prefix.n_bytes += len(header) + len(payload)
        self.prefix_bytes += len(header) + len(payload)

    # -- turns of the loop

    def settle(self) -> None:
        """Has the next `commit` wait for the disk."""
        self._settling = True

    def commit(self, note: dict[str, Any]) -> None:
        """Makes all of this durable in one transaction. Raises `LedgerError` when it cannot; that is final."""
        settling, self._settling = self._settling, False
        if self._frames and (packed := msgpack.packb(note)) != self._note:
            self.ledger.note = self._note = packed
        due = self.ledger.due
        if due:
            failpoint("journal.append")
        if settling:
            failpoint("ledger.append")
        if settling or self._sync:
            self.ledger.sync()
        else:
            self.ledger.flush()
        if due:
            failpoint("journal.written")
        if settling:
            failpoint("ledger.synced")
        if self.ledger.full:
            # A run may be resumed after any checkpoint, whose own step must be listed then, and all later ones.
            steps = checkpoints.steps(self._checkpoints) if self._checkpoints else {}
            self._roll(max(0, min(steps, default=0) - 1))

    def _roll(self, upto: int) -> None:
        before = self.ledger.n_bytes
        try:
            self.ledger.roll(upto)
        except LedgerError as error:
            log.warning("the journal stays long: %s", error)
            return
        log.info("journal: %d bytes became %d, steps up to %d are summed up", before, self.ledger.n_bytes, upto)

    def close(self, *, ended: bool = False) -> None:
        """Closes the journal; `ended`: nobody goes on, and nothing but the ledger is needed any more."""
        if ended:
            self._roll(0)
        self.ledger.close()
