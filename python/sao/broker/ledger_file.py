"""The ledger's file, kept short: steps that no checkpoint can go back to are folded into a picture of the state.

A run may be resumed after any checkpoint that is kept, and its learner after a death as well: the oldest one must find
its own step and all later ones listed (`runtime.resume`). Everything before can go.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sao.errors import LedgerError
from sao.storage import checkpoints

log = logging.getLogger(__name__)


class LedgerFile:
    """`ledger.log` in the run folder, open as `ledger`; it may grow by `growth_bytes` (0: without end)."""

    def __init__(self, ledger: Any, run_folder: Path, growth_bytes: int) -> None:
        self._ledger, self._path = ledger, run_folder / "ledger.log"
        self._checkpoints, self._growth = run_folder / "checkpoints", growth_bytes
        self._limit, self._upto = growth_bytes, 0
        self._path.with_name(f"{self._path.name}.compacting").unlink(missing_ok=True)  # of a broker that was killed

    def due(self) -> int:
        """The step up to which the file may be folded, 0 while it is short or no other checkpoint has become the
        oldest since the last time.
        """
        if not self._growth or self._path.stat().st_size < self._limit:
            return 0
        upto = min(checkpoints.steps(self._checkpoints), default=0) - 1
        return upto if upto > self._upto else 0

    def fold(self, upto: int) -> None:
        """Folds all up to this step; everything else that is durable must be on disk. A file that cannot be made short
        stays as it is, the run goes on.
        """
        self._upto = upto
        try:
            before, after = self._ledger.compact(upto)
        except LedgerError as error:
            log.warning("the ledger stays long: %s", error)
            return
        self._limit = after + self._growth
        log.info("%s: %d bytes folded to %d, steps up to %d are one picture", self._path, before, after, upto)
