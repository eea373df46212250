"""Durable writes: what must come to the disk is tried again for a while where the fault may pass, and a file of facts
is there whole, in its old or its new state. An error names file and fault.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Final, TypeVar

from sao.errors import StorageError

PASSING: Final = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "ENOMEM", "ETIMEDOUT")}
PAUSES_S: Final = (0.0, 0.1, 0.2, 0.5)  # before the next tries; then a second each
T = TypeVar("T")

log = logging.getLogger(__name__)


def may_pass(error: object) -> bool:
    """Whether the cause is a fault of a disk that may be over in a moment, by the number in the error's text."""
    return any(int(number) in PASSING for number in re.findall(r"(?:\(os error|\[Errno) (\d+)", str(error)))


def patiently(write: Callable[[], T], patience_s: float) -> T:
    """What `write` returns. It is called again while it raises what `may_pass`, for `patience_s` at most; then that is
    raised. What it has half done it must be able to do again.
    """
    deadline, failed = time.monotonic() + patience_s, False
    for pause_s in chain(PAUSES_S, repeat(1.0)):
        try:
            result = write()
        except Exception as error:
            if not may_pass(error) or time.monotonic() + pause_s > deadline:
                raise
            if not failed:
                log.warning("%s; tried again for up to %g s (run.disk_patience_s)", error, patience_s)
            failed = True
        else:
            if failed:
                log.warning("written after %.1f s", time.monotonic() - deadline + patience_s)
            return result
        time.sleep(pause_s)
    raise AssertionError("the pauses have no end")


def write_text(path: Path, text: str) -> None:
    """Puts `text` into the file, which keeps its content until all of the new is on the disk. Raises `StorageError`."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):  # the same disk
            beside.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
