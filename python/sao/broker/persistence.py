"""The broker's persistence: its ledger, and beside it in the same journal what else must outlive the broker.

That is the trajectories that are ready or with the learner, the turns of rollouts that run, which attempts have ended,
and a note of all else (versions, leases, evaluation, the last step's metrics). A turn of the broker's loop is one
transaction, `commit`: a broker that was killed is found as it was after a turn, never in the middle of one. Frames live
as long as the ledger's task needs them; nobody has to delete any.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from sao import _core
from sao.config import Config
from sao.errors import LedgerError
from sao.storage import checkpoints
from sao.storage.durable import patiently
from sao.storage.failpoints import failpoint

log = logging.getLogger(__name__)
JOURNAL: Final = "journal"  # the folder in the run folder


class Persistence:
    """The ledger of a broker, what an earlier one has left, and when what is decided comes to the disk."""

    def __init__(
        self,
        ledger: Any,
        *,
        frames: bool = False,
        sync: bool = False,
        prefix_bytes: int = 1 << 26,
        patience_s: float = 0.0,
    ) -> None:
        """`frames`: trajectories and turns are to be written, too. `sync`: every turn of the loop waits for the disk.
        `prefix_bytes`: of all turns that are kept. `patience_s`: how long a write that fails is tried again.
        """
        self.ledger, self.frames, self.prefix_bytes, self._patience_s = ledger, frames, prefix_bytes, patience_s
        self._sync, self._settling = sync, False
        self._checkpoints: Path | None = None
        self.note: dict[str, Any] = {}
        """The last state that an earlier broker wrote, whose peers are still there; empty when there is none."""
        self.resumed: int | None = None
        """The step that the learner goes on after, when it has lost later ones."""
        self.taken_back: list[dict[str, Any]] = []
        """Those steps, newest first."""

    @classmethod
    def open(
        cls, config: Config, run_folder: Path, resume_step: int | None = None, line: int | None = None
    ) -> "Persistence":
        """The journal of the run in this folder, and what is found in it.

        `resume_step`: the learner has lost later steps, which are taken back, unless a broker before this one has done
        so already for the same `line`, which numbers such returns. Raises `LedgerError`.
        """
        limits = config.buffer
        size = {"segment_bytes": limits.ledger_growth_bytes} if limits.ledger_growth_bytes else {}
        ledger = _core.Ledger(run_folder / JOURNAL, **size)
        durable = limits.durability != "off"
        sync, patience_s = limits.durability == "machine", config.run.disk_patience_s
        self = cls(ledger, frames=durable, sync=sync, prefix_bytes=limits.prefix_bytes, patience_s=patience_s)
        if limits.ledger_growth_bytes:
            self._checkpoints = run_folder / "checkpoints"
        try:
            self.note = msgspec.msgpack.decode(ledger.note) if ledger.note and durable else {}
            if resume_step is not None and not (self.note and self.note["line"] == line):
                self.note, self.resumed = {}, resume_step
                self.taken_back = ledger.rewind(resume_step)
                self.write(ledger.flush)
                failpoint("ledger.rewound")
        except BaseException:
            ledger.close()
            raise
        return self

    def settle(self) -> None:
        """Has the next `commit` wait for the disk."""
        self._settling = True

    def write(self, call: Callable[[], None]) -> None:
        """Makes a call that writes to the journal; it is made again while the disk fails, for `patience_s` once.

        Raises `LedgerError` that names file and fault. That is final.
        """

        def again() -> None:
            self.ledger.mend()  # nothing, the first time
            call()

        try:
            patiently(again, self._patience_s)
        except LedgerError:
            self._patience_s = 0.0
            raise

    def commit(self, note: dict[str, Any]) -> None:
        """Makes all of this durable in one transaction. Raises `LedgerError` when it cannot; that is final."""
        settling, self._settling = self._settling, False
        if self.frames and (packed := msgspec.msgpack.encode(note)) != self.ledger.note:
            self.ledger.note = packed
        due = self.ledger.due
        if due:
            failpoint("journal.append")
        if settling:
            failpoint("ledger.append")
        self.write(self.ledger.sync if settling or self._sync else self.ledger.flush)
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
            if self.ledger.broken:
                self.write(lambda: None)  # `mend`, or the end
            return
        log.info("journal: %d bytes became %d, steps up to %d are summed up", before, self.ledger.n_bytes, upto)

    def close(self, *, ended: bool = False) -> None:
        """Closes the journal; `ended`: nobody goes on, and nothing but the ledger is needed any more."""
        if ended:
            self._roll(0)
        self.ledger.close()
