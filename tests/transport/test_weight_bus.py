"""Weights between hosts: whole and right, or the version before them stays and the fault has a name."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transport.peers import client_of

from sao.errors import TransportError, WeightsError
from sao.transport import LATER, Request, keys, weight_bus
from sao.transport.messages import Ack, Chunk, Message, Pull, WeightsRef
from sao.transport.sockets import Limits
from sao.transport.weight_bus import Puller, WeightsServer, source_of
from sao.transport.weights import load, publish

TCP = "tcp://127.0.0.1:0"
FIRST = weight_bus.FIRST_BYTES


def tensors(version: int, size: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"layer.{i}": torch.randn(size, 50, generator=generator) for i in range(5)}


def pull(ref: WeightsRef, folder: Path, endpoint: str, patience_s: float = 15.0, **options: Any) -> WeightsRef:
    """One pull over a connection of its own."""
    puller = Puller(endpoint, folder, Limits(heartbeat_s=0.1, peer_timeout_s=patience_s), **options)
    try:
        return puller.pull(ref)
    finally:
        puller.close()


class Bus:
    """A server with published versions and a folder to pull into."""

    def __init__(self, folder: Path) -> None:
        self.published, self.local = folder / "published", folder / "local"
        self.published.mkdir()
        self.local.mkdir()
        self.server = WeightsServer(TCP, Limits(heartbeat_s=0.1, peer_timeout_s=3.0))
        self.seen = 0

    def publish(self, version: int, size: int = 1000) -> WeightsRef:
        ref = publish(tensors(version, size), self.published, version)
        self.server.publish(ref)
        return replace(ref, path="/nowhere", source=self.server.endpoint)

    def pull(
        self, ref: WeightsRef, endpoint: str | None = None, patience_s: float = 2.0, name: str = "g0"
    ) -> WeightsRef:
        self.seen += 1
        target = endpoint or self.server.endpoint
        return pull(ref, self.local, target, patience_s, name=name, incarnation=self.seen)

    def instead(self, change: Callable[[Request[Pull], Chunk], Message]) -> None:
        """Changes what the server answers."""
        real = self.server._pull
        self.server._actor.on(Pull, lambda request: change(request, real(request)))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.local.iterdir())


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = Bus(tmp_path)
    yield bus
    bus.server.close()


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_pulled_file_is_the_published_one(bus: Bus) -> None:
    ref = bus.publish(1, size=40_000)  # 40 MB: chunks of every size, several at once
    pulled = bus.pull(ref)
    assert same(load(pulled), tensors(1, size=40_000))
    assert (bus.published / "weights-0000000001.safetensors").stat().st_size == bus.server.sent_bytes
    assert bus.files() == ["weights-0000000001.safetensors"]


def test_who_missed_versions_goes_to_the_newest_directly(bus: Bus) -> None:
    bus.pull(bus.publish(1))
    sent = bus.server.sent_bytes
    ref = [bus.publish(version) for version in range(2, 9)][-1]
    assert bus.pull(ref).version == 8
    assert bus.server.sent_bytes == 2 * sent  # nothing of the versions between
    assert bus.files() == ["weights-0000000008.safetensors"]
    with pytest.raises(
        WeightsError, match=r"weights of version 3 from tcp://.*: version 3 is not served, only \[6, 7, 8\]"
    ):
        bus.pull(WeightsRef(3, "/nowhere", ref.fingerprint))
    assert bus.files() == ["weights-0000000008.safetensors"]


def test_what_is_being_pulled_is_served_although_it_is_replaced(bus: Bus) -> None:
    ref, later = bus.publish(1, size=40_000), iter(range(2, 9))

    def slow(request: Request[Pull], reply: Chunk) -> Message:
        if version := next(later, 0):
            bus.publish(version)
            for path in bus.published.iterdir():
                path.unlink()
        return reply

    bus.instead(slow)
    assert same(load(bus.pull(ref)), tensors(1, size=40_000))
    assert sorted(bus.server._files) == [1, 7, 8]


@pytest.mark.parametrize("times", [1, 10])
def test_a_changed_byte_is_found_asked_for_again_and_named(bus: Bus, times: int) -> None:
    before = bus.pull(bus.publish(1))
    changed = [0]

    def damage(request: Request[Pull], reply: Chunk) -> Message:
        if request.message.offset == FIRST and changed[0] < times:
            changed[0] += 1
            chunk = bytearray(reply.frames[0])
            chunk[7] ^= 1
            return structs.replace(reply, frames=(bytes(chunk),))
        return reply

    bus.instead(damage)
    ref = bus.publish(2)
    if times == 1:
        assert same(load(bus.pull(ref)), tensors(2))
        return
    with pytest.raises(WeightsError, match=r"the chunk at byte 262144 has a wrong checksum, 3 times"):
        bus.pull(ref)
    assert same(load(before), tensors(1))
    assert bus.files() == ["weights-0000000001.safetensors"]


def test_other_weights_under_the_name_are_refused(bus: Bus) -> None:
    before = bus.pull(bus.publish(1))
    ref = replace(bus.publish(2), fingerprint="0" * 32)
    with pytest.raises(WeightsError, match=r"fingerprint [0-9a-f]{32}, expected 0{32}"):
        bus.pull(ref)
    assert same(load(before), tensors(1))
    assert bus.files() == ["weights-0000000001.safetensors"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"total": 1 << 60}, r"a file of 1152921504606846976 bytes; \d+ bytes are free"),
        ({"total": 0}, "a file of 0 bytes"),
        ({"total": 270_000}, "expected 7856 bytes at 262144 of 270000, got 524288"),
        ({"offset": 3}, "expected 262144 bytes at 0 of .*, got 262144 bytes at 3"),
        ({"version": 9}, "of version 9"),
    ],
)
def test_answers_that_do_not_fit_are_refused_before_anything_is_allocated(
    bus: Bus, change: dict[str, int], fault: str
) -> None:
    bus.instead(lambda request, reply: structs.replace(reply, **change))
    with pytest.raises(WeightsError, match=fault):
        bus.pull(bus.publish(1))
    assert bus.files() == []


def test_a_chunk_of_another_size_and_no_chunk_are_refused(bus: Bus) -> None:
    bus.instead(lambda request, reply: structs.replace(reply, frames=(bytes(reply.frames[0])[:-1],)))
    ref = bus.publish(1)
    with pytest.raises(WeightsError, match=r"expected 262144 bytes at 0 of .*, got 262143 bytes"):
        bus.pull(ref)
    bus.server._actor.on(Pull, lambda request: Ack())
    with pytest.raises(WeightsError, match="an answer of kind 'ack' is no chunk"):
        bus.pull(ref)
    assert bus.files() == []


def test_a_chunk_that_never_comes_is_named(bus: Bus) -> None:
    before = bus.pull(bus.publish(1))
    bus.instead(lambda request, reply: LATER if request.message.offset else reply)
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"version 2 from .*: waited 1 s for the chunk at byte 262144 of \d{7}"):
        bus.pull(bus.publish(2), patience_s=1.0)
    assert time.monotonic() - start < 15.0  # not for ever, on however busy a machine
    assert bus.files() == ["weights-0000000001.safetensors"]
    assert same(load(before), tensors(1))


def test_a_version_that_cannot_be_read_is_named_and_the_others_are_served_on(bus: Bus) -> None:
    ref = bus.publish(1)
    os.close(bus.server._files[1])
    bus.server._files[1] = os.open(bus.published / "weights-0000000001.safetensors", os.O_WRONLY)
    with pytest.raises(WeightsError, match=r"version 1 cannot be read: .*Bad file descriptor"):
        bus.pull(ref)
    assert bus.pull(bus.publish(2)).version == 2


def test_a_server_that_is_gone_is_named(bus: Bus) -> None:
    ref = bus.publish(1)
    bus.server.close()
    with pytest.raises(WeightsError, match=r"hello: no answer from .* within 0\.5 s: nothing can be reached there"):
        bus.pull(ref, patience_s=0.5)
    assert bus.files() == []
    bus.server = WeightsServer(TCP, Limits())


class Proxy:
    """Carries bytes to the server; after so many in all it breaks every connection, and takes new ones after 0.5 s."""

    def __init__(self, endpoint: str, *cut_at: int) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut_at = list(cut_at)
        self._open: list[socket.socket] = []
        self._whole = threading.Event()
        self._whole.set()
        self.carried = 0
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _cut(self) -> None:
        self._whole.clear()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()
        threading.Timer(0.5, self._whole.set).start()

    def _serve(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            self._whole.wait()
            self.connections += 1
            outside = socket.create_connection(("127.0.0.1", self._port))
            self._open += [inside, outside]
            for source, target in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.carried += len(data)
                if self._cut_at and self.carried > self._cut_at[0]:
                    del self._cut_at[0]
                    self._cut()
                target.sendall(data)
        except OSError:
            return
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_cut_in_the_middle_goes_on_where_it_was(bus: Bus) -> None:
    ref, proxy = bus.publish(1, size=40_000), Proxy(bus.server.endpoint, 5_000_000, 15_000_000)
    assert same(load(bus.pull(ref, proxy.endpoint, patience_s=40.0)), tensors(1, size=40_000))
    assert proxy.connections == 3
    assert proxy.carried < 1.8 * 40_000_000  # what had arrived was not sent again, but for what was on the way


def test_one_connection_serves_many_versions_also_after_faults(bus: Bus) -> None:
    joined: list[str] = []
    real = bus.server._actor.mailbox._on_join
    bus.server._actor.mailbox._on_join = lambda peer: (joined.append(peer.name), real(peer))[1]
    puller = Puller(bus.server.endpoint, bus.local, Limits(heartbeat_s=0.1, peer_timeout_s=2.0), name="g0")
    for version in (1, 2, 3):
        assert same(load(puller.pull(bus.publish(version))), tensors(version))
    assert joined == ["g0"]
    with pytest.raises(WeightsError, match="fingerprint"):
        puller.pull(replace(bus.publish(4), fingerprint="0" * 32))
    assert same(load(puller.pull(bus.publish(5))), tensors(5))
    assert joined == ["g0"]
    bus.server._actor.on(Pull, lambda request: LATER)
    with pytest.raises(WeightsError, match="waited 2 s for the chunk at byte 0"):
        puller.pull(bus.publish(6))
    bus.server._actor.on(Pull, bus.server._pull)
    assert same(load(puller.pull(bus.publish(7))), tensors(7))
    assert joined == ["g0"]
    for peer in list(bus.server._actor.mailbox.peers.values()):
        bus.server._actor.call(lambda peer=peer: bus.server._actor.mailbox.drop(peer, "test"))  # type: ignore[misc]
    assert same(load(puller.pull(bus.publish(8))), tensors(8))
    assert joined == ["g0", "g0"]
    puller.close()


def test_many_pull_at_once(bus: Bus, tmp_path: Path) -> None:
    ref, wrong = bus.publish(1, size=4000), []

    def work(index: int) -> None:
        folder = tmp_path / f"g{index}"
        folder.mkdir()
        pulled = pull(ref, folder, bus.server.endpoint, name=f"g{index}")
        if not same(load(pulled), tensors(1, size=4000)):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and len(list(tmp_path.glob("g*/weights-*"))) == 8


def test_unauthenticated_peers_and_other_roles_read_no_weights(tmp_path: Path) -> None:
    keys.write(tmp_path / "keys")
    keys.write(tmp_path / "other")
    ref = publish(tensors(1), tmp_path, 1)
    server = WeightsServer(TCP, Limits(heartbeat_s=0.1), keys.server_keys(tmp_path / "keys", TCP, "learner"))
    server.publish(ref)
    local = tmp_path / "local"
    local.mkdir()
    try:
        for folder, fault in (
            (None, "keys are needed there|what listens there needs keys"),
            ("other", "within 1 s: the handshake fails: what listens there has another key"),
        ):
            mine = folder and keys.client_keys(tmp_path / folder, TCP, "generator", "g0", "learner")
            with pytest.raises(WeightsError, match=fault):
                pull(ref, local, server.endpoint, name="g0", keys=mine or None, patience_s=1.0)
        (tmp_path / "other" / "learner.key").write_bytes((tmp_path / "keys" / "learner.key").read_bytes())
        mine = keys.client_keys(tmp_path / "other", TCP, "generator", "g0", "learner")
        with pytest.raises(WeightsError, match=r"refused: the key 'generator' of .* is not known there"):
            pull(ref, local, server.endpoint, name="g0", keys=mine)
        mine = keys.client_keys(tmp_path / "keys", TCP, "supervisor", "supervisor", "learner")
        visitor = client_of(server.endpoint, "v", "visitor", keys=mine)
        with visitor, pytest.raises(TransportError, match="weights are for generators, not for a visitor"):
            visitor.connect(5)
        assert server.sent_bytes == 0
        mine = keys.client_keys(tmp_path / "keys", TCP, "generator", "g0", "learner")
        assert same(load(pull(ref, local, server.endpoint, name="g0", keys=mine)), tensors(1))
    finally:
        server.close()


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("tcp://10.0.0.2:5556", "tcp://10.0.0.2:5556"),
        ("tcp://*:5556", "tcp://broker.example:5556"),
        ("tcp://0.0.0.0:5556", "tcp://broker.example:5556"),
    ],
)
def test_every_interface_means_the_brokers_host(source: str, wanted: str) -> None:
    assert source_of(WeightsRef(1, "/x", "0" * 32, source), "tcp://broker.example:5555") == wanted
