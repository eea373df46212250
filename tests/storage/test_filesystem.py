"""Kinds of file systems, and what one does not do."""

from __future__ import annotations

import errno
import os

import pytest

from sao.storage import filesystem


def test_kinds(tmp_path):
    assert filesystem.kind(tmp_path) not in ("unknown", "")
    assert filesystem.kind(tmp_path / "absent") == "unknown"
    if os.path.ismount("/dev/shm"):
        assert filesystem.kind("/dev/shm") == "tmpfs"


def test_a_sound_folder_has_no_faults_and_nothing_stays(tmp_path):
    assert filesystem.faults(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "number", "said"),
    [("fcntl.flock", errno.ENOLCK, "no file locks"), ("os.fsync", errno.EIO, "files cannot be written")],
)
def test_what_is_missing_is_named(tmp_path, monkeypatch, call, number, said):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"sao.storage.filesystem.{call}", refuse)
    (found,) = filesystem.faults(tmp_path)
    assert found == f"{said}{' (flock)' if 'lock' in said else ''}: {os.strerror(number)}"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_renaming_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    assert filesystem.faults(tmp_path) == [f"no renaming into place: {os.strerror(errno.EXDEV)}"]


def test_a_folder_that_is_absent(tmp_path):
    assert filesystem.faults(tmp_path / "absent")[0].startswith("cannot be written by user")
