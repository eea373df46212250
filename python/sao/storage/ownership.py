"""Owners of folders: a file `owner` says whose a folder is, so that what a killed process left can be removed.

An owner is a process: its number and its start time, since numbers come again.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

PREFIX: Final = "sao-"  # how the names of such folders begin
OWNER: Final = "owner"


def own(folder: Path) -> None:
    """Writes who we are into the folder."""
    (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "started_s": psutil.Process().create_time()}))


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Within it the folder is ours."""
    own(folder)
    try:
        yield
    finally:
        disown(folder)


def disown(folder: Path) -> None:
    """Removes the owner file."""
    (folder / OWNER).unlink(missing_ok=True)


def owner(folder: Path) -> int | None:
    """Process id of the living owner, 0 of a dead one, None where there is no readable owner file."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        process = psutil.Process(int(owner["pid"]))
        return process.pid if abs(process.create_time() - float(owner["started_s"])) < 1.0 else 0
    except psutil.NoSuchProcess:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
