"""From two producer processes to one consumer on this host: raw ZeroMQ frames, and acknowledged messages."""

import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from sao.measure.measure import Row, row
from sao.storage.ownership import own
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.mailbox import Request
from sao.transport.messages import FinishedRollout, Welcome

PRODUCERS = 2
BYTES_PER_TOKEN = 9
HEADER = b"h" * 400
WARM = 20  # payloads that are not counted
UNANSWERED = 8  # payloads of a producer under way
LIMIT_S = 20.0  # of every wait


def transport(quick: bool) -> Iterator[Row]:
    """Payloads a second at full speed, and one-way latency when one comes every 3 ms.

    "zmq": frames pushed and pulled. "sao": messages of the actors, numbered, answered, sent again if they are not.
    """
    for tokens in (1_000, 32_768, 200_000):
        size, n_bytes = f"{tokens} tokens", tokens * BYTES_PER_TOKEN
        for how in ("zmq tcp", "sao tcp", "zmq ipc", "sao ipc"):
            count = max(200, min(20_000, (1 << (28 if quick else 30)) // n_bytes))
            gaps = np.diff(_received(how, n_bytes, count, 0.0)[:, 0])
            note = f"{n_bytes / gaps.mean() / 1e3:.2f} GB/s" + (", each acknowledged" if how[:3] == "sao" else "")
            each = np.full(len(gaps), gaps.mean())
            yield row("2 producers, full speed", size, how, each, 1, "payload", note)
        for how in ("zmq ipc", "sao ipc"):
            stamps = _received(how, n_bytes, 50 if quick else 300, 0.003)
            yield row("one way, every 3 ms", size, how, stamps[:, 0] - stamps[:, 1], 1, "payload")


def _received(how: str, n_bytes: int, count: int, pause_s: float) -> NDArray[np.float64]:
    """When each payload was received and when it was sent, microseconds, [count - WARM, 2]."""
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(PRODUCERS + 1)  # what a process takes to start is more than what it takes to send
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as folder:
        own(Path(folder))  # so that it goes with the next start when this process is killed
        endpoint = "tcp://127.0.0.1:*" if how.endswith("tcp") else f"ipc://{folder}/s"
        with (_messages if how[:3] == "sao" else _frames)(endpoint) as (address, receive):
            arguments = (how, address, n_bytes, count // PRODUCERS, pause_s, begin)
            producers = [context.Process(target=_produce, args=arguments, daemon=True) for _ in range(PRODUCERS)]
            try:
                for producer in producers:
                    producer.start()
                begin.wait(LIMIT_S)
                stamps = []
                for _ in range(count // PRODUCERS * PRODUCERS):
                    payload = receive()
                    # The first and the last page, as a reader that only looks would; the sender's clock is ours.
                    sent = int.from_bytes(payload[:8], "little") + 0 * payload[-1]
                    stamps.append((time.monotonic_ns(), sent))
                for producer in producers:
                    producer.join(LIMIT_S)
            finally:
                for producer in producers:
                    producer.kill()
    return np.array(stamps[WARM:]) / 1e3


@contextmanager
def _frames(endpoint: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Address, and what waits for the next payload."""
    socket: Any = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 16)
    socket.bind(endpoint)

    def receive() -> memoryview:
        if not socket.poll(LIMIT_S * 1e3):
            raise TimeoutError(f"no payload within {LIMIT_S:g} s")
        return memoryview(socket.recv_multipart(copy=False)[1].buffer)

    try:
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT), receive
    finally:
        socket.close(0)


@contextmanager
def _messages(endpoint: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same of an `Actor` in a thread of its own, whose handler hands the payload over and acknowledges."""
    got: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def take(request: Request[FinishedRollout]) -> None:
        got.put(memoryview(request.message.frames[1]))

    actor = Actor(endpoint.replace(":*", ":0"), on_join=lambda peer: Welcome(), on_leave=lambda peer, reason: None)
    actor.on(FinishedRollout, take)
    thread = threading.Thread(target=actor.run)
    thread.start()
    try:
        yield actor.endpoint, lambda: got.get(timeout=LIMIT_S)
    finally:
        actor.stop()
        thread.join()
        actor.close()


def _produce(how: str, endpoint: str, n_bytes: int, count: int, pause_s: float, begin: Any) -> None:
    """A producer process: sends `count` payloads, the time in the first eight bytes of each."""
    # What is under way must not be changed, so every place in the window has memory of its own.
    memory = [bytearray(os.urandom(n_bytes)) for _ in range(UNANSWERED)]
    window: deque[Any] = deque()
    if how[:3] == "sao":
        client = Client(endpoint, role="generator", name=f"p{os.getpid()}")
        client.connect(deadline_s=LIMIT_S)
    else:
        socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.connect(endpoint)
    begin.wait(LIMIT_S)
    for index in range(count):
        if pause_s:
            time.sleep(pause_s)
        if len(window) == UNANSWERED:
            window.popleft().result()
        payload = memory[index % UNANSWERED]
        payload[:8] = time.monotonic_ns().to_bytes(8, "little")
        if how[:3] == "sao":
            window.append(client.call(FinishedRollout(frames=(HEADER, payload)), deadline_s=60.0))
        else:  # a sender that reuses its memory must let ZeroMQ copy
            socket.send_multipart((HEADER, payload), copy=True)
    for future in window:
        future.result()
    if how[:3] == "sao":
        client.close()
    else:
        socket.close(linger=60_000)
        zmq.Context.instance().term()
