"""Messages over TCP loopback with acknowledgements, beside plain PUSH/PULL: `python bench/messages.py [MESSAGES]`.

One sender and one receiver process, three sizes of payload. `sao` is the client and mailbox that actors use: every
message is numbered, kept until it is acknowledged, sent again when it is not, delivered once. `pyzmq` is the same bytes
through PUSH and PULL, which acknowledge nothing; its receiver counts what arrives. Latency is that of one message at a
time: for `sao` until its acknowledgement is back, for `pyzmq` there and back over a second pair of sockets. `sao, keys`
is encrypted. 10^6 messages of the smallest size by default, fewer of the larger ones. At the end what is lost is
counted: the receiver must have seen every number once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import report

from sao.transport import Actor, Client, Limits, Request, keys
from sao.transport.messages import FinishedRollout, Welcome

SIZES = {64: 1.0, 13_000: 0.1, 426_000: 0.01}  # bytes -> share of the messages: a number, 1000 and 32,768 tokens
ENDPOINT = "tcp://127.0.0.1:0"
ROUND_TRIPS = 2000
LIMIT_S = 3600.0


def serve_sao(pipe: Any, folder: Path | None) -> None:
    """Counts what arrives, each number once, until the sender leaves."""
    seen, repeated = set(), 0

    def take(request: Request[FinishedRollout]) -> None:
        nonlocal repeated
        number = bytes(request.message.frames[0])
        repeated += number in seen
        seen.add(number)

    actor = Actor(
        ENDPOINT,
        on_join=lambda peer: Welcome(),
        on_leave=lambda peer, reason: actor.stop(),
        limits=Limits(peer_timeout_s=120.0),
        keys=keys.server_keys(folder, ENDPOINT),
    )
    actor.on(FinishedRollout, take)
    pipe.send(actor.endpoint)
    begin = time.process_time()
    actor.run()
    actor.close()
    pipe.send((len(seen), repeated, time.process_time() - begin))


def send_sao(endpoint: str, count: int, payload: bytes, folder: Path | None) -> tuple[float, np.ndarray, float]:
    """(seconds for all, seconds of each round trip, seconds of CPU)."""
    mine = keys.client_keys(folder, endpoint, "generator", "g0")
    with Client(endpoint, role="generator", name="g0", keys=mine, limits=Limits(peer_timeout_s=120.0)) as client:
        client.connect(30.0)
        trips = np.empty(ROUND_TRIPS)
        for number in range(ROUND_TRIPS):
            begin = time.perf_counter()
            client.call(FinishedRollout(frames=(b"%d" % number, payload))).result(60)
            trips[number] = time.perf_counter() - begin
        begin, cpu = time.perf_counter(), time.process_time()
        for number in range(ROUND_TRIPS, ROUND_TRIPS + count):
            client.call(FinishedRollout(frames=(b"%d" % number, payload)))
        client.flush(LIMIT_S)
        return time.perf_counter() - begin, trips, time.process_time() - cpu


def serve_plain(pipe: Any, count: int) -> None:
    """Counts what arrives: first each is sent back, then only the last."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (pull, push)]
    pipe.send(ports)
    for _ in range(ROUND_TRIPS):
        push.send_multipart(pull.recv_multipart(copy=False), copy=False)
    cpu, seen = time.process_time(), set()
    for _ in range(count):
        seen.add(bytes(pull.recv_multipart(copy=False)[0].buffer))
    push.send(b"all")
    pipe.send((len(seen) + ROUND_TRIPS, 0, time.process_time() - cpu))
    context.destroy(linger=2000)


def send_plain(ports: list[int], count: int, payload: bytes) -> tuple[float, np.ndarray, float]:
    """As `send_sao`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(f"tcp://127.0.0.1:{ports[0]}")
    pull.connect(f"tcp://127.0.0.1:{ports[1]}")
    large, trips = len(payload) >= zmq.COPY_THRESHOLD, np.empty(ROUND_TRIPS)
    for number in range(ROUND_TRIPS):
        begin = time.perf_counter()
        push.send_multipart([b"%d" % number, payload], copy=not large)
        pull.recv_multipart(copy=False)
        trips[number] = time.perf_counter() - begin
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(count):
        push.send_multipart([b"%d" % number, payload], copy=not large)
    pull.recv()
    result = time.perf_counter() - begin, trips, time.process_time() - cpu
    context.destroy(linger=0)
    return result


def measure(how: str, size: int, count: int, serve: Callable[..., None], send: Callable[..., Any]) -> list[Any]:
    """One row: a receiver of its own, `count` messages after the round trips."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    receiver = spawn.Process(target=serve, args=(theirs,))
    receiver.start()
    seconds, trips, cpu = send(ours.recv(), count, bytes(size))
    seen, repeated, receiver_cpu = ours.recv()
    receiver.join(30)
    lost = ROUND_TRIPS + count - seen
    p50, p99 = np.percentile(trips, (50, 99)) * 1e6
    each = (1e6 * cpu / count, 1e6 * receiver_cpu / (count + ROUND_TRIPS * (how != "pyzmq")))
    row = [how, size, count, lost, repeated, count / seconds, size * count / seconds / 1e6, p50, p99, *each]
    print(*row, flush=True)
    return row


class Part:
    """A function with some arguments given, which a spawned process can be handed."""

    def __init__(self, call: Callable[..., Any], *more: Any) -> None:
        self.call, self.more = call, more

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments, *self.more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("messages", nargs="?", type=int, default=1_000_000)
    messages = parser.parse_args().messages
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with_keys = Path(folder) / "keys"
        keys.write(with_keys)
        for size, share in SIZES.items():
            count = max(1000, int(messages * share))
            rows.append(measure("sao", size, count, Part(serve_sao, None), Part(send_sao, None)))
            encrypted = max(1000, count // 10)
            rows.append(measure("sao, keys", size, encrypted, Part(serve_sao, with_keys), Part(send_sao, with_keys)))
            rows.append(measure("pyzmq", size, count, Part(serve_plain, count), send_plain))
    columns = ["how", "bytes", "messages", "lost", "repeated", "messages/s", "MB/s", "p50 us", "p99 us"]
    report(
        "messages",
        [*columns, "sender CPU us", "receiver CPU us"],
        rows,
        "TCP loopback, one sender, one receiver; sao: acknowledged and delivered once, pyzmq: PUSH/PULL without"
        " acknowledgement. p50 and p99: one message at a time, until its acknowledgement (pyzmq: its echo) is back.",
    )
    assert not any(row[3] or row[4] for row in rows), "messages were lost or seen twice"


if __name__ == "__main__":
    main()
