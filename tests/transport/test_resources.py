"""What peers leave behind, and that they may come in any order."""

from __future__ import annotations

import random
import threading
import time

import psutil
import zmq
from transport.peers import Server, client_of, serving
from waiting import until

from sao.transport import private_folder
from sao.transport.encoding import encode
from sao.transport.messages import Bye, Hello


def test_any_order_of_start_works_and_the_version_is_known_at_once() -> None:
    """The greeting's answer holds the current version: no publication can be missed."""
    rng = random.Random(1)
    for _ in range(20):
        folder = private_folder()
        endpoint = f"ipc://{folder}/b"
        results: list[int] = []
        server: list[Server] = []

        def serve(delay_s: float, endpoint: str = endpoint, server: list[Server] = server) -> None:
            time.sleep(delay_s)
            server.append(Server(endpoint).start())

        def join(name: str, delay_s: float, endpoint: str = endpoint, results: list[int] = results) -> None:
            time.sleep(delay_s)
            with client_of(endpoint, name) as client:
                results.append(client.connect(20).version)

        threads = [threading.Thread(target=serve, args=(rng.uniform(0, 0.05),))]
        threads += [threading.Thread(target=join, args=(f"g{i}", rng.uniform(0, 0.05))) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [7, 7, 7]
        server[0].stop()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_two_thousand_short_lived_peers_leave_nothing_behind() -> None:
    process = psutil.Process()
    others = process.num_fds()  # of what ran in this process before
    with serving(peer_timeout_s=30.0) as server:
        context: zmq.Context = zmq.Context()
        sizes: list[tuple[int, int]] = []
        for n in range(2000):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, f"generator:g{n}:0".encode())
            dealer.connect(server.actor.endpoint)
            dealer.send_multipart(encode(Hello("generator", f"g{n}", 0, session=str(n)), 1 << 20, seq=1))
            assert dealer.poll(5000)
            dealer.recv_multipart()
            dealer.send_multipart(encode(Bye(), 1 << 20))
            dealer.close(linger=1000)
            server.joined.clear()
            server.left.clear()
            if n in (100, 1999):
                until(lambda: not server.actor.mailbox.peers)
                until(lambda: process.num_fds() < others + 40)
                sizes.append((process.memory_info().rss, process.num_fds()))
        context.destroy(linger=0)
        (memory_before, fds_before), (memory_after, _) = sizes
        until(lambda: process.num_fds() <= fds_before + 3)
        assert memory_after < memory_before * 1.05 + (1 << 21)


def test_clients_give_back_their_descriptors() -> None:
    with serving() as server:
        process = psutil.Process()

        def once() -> None:
            with client_of(server) as client:
                client.connect(5)

        once()
        before, threads = process.num_fds(), threading.active_count()
        for _ in range(30):
            once()
        until(lambda: process.num_fds() <= before + 2)
        assert threading.active_count() <= threads
