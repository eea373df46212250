"""Durable writes; what whole runs do on a faulty disk is in `tests/faults`."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time

import pytest

from sao.errors import LedgerError, StorageError
from sao.storage.durable import may_pass, patiently, write_text


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/disk/file"), True),
        (LedgerError("/r/journal/00000001.journal: cannot be written: Disk quota exceeded (os error 122)"), True),
        ("rank 1: OSError: [Errno 28] No space left on device; rank 0: CheckpointError: no", True),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), False),
        (LedgerError("task 28 is not ready"), False),
        (ValueError("28"), False),
    ],
)
def test_a_full_disk_may_pass_and_a_read_only_one_does_not(error, passes):
    assert may_pass(error) is passes


def test_a_write_is_made_again_until_the_disk_has_recovered(caplog):
    left = [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")]

    def write() -> int:
        if left:
            raise left.pop()
        return 7

    assert patiently(write, 5.0) == 7
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_patience_ends_with_the_last_error_and_is_none_for_other_errors():
    calls = []

    def write() -> None:
        calls.append(time.monotonic())
        raise OSError(errno.EDQUOT, f"try {len(calls)}")

    began = time.monotonic()
    with pytest.raises(OSError, match=r"try [3-9]"):
        patiently(write, 0.5)
    assert time.monotonic() - began < 2 and len(calls) >= 3
    calls.clear()
    with pytest.raises(OSError, match="try 1"):
        patiently(write, 0.0)
    with pytest.raises(ZeroDivisionError):
        patiently(lambda: calls[1 // 0], 60.0)


def test_a_file_of_facts_keeps_its_content_when_the_new_one_does_not_fit(tmp_path):
    """A limit on the size of files stands for the full disk."""
    path = tmp_path / "config.json"
    write_text(path, "as it was")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(StorageError, match=f"{path}: cannot be written: File too large"):
            write_text(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "as it was" and list(tmp_path.iterdir()) == [path]
    write_text(path, "anew")
    assert path.read_text() == "anew"
