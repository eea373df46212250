"""Keys: who is let in, who is not and is told why; what is on disk is private."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from transport.peers import Server, client_of
from waiting import until
from zmq.auth.thread import AuthenticationThread

from sao.errors import ConfigError, DeadlineError, Error, TransportError
from sao.transport import Client, keys
from sao.transport.encoding import decode, encode
from sao.transport.messages import Ack, FinishedRollout, Refusal, Slots
from sao.transport.sockets import Limits, connect, make_dealer

TCP = "tcp://127.0.0.1:0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.write(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(TCP, keys=keys.server_keys(folder, TCP)).start()
    yield server
    server.stop()


def known(server: Server, folder: Path, role: str = "generator", name: str = "g0") -> Client:
    return client_of(server, name, role, keys=keys.client_keys(folder, server.actor.endpoint, role, name))


def test_files_are_private_and_kept(folder: Path) -> None:
    names = ("broker", "generator", "learner", "supervisor")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}{end}" for name in names for end in (".key", ".key_secret")
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert keys.write(folder) == []
    assert [path.name for path in keys.write(folder, ["g7"])] == ["g7.key", "g7.key_secret"]
    assert all(path.read_bytes() == content for path, content in before.items())
    pair = keys.client_keys(folder, "tcp://h:1", "generator", "g7")
    assert pair is not None and pair.name == "g7" and pair.secret.decode() not in repr(pair)


@pytest.mark.parametrize("name", ["", "../x", "broker", "a b", "x" * 65])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a generator"):
        keys.write(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_an_open_folder_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    for call in (
        lambda: keys.write(folder),
        lambda: keys.server_keys(folder, TCP),
        lambda: keys.client_keys(folder, TCP, "learner", "learner"),
    ):
        with pytest.raises(ConfigError, match=f"must belong to this user with mode 0700, has {mode:04o}"):
            call()


def test_an_open_secret_is_refused(folder: Path) -> None:
    (folder / "broker.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"broker\.key_secret must belong to this user with mode 0600, has 0640"):
        keys.server_keys(folder, TCP)


def test_what_is_missing_or_broken_is_named(folder: Path) -> None:
    (folder / "generator.key_secret").unlink()
    with pytest.raises(ConfigError, match=r"has no g3\.key_secret or generator\.key_secret: generator g3 cannot show"):
        keys.client_keys(folder, TCP, "generator", "g3")
    (folder / "learner.key_secret").write_text("metadata\ncurve\n")
    with pytest.raises(ConfigError, match=r"learner\.key_secret cannot be read"):
        keys.client_keys(folder, TCP, "learner", "learner")
    shutil.copy(folder / "supervisor.key_secret", folder / "mixed.key_secret")
    text = (folder / "mixed.key_secret").read_text()
    own, other = keys.read_public(folder / "supervisor.key").decode(), keys.read_public(folder / "broker.key").decode()
    (folder / "mixed.key_secret").write_text(text.replace(own, other))
    with pytest.raises(ConfigError, match="does not belong to the secret one"):
        keys.client_keys(folder, TCP, "generator", "mixed")


def test_no_keys_are_used_over_ipc(folder: Path) -> None:
    assert keys.server_keys(folder, "ipc:///tmp/x") is None
    assert keys.client_keys(folder, "ipc:///tmp/x", "generator", "g0") is None
    assert keys.server_keys(None, TCP) is None


def test_owners_of_known_keys_work_together(server: Server, folder: Path) -> None:
    for role, name in (("generator", "g0"), ("learner", "learner"), ("visitor", "v")):
        with known(server, folder, role, name) as client:
            client.connect(5)
            assert client.call(Slots(3), deadline_s=5).result().reason == "3"
    assert [peer.key for peer in server.joined] == ["generator", "learner", "generator"]


def test_an_unknown_key_is_refused_at_once_and_named(server: Server, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    keys.write(other)
    shutil.copy(folder / "broker.key", other / "broker.key")  # the right broker, another's own key
    start = time.monotonic()
    with known(server, other) as client, pytest.raises(TransportError, match=f"the key 'generator' of {other} is not"):
        client.connect(60)
    assert time.monotonic() - start < 20  # at once, not at the deadline
    assert server.joined == []


def test_no_key_is_refused_and_named(server: Server) -> None:
    # At once, unless the server has closed the connection before its greeting was read: then at the next try.
    fault = "refused: keys are needed there|what listens there needs keys"
    with client_of(server, "g0") as client, pytest.raises(Error, match=fault):
        client.connect(20)
    assert server.joined == []


def test_a_key_where_none_are_used_is_refused_and_named(folder: Path) -> None:
    # At once, unless the server has closed the connection before its greeting was read.
    fault = "refused: no keys are used there|has another key than .* says, or none"
    server = Server(TCP).start()
    with known(server, folder) as client, pytest.raises(Error, match=fault):
        client.connect(20)
    server.stop()


def test_another_brokers_key_is_named_at_the_deadline(server: Server, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    keys.write(other)
    shutil.copy(folder / "generator.key_secret", other / "generator.key_secret")
    with (
        known(server, other) as client,
        pytest.raises(DeadlineError, match=r"within 0\.7 s: the handshake fails: what listens there has another key"),
    ):
        client.connect(0.7)
    assert server.joined == []


@pytest.mark.parametrize(
    ("key", "role", "name"),
    [
        ("generator", "learner", "learner"),
        ("generator", "supervisor", "supervisor"),
        ("g7", "generator", "g8"),
        ("g7", "learner", "learner"),
    ],
)
def test_a_key_stands_for_its_role_only(server: Server, folder: Path, key: str, role: str, name: str) -> None:
    keys.write(folder, ["g7"])  # known at once: the folder is read at every handshake
    mine = keys.client_keys(folder, TCP, "generator", key)
    with (
        client_of(server, name, role, keys=mine) as client,
        pytest.raises(TransportError, match=f"the key '{key}' does not stand for the {role} '{name}'"),
    ):
        client.connect(10)
    assert server.joined == []


def test_a_removed_key_and_an_opened_folder_let_nobody_in(server: Server, folder: Path) -> None:
    mine = keys.client_keys(folder, TCP, "generator", "g0")
    folder.chmod(0o755)
    with client_of(server, "g0", keys=mine) as client, pytest.raises(Error, match="is not known there"):
        client.connect(5)
    folder.chmod(0o700)
    (folder / "generator.key").unlink()
    with client_of(server, "g0", keys=mine) as client, pytest.raises(Error, match="is not known there"):
        client.connect(5)


def test_a_handshake_that_cannot_be_judged_is_refused_and_the_next_one_is_judged(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine, read = keys.client_keys(folder, TCP, "generator", "g0"), keys.read_public

    def fails(path: Path) -> bytes:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(keys, "read_public", fails)
    with client_of(server, "g0", keys=mine) as client, pytest.raises(Error):
        client.connect(3)
    assert "a handshake could not be judged" in caplog.text and "Too many open files" in caplog.text
    monkeypatch.setattr(keys, "read_public", read)
    with client_of(server, "g0", keys=mine, incarnation=1) as client:
        client.connect(5)


@pytest.mark.parametrize("with_key", [True, False])
def test_an_unauthenticated_peer_injects_nothing(server: Server, folder: Path, tmp_path: Path, with_key: bool) -> None:
    """Raw sockets under the identity of a joined peer: without the right key no byte reaches a handler."""
    with known(server, folder) as client:
        client.connect(5)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"generator:g0:0")
        if with_key:
            socket.curve_serverkey = keys.read_public(folder / "broker.key")
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(server.actor.endpoint)
        for _ in range(20):
            socket.send_multipart([bytes(f) for f in encode(FinishedRollout(frames=(b"h", b"p")), 1 << 20, seq=99)])
        assert not socket.poll(500)
        context.destroy(linger=0)
        assert server.got == []
        assert client.call(FinishedRollout(frames=(b"a", b"b")), deadline_s=5).result() == Ack()
        assert len(server.got) == 1


def test_another_key_that_takes_an_identity_has_not_joined(server: Server, folder: Path) -> None:
    keys.write(folder, ["g7"])
    with known(server, folder) as client:
        client.connect(5)
        mine = keys.client_keys(folder, TCP, "generator", "g7")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        thief = make_dealer(context, server.actor.endpoint, b"generator:g0:0", Limits(), mine)
        connect(thief, server.actor.endpoint)
        assert thief.poll(5000, zmq.POLLOUT)
        thief.send_multipart([bytes(f) for f in encode(FinishedRollout(frames=(b"h", b"p")), 1 << 20, seq=1)])
        assert thief.poll(5000)
        answer = decode(thief.recv_multipart(), 1 << 20).message()
        assert isinstance(answer, Refusal) and "has not joined" in answer.text
        context.destroy(linger=0)
    assert server.got == []


def test_what_is_sent_cannot_be_read_on_the_way(server: Server, folder: Path) -> None:
    """A proxy between client and server sees none of the plain text."""
    import socket as sockets
    import threading

    listener = sockets.create_server(("127.0.0.1", 0))
    port, seen = int(server.actor.endpoint.rpartition(":")[2]), bytearray()

    def pump(source: sockets.socket, target: sockets.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            target.sendall(data)
        target.close()

    def serve() -> None:
        inside, _ = listener.accept()
        outside = sockets.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(outside, inside), daemon=True).start()
        pump(inside, outside)

    threading.Thread(target=serve, daemon=True).start()
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    mine = keys.client_keys(folder, endpoint, "generator", "g0")
    with client_of(endpoint, "g0", keys=mine) as client:
        client.connect(5)
        client.call(FinishedRollout(frames=(b"plaintext", b"secret-tokens")), deadline_s=5).result()
    until(lambda: server.left)
    listener.close()
    assert server.got[0][0] == b"plaintext"
    assert len(seen) > 500 and b"plaintext" not in seen and b"secret-tokens" not in seen and b"hello" not in seen


def test_the_gate_leaves_no_thread_and_no_file(folder: Path) -> None:
    import threading

    for _ in range(3):
        Server(TCP, keys=keys.server_keys(folder, TCP)).start().stop()
    assert not [thread for thread in threading.enumerate() if isinstance(thread, AuthenticationThread)]
    assert len(list(folder.iterdir())) == 8
