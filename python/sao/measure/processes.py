"""From two producer processes to one consumer on this host: raw ZeroMQ frames, and acknowledged messages."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from sao.measure.measure import Row, row
from sao.transport.actor import Actor
from sao.transport.client import Client
from sao.transport.mailbox import Request
from sao.transport.messages import FinishedRollout, Welcome

PRODUCERS = 2
BYTES_PER_TOKEN = 9
HEADER = b"h" * 400
SAMPLES_WARM = 20
ACKNOWLEDGED = ("sao tcp", "sao ipc")  # messages of the actors: numbered, answered, sent again if they are not
UNANSWERED = 8  # payloads of a producer under way


def transport(quick: bool) -> Iterator[Row]:
    """Payloads a second at full speed, and one-way latency when one comes every 3 ms."""
    for tokens in (1_000, 32_768, 200_000):
        size = tokens * BYTES_PER_TOKEN
        for how in ("zmq tcp", "sao tcp", "zmq ipc", "sao ipc"):
            yield _throughput(how, tokens, size, max(200, min(20_000, (1 << (28 if quick else 30)) // size)))
        for how in ("zmq ipc", "sao ipc"):
            yield _latency(how, tokens, size, 50 if quick else 300)


class _Zmq:
    def __init__(self, endpoint: str) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 16)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> int:
        if not self._socket.poll(20_000):
            raise TimeoutError("no payload within 20 s")
        header, payload = self._socket.recv_multipart(copy=False)
        assert len(header) == len(HEADER)
        return _stamp(payload.buffer)

    def close(self) -> None:
        self._socket.close(0)


class _Messages:
    """An `Actor` in a thread of its own; its handler hands the stamp over and answers."""

    def __init__(self, endpoint: str) -> None:
        self._got: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._actor = Actor(
            endpoint.replace(":*", ":0"),
            on_join=lambda peer: Welcome(),
            on_leave=lambda peer, reason: None,
        )
        self._actor.on(FinishedRollout, self._take)
        self.endpoint: str = self._actor.endpoint
        self._thread = threading.Thread(target=self._actor.run)
        self._thread.start()

    def _take(self, request: Request[FinishedRollout]) -> None:
        self._got.put(_stamp(memoryview(request.message.frames[1])))

    def receive(self) -> int:
        return self._got.get(timeout=20)

    def close(self) -> None:
        self._actor.stop()
        self._thread.join()
        self._actor.close()


def _stamp(payload: memoryview) -> int:
    # The first and the last page, as a reader that only looks would; the sender's clock is ours.
    return int.from_bytes(payload[:8], "little") + 0 * payload[-1]


def _throughput(how: str, tokens: int, size: int, count: int) -> Row:
    stamps = _run(how, size, count, pause_s=0.0)
    gaps = np.diff(np.array([now for now, _ in stamps[SAMPLES_WARM:]])) / 1e3
    each = np.full(len(gaps), gaps.mean())
    acknowledged = ", each acknowledged" if how in ACKNOWLEDGED else ""
    note = f"{size / gaps.mean() / 1e3:.2f} GB/s{acknowledged}"
    return row("2 producers, full speed", f"{tokens} tokens", how, each, 1, "payload", note)


def _latency(how: str, tokens: int, size: int, count: int) -> Row:
    stamps = _run(how, size, count, pause_s=0.003)
    one_way = np.array([now - sent for now, sent in stamps[SAMPLES_WARM:]]) / 1e3
    return row("one way, every 3 ms", f"{tokens} tokens", how, one_way, 1, "payload")


def _run(how: str, size: int, count: int, pause_s: float) -> list[tuple[int, int]]:
    """(received, sent) in nanoseconds of the monotonic clock for each payload."""
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as folder:
        endpoint = "tcp://127.0.0.1:*" if how.endswith("tcp") else f"ipc://{folder}/s"
        sink = _Messages(endpoint) if how in ACKNOWLEDGED else _Zmq(endpoint)
        arguments = [how, sink.endpoint, str(size), str(count // PRODUCERS), str(pause_s)]
        program = "import sys; from sao.measure.processes import produce; produce(*sys.argv[1:])"
        command = [sys.executable, "-c", program]
        producers = [
            subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(PRODUCERS)
        ]
        try:
            # All begin at once: what a process takes to start is more than what it takes to send.
            for producer in producers:
                assert producer.stdout is not None and producer.stdout.readline() == b"ready\n"
            for producer in producers:
                assert producer.stdin is not None
                producer.stdin.close()
            stamps = []
            for _ in range(count // PRODUCERS * PRODUCERS):
                sent = sink.receive()
                stamps.append((time.monotonic_ns(), sent))
            return stamps
        finally:
            sink.close()
            for producer in producers:
                producer.terminate()
                producer.wait(20)
                for pipe in (producer.stdin, producer.stdout):
                    assert pipe is not None
                    pipe.close()


def produce(how: str, endpoint: str, size: str, count: str, pause_s: str) -> None:
    """A producer process: sends `count` payloads of `size` bytes, the time in the first eight."""
    payload, pause = bytearray(os.urandom(int(size))), float(pause_s)
    if how in ACKNOWLEDGED:
        client = Client(endpoint, role="generator", name=f"p{os.getpid()}")
        client.connect(deadline_s=20.0)
        _ready()
        # What is under way must not be changed, so every place in the window has memory of its own.
        window: deque[Any] = deque()
        memory = [bytearray(payload) for _ in range(UNANSWERED)]
        for index in range(int(count)):
            time.sleep(pause) if pause else None
            if len(window) == UNANSWERED:
                window.popleft().result()
            memory[index % UNANSWERED][:8] = time.monotonic_ns().to_bytes(8, "little")
            window.append(client.call(FinishedRollout(frames=(HEADER, memory[index % UNANSWERED])), deadline_s=60.0))
        for future in window:
            future.result()
        client.close()
        return
    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 16)
    socket.connect(endpoint)
    _ready()
    for _ in range(int(count)):
        time.sleep(pause) if pause else None
        payload[:8] = time.monotonic_ns().to_bytes(8, "little")
        # A sender that reuses its memory must let ZeroMQ copy; copy=False would send what comes next.
        socket.send_multipart((HEADER, payload), copy=True)
    socket.close(linger=60_000)
    zmq.Context.instance().term()


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.read()
