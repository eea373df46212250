"""The folders of a run: its own, and two private ones outside it (sockets, weights in shared memory) that never stay.

Both private folders are called `sao-...`, have mode 0700 and hold a file `owner` (process id and start time). A run
removes its own; what a killed run left is found by `stale` and removed by the next `sao train` or `sao doctor`.
"""

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sao.errors import ConfigError
from sao.storage.ownership import OWNER, PREFIX, own, owner
from sao.transport.sockets import private_folder

SHARED_MEMORY = Path("/dev/shm")
HOLD_S = 30.0  # for processes of an earlier start to end
SOCKETS = Path("/tmp")  # not TMPDIR: a socket's path may have 107 bytes at most


class Private(NamedTuple):
    """The private folders of a run."""

    sockets: Path
    weights: Path


@contextmanager
def private(run_folder: Path, weights_bytes: int = 0) -> Iterator[Private]:
    """Makes the private folders and removes them at the end.

    Weights go to the run folder where shared memory has less than `weights_bytes` free, or is not there.
    """
    weights = SHARED_MEMORY if free_bytes(SHARED_MEMORY) > weights_bytes else run_folder
    with ExitStack() as stack:
        made = []
        for base in (sockets_base(), weights):
            folder = private_folder(PREFIX, str(base))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            own(folder)
            made.append(folder)
        yield Private(*made)


def sockets_base() -> Path:
    """The folder in which private folders for sockets are made."""
    return SOCKETS if os.access(SOCKETS, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def free_bytes(folder: Path) -> int:
    """Bytes that this user may write into a folder; 0 into one that is absent."""
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else 0


def make_run_folder(folder: Path, *, overwrite: bool) -> None:
    """Makes the run folder. Raises `ConfigError` if it exists, is not empty and may not be emptied.

    Only a folder that holds a run (its config.json) is ever emptied.
    """
    if fault := run_folder_fault(folder, overwrite=overwrite):
        raise ConfigError(fault)
    if folder.exists():
        lock = hold(folder)
        try:  # another start may have had it meanwhile, emptied it and made its own in its place
            replaced = not os.path.samestat(os.fstat(lock), folder.stat()) if folder.exists() else False
            fault = run_folder_fault(folder, overwrite=overwrite)
            if replaced or fault:
                raise ConfigError(fault or f"run.name: {folder} is in use: another start has just made it")
            if folder.exists():
                shutil.rmtree(folder)
        finally:
            os.close(lock)
    try:
        (folder / "logs").mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"run.name: {folder} is in use: another start has just made it") from None
    own(folder)


def run_folder_fault(folder: Path, *, overwrite: bool) -> str | None:
    """The reason why `folder` cannot become the folder of a new run, or None. Touches nothing."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"run.name: {folder} exists and is not a folder"
    if not any(folder.iterdir()):
        return None
    if pid := owner(folder):
        return f"run.name: {folder} is in use by process {pid}"
    if _barely_begun(folder):
        return None
    if not overwrite:
        return f"run.name: {folder} exists; choose another run.name or pass --overwrite"
    if not (folder / "config.json").is_file():
        return f"run.name: {folder} holds no run (no config.json), so it is not overwritten"
    return None


def _barely_begun(folder: Path) -> bool:
    """Whether there is nothing but what a start leaves that has failed before it wrote its configuration."""
    names, logs = {path.name for path in folder.iterdir()}, folder / "logs"
    left = {name for name in names if not name.startswith((OWNER, f".{OWNER}-"))}
    return left <= {"logs", ".config.json.new"} and not (logs.is_dir() and any(logs.iterdir()))


def hold(
    folder: Path,
    wait_s: float = HOLD_S,
    on_wait: Callable[[], None] = lambda: None,
    on_unlocked: Callable[[str], None] = lambda text: None,
) -> int:
    """Locks the folder for this process and the children that inherit the handle; returns the handle, to be closed.

    What an earlier start has left running (its supervisor was killed) holds the folder until it has ended: that is
    waited for, after one call of `on_wait`. Where there are no locks `on_unlocked` is told, and nothing is waited for.
    Raises `ConfigError` when it has not ended after `wait_s`.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + wait_s
    for attempt in itertools.count():
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if attempt == 0:
                on_wait()
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        except OSError as error:
            on_unlocked(f"{folder} cannot be locked ({error.strerror}): another start in it would not be noticed")
            return handle
    os.close(handle)
    text = f"processes of an earlier start have not ended within {wait_s:g} s"
    raise ConfigError(f"run.name: {folder} is in use: {text}")


def stale() -> list[Path]:
    """Private folders of this user whose owner is dead. A folder without an owner file is not ours to judge."""
    found = []
    for base in dict.fromkeys((SHARED_MEMORY, SOCKETS, Path(tempfile.gettempdir()))):  # the last one is also vLLM's
        for folder in sorted(base.glob(f"{PREFIX}*")) if base.is_dir() else []:
            with suppress(FileNotFoundError):  # another process was faster
                status = folder.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and owner(folder) == 0:
                    found.append(folder)
    return found


def remove_stale() -> list[Path]:
    """Removes what `stale` finds and returns it."""
    found = stale()
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return found
