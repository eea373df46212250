"""File systems: their kind, and whether one does what a run needs of it, found by trying."""

import ctypes
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_KINDS: Final = {
    **{0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0x01021994: "tmpfs"},
    **{
        0x794C7630: "overlay",
        0x61756673: "aufs",
        0x6969: "nfs",
        0xFF534D42: "cifs",
        0xFE534D42: "smb",
        0x01021997: "9p",
    },
    **{0x65735546: "fuse", 0x0BD00BD0: "lustre", 0x47504653: "gpfs", 0x00C36400: "ceph", 0x73717368: "squashfs"},
}


def kind(folder: Path) -> str:
    """The kind of the file system by its magic number, which is given where it is not known; `unknown` without one."""
    found = (ctypes.c_long * 64)()  # struct statfs begins with it
    try:
        if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), ctypes.byref(found)):
            return "unknown"
    except AttributeError:
        return "unknown"
    magic = found[0] & 0xFFFFFFFF
    return _KINDS.get(magic, f"kind {magic:#x}")


def faults(folder: Path) -> list[str]:
    """What a folder's file system does not do: files and folders are written, locked, renamed and synced in a folder
    that is gone afterwards.
    """
    try:
        tried = Path(tempfile.mkdtemp(prefix=".sao-tried-", dir=folder))
    except OSError as error:
        return [f"cannot be written by user {os.getuid()}: {error.strerror}"]
    found = []
    try:
        for text, attempt in _NEEDED.items():
            try:
                attempt(tried)
            except OSError as error:
                found.append(f"{text}: {error.strerror}")
    finally:
        shutil.rmtree(tried, ignore_errors=True)
    return found


def _write(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(4096))
    with (folder / "file").open("rb+") as file:
        os.fsync(file.fileno())


def _lock(folder: Path) -> None:
    for path, flags in ((folder, os.O_RDONLY), (folder / "file", os.O_RDWR | os.O_CREAT)):
        descriptor = os.open(path, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


def _rename(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).write_bytes(name.encode())
    (folder / "one").replace(folder / "two")
    if (folder / "two").read_bytes() != b"one" or (folder / "one").exists():
        raise OSError(0, "the new file is not in the place of the old one")
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_bytes(b"")
    (folder / "inner").rename(folder / "outer")


_NEEDED: Final = {"files cannot be written": _write, "no file locks (flock)": _lock, "no renaming into place": _rename}
