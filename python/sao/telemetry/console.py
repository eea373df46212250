"""A console whose reader may leave, and whose disk may be full."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console


class SteadyConsole(Console):
    """Rich's, which ends the program when the reader of a pipe has gone (`sao train run.toml | head`); here the program
    goes on, and what it says from then on goes nowhere. That is told once, on standard error. The same holds for a file
    that cannot be written any more.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._silence(f"the output cannot be written any more ({error.strerror})")

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        self._silence("nobody reads the output any more")

    def _silence(self, why: str) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in its buffer must not fail at exit
        os.close(nowhere)
        with suppress(OSError):
            print(f"{why}; the run goes on, see its folder", file=sys.stderr, flush=True)
