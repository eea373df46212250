"""Endpoints: private, local, of bearable length, and cleared of what dead processes left."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from sao.errors import TransportError
from sao.transport.sockets import (
    IPC_PATH_LIMIT,
    Limits,
    bind_router,
    check_endpoint,
    connect,
    make_dealer,
    private_folder,
)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = private_folder()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_private_folder_is_private(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "endpoint", ["", "ipc://", "tcp://host", "tcp://:5", "tcp://h:99999", "udp://h:1", "inproc://x"]
)
def test_wrong_endpoints_are_named(endpoint: str) -> None:
    with pytest.raises(TransportError, match="endpoint"):
        check_endpoint(endpoint)


def test_long_paths_are_refused_with_length_and_limit() -> None:
    path = "/tmp/" + "x" * 150
    with pytest.raises(TransportError, match=f"path of 155 bytes exceeds the limit of {IPC_PATH_LIMIT} bytes"):
        check_endpoint(f"ipc://{path}")
    with pytest.raises(TransportError, match="path of 109 bytes"):
        check_endpoint("ipc:///" + "é" * 54)  # bytes count, not characters


def test_the_limit_is_the_systems(context: zmq.Context, folder: Path) -> None:
    longest = str(folder / ("x" * (IPC_PATH_LIMIT - len(str(folder)) - 1)))
    assert len(longest) == IPC_PATH_LIMIT
    router, _ = bind_router(context, f"ipc://{longest}", Limits(1 << 20))
    router.close(linger=0)


def test_a_folder_that_others_may_enter_is_refused(context: zmq.Context, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(TransportError, match="mode 0700, has 0755"):
        bind_router(context, f"ipc://{tmp_path}/b", Limits(1 << 20))
    with pytest.raises(TransportError, match="No such file"):
        bind_router(context, f"ipc://{tmp_path}/none/b", Limits(1 << 20))


def test_socket_files_of_killed_processes_are_removed(context: zmq.Context, folder: Path) -> None:
    path = folder / "broker"
    code = (
        "import sys, time, zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind('ipc://' + sys.argv[1]);"
        "print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    with pytest.raises(TransportError, match="another process listens here"):
        bind_router(context, f"ipc://{path}", Limits(1 << 20))
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    assert path.exists()
    router, endpoint = bind_router(context, f"ipc://{path}", Limits(1 << 20))
    assert endpoint == f"ipc://{path}"
    router.close(linger=0)


def test_other_files_are_never_removed(context: zmq.Context, folder: Path) -> None:
    path = folder / "broker"
    path.write_text("precious")
    with pytest.raises(TransportError, match="is not a socket"):
        bind_router(context, f"ipc://{path}", Limits(1 << 20))
    assert path.read_text() == "precious"
    path.unlink()
    target = folder / "target"
    target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(TransportError, match="is not a socket"):
        bind_router(context, f"ipc://{path}", Limits(1 << 20))
    assert target.read_text() == "precious"


def test_ports_are_loopback_and_filled_in(context: zmq.Context) -> None:
    router, endpoint = bind_router(context, "tcp://127.0.0.1:0", Limits(1 << 20))
    port = int(endpoint.rpartition(":")[2])
    assert endpoint.startswith("tcp://127.0.0.1:") and port > 0
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with pytest.raises(TransportError, match="cannot listen"):
        bind_router(context, endpoint, Limits(1 << 20))
    router.close(linger=0)


def test_a_dealer_may_connect_before_there_is_a_listener(context: zmq.Context, folder: Path) -> None:
    endpoint = f"ipc://{folder}/late"
    dealer = make_dealer(context, endpoint, b"me", Limits(1 << 20))
    connect(dealer, endpoint)
    with pytest.raises(zmq.Again):  # nothing is queued for a connection that may never be
        dealer.send(b"early", zmq.NOBLOCK)
    router, _ = bind_router(context, endpoint, Limits(1 << 20))
    assert dealer.poll(5000, zmq.POLLOUT)
    dealer.send(b"early")
    assert router.poll(5000)
    assert router.recv_multipart() == [b"me", b"early"]
    with pytest.raises(zmq.ZMQError) as error:
        router.send_multipart([b"nobody", b"x"])
    assert error.value.errno == zmq.EHOSTUNREACH  # never a silent loss
    for sock in (dealer, router):
        sock.close(linger=0)
