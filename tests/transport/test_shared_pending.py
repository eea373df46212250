"""Shared memory: who does not greet in time is dropped, and a lock on the folder is not waited for without end."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from transport.test_shared_peers import CAPACITY, HELLO, held_by_this_process, memfd

from sao import _core
from sao.errors import DeadlineError
from sao.transport.shared import SharedReceiver, SharedSender


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_a_folder_that_somebody_keeps_locked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao.transport.shared._LOCK_S", 0.05)
    before, lock = held_by_this_process(), os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match=rf"^waited 0.05 s for the lock on {re.escape(str(tmp_path))}$"):
            SharedReceiver(f"ipc://{tmp_path}/s")
    finally:
        os.close(lock)
    assert held_by_this_process() == before
    SharedReceiver(f"ipc://{tmp_path}/s").close()


def test_a_connection_that_never_greets_is_dropped(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect() -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(60)
        line.connect(endpoint.removeprefix("ipc://"))
        return line

    with SharedReceiver(endpoint) as receiver, connect() as late:
        with pytest.raises(DeadlineError):
            receiver.receive(0.01)
        assert len(receiver._pending) == 1 and receiver.dropped_pending == 0
        ahead_s, monotonic = 0.0, time.monotonic
        monkeypatch.setattr("sao.transport.shared.time.monotonic", lambda: monotonic() + ahead_s)
        # One whose greeting has come when its time is over was not silent: this process stood still.
        fd = memfd(_core.shared_bytes(CAPACITY))
        socket.send_fds(late, [HELLO.pack(b"SAO2", CAPACITY)], [fd])
        os.close(fd)
        ahead_s = 3600.0
        receiver._drop_late()
        assert (len(receiver._pending), len(receiver._readers), receiver.dropped_pending) == (0, 1, 0)
        with connect() as silent:
            with pytest.raises(DeadlineError):
                receiver.receive(0.01)
            ahead_s = 7200.0
            with pytest.raises(DeadlineError):
                receiver.receive(0.01)
            assert silent.recv(1) == b""
        assert (len(receiver._pending), receiver.dropped_pending) == (0, 1)


def test_a_receiver_that_waits_without_end_wakes_to_drop_a_silent_one(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sao.transport.shared._GREET_S", 0.05)
    with SharedReceiver(endpoint) as receiver, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.settimeout(60)
        silent.connect(endpoint.removeprefix("ipc://"))
        waiting = threading.Thread(target=receiver.receive)
        waiting.start()
        try:
            assert silent.recv(1) == b""
        finally:
            with SharedSender(endpoint) as sender:
                sender.send(b"", b"end")
                waiting.join(60)
        assert not waiting.is_alive()
