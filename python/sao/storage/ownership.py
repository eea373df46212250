"""Owners of folders: a file `owner` names the owner, so that what a killed process left can be removed.

The owner holds a lock on that file. The kernel releases it with the process, whatever ended it, and knows it in every
container that shares the folder; process numbers and clocks mean nothing there. Where files cannot be locked nobody is
judged, and nothing is removed.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sao.errors import StorageError

PREFIX: Final = "sao-"  # how the names of such folders begin
OWNER: Final = "owner"
_held: dict[Path, int] = {}  # folders of this process -> descriptors that hold the locks


def own(folder: Path) -> None:
    """Makes the folder ours until this process ends or disowns it. Its file appears locked. Raises `StorageError`."""
    path = folder / OWNER
    temporary = folder / f".{OWNER}-{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # no locks on this file system: `owner` will not judge it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps({"process": os.getpid()}).encode())
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    if (before := _held.get(path)) is not None:
        os.close(before)
    _held[path] = descriptor


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
    path = folder / OWNER
    path.unlink(missing_ok=True)
    if (descriptor := _held.pop(path, None)) is not None:
        os.close(descriptor)


def owner(folder: Path) -> int | None:
    """Process id of the living owner (in its own container), 0 of a dead one, None where that cannot be known."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        process = int(json.loads(os.read(descriptor, 1 << 12))["process"])
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return process
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)
