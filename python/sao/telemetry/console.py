"""A console whose reader may leave."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console


class SteadyConsole(Console):
    """Rich's, which ends the program when the reader of a pipe has gone (`sao train run.toml | head`); here the program
    goes on, and what it says from then on goes nowhere. That is told once, on standard error.
    """

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in its buffer must not fail at exit
        os.close(nowhere)
        with suppress(OSError):
            print("nobody reads the output any more; the run goes on, see its folder", file=sys.stderr, flush=True)
