"""The core beside what people use today, in the same run: `python bench/core.py [TOPIC]... [--quick]`.

Topics are those of `sao bench`, whose rows are the first of each table; the peers that are installed come after them
(queue.Queue, msgspec, seqpacker, lightbinpack, faster-fifo, multiprocessing, id-echo, ray; numba and torch loops stand
in `gae.py`).
Writes results/core-<topic>.json with the machine's description.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import reasoning_lengths

from sao import _core
from sao.measure import workloads
from sao.measure.measure import Row, machine, row, times_us
from sao.measure.report import TOPICS, shown_rate, shown_time

RESULTS = Path(__file__).parent / "results"


def held(quick: bool) -> Iterator[Row]:
    """A new version over thousands held, and a take by task."""
    for n, versions in ((256, 2), (2_048, 16), (16_384, 128), (16_384, 8)):
        yield _retire_and_take(n, versions, 20 if quick else 200)
    for n in (2_048, 16_384, 50_000):
        yield from _take_by_task(n, 20 if quick else 200)


def _retire_and_take(held: int, versions: int, repetitions: int) -> Row:
    """A step of a learner: the oldest of `versions` goes, 64 are taken; then the buffer is filled again."""
    core = _core.Buffer(held, 1 << 30)
    header, payload = b"h" * 300, b"p" * 700
    durations, retired = [], []
    for i in range(held):
        core.put(header, payload, min_version=i * versions // held)
    for version in range(1, repetitions + 1):
        begin = time.perf_counter_ns()
        retired.append(len(core.advance(version + versions - 1, version)))
        leases = core.take(64)
        durations.append((time.perf_counter_ns() - begin) / 1e3)
        for lease in leases:
            lease.commit()
        for _ in range(held - len(core)):
            core.put(header, payload, min_version=version + versions - 1)
    note = f"{int(np.median(retired))} retired"
    return row(
        "retire a version + take 64", f"{held} held, {versions} versions", "sao", np.array(durations), 1, "step", note
    )


def _take_by_task(held: int, repetitions: int) -> Iterator[Row]:
    """64 of all that is held: the first in order, those of the oldest tasks (a windowed FIFO), those of any tasks.

    They finish in another order than their tasks were started, over 8 versions. What was taken is replaced, outside of
    what is measured.
    """
    chance = np.random.default_rng(0)
    core = _core.Buffer(held + 64, 1 << 30)
    live: list[int] = []

    def put(tasks: list[int]) -> None:
        for task in tasks:
            core.put(b"h" * 300, b"p" * 700, min_version=task * 8 // held, task=task)
        live[:] = sorted(live + tasks)

    put(chance.permutation(held).tolist())
    for how in ("", " of the oldest tasks", " of any tasks"):
        durations = []
        for _ in range(repetitions):
            asked = live[:64] if "oldest" in how else chance.choice(live, 64, replace=False).tolist()
            begin = time.perf_counter_ns()
            leases = core.take(asked if how else 64)
            durations.append((time.perf_counter_ns() - begin) / 1e3)
            gone = {lease.task for lease in leases}
            for lease in leases:
                lease.commit()
            live[:] = [task for task in live if task not in gone]
            put([live[-1] + 1 + i for i in range(64)])
        note = "looks at every key" if how else ""
        yield row(f"take 64{how}", f"{held} held", "sao", np.array(durations), 1, "take", note)


def queues(quick: bool) -> Iterator[Row]:
    """In one process, two producers, one consumer: `queue.Queue` and the buffer, one by one and in batches."""
    count = 20_000 if quick else 100_000

    def hand_over(how: str, put: Callable[[], Any], take: Callable[[], int]) -> Row:
        def produce() -> None:
            for _ in range(count):
                put()

        producers = [threading.Thread(target=produce) for _ in range(2)]
        begin = time.perf_counter()
        for producer in producers:
            producer.start()
        got = 0
        while got < 2 * count:
            got += take()
        for producer in producers:
            producer.join()
        each = np.array([(time.perf_counter() - begin) / (2 * count) * 1e6])
        return row("2 producers, 1 consumer, threads", "2 bytes", how, each, 1, "item")

    for _ in range(1 if quick else 3):
        plain: queue.Queue[bytes] = queue.Queue(1024)
        yield hand_over("queue.Queue", lambda q=plain: q.put(b"p"), lambda q=plain: len(q.get()))  # type: ignore[misc]
        core = _core.Buffer(1024, 1 << 20)

        def take(core: _core.Buffer = core, n: int = 1) -> int:
            for lease in core.take(n):
                lease.commit()
            return n

        put = lambda c=core: c.put(b"h", b"p", min_version=0)  # noqa: E731
        yield hand_over("sao", put, take)
        yield hand_over("sao, taken by 64", put, lambda c=core: take(c, 64) if len(c) >= 64 else take(c))  # type: ignore[misc]


def busy_thread(quick: bool) -> Iterator[Row]:
    """A put while another Python thread computes."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        core, plain = _core.Buffer(8, 1 << 24), queue.Queue(8)
        payload = bytes(9 * 32_768)
        n = 50 if quick else 1500  # of which 15 are beyond the p99
        for how, put in (
            ("queue.Queue", lambda: plain.put((b"h", payload))),
            ("sao", lambda: core.put(b"h", payload, min_version=0)),
        ):
            durations = []
            for _ in range(n):
                time.sleep(0.001)
                begin = time.perf_counter_ns()
                put()
                durations.append((time.perf_counter_ns() - begin) / 1e3)
                if how == "sao":
                    core.take(1)[0].commit()
                else:
                    plain.get()
            yield row("put while a Python thread is busy", "32768 tokens", how, np.array(durations), 1, "put")
    finally:
        stop.set()
        thread.join()


def codecs(quick: bool) -> Iterator[Row]:
    """msgspec: typed, arrays as views; neither checks anything."""
    if not find_spec("msgspec"):
        return
    import msgspec

    class Blob(msgspec.Struct):
        meta: dict[str, Any]
        ids: memoryview
        logprobs: memoryview
        mask: memoryview
        versions: memoryview

    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Blob)
    for n in (1_000, 32_768) if quick else (1_000, 32_768, 200_000):
        segment = workloads.trajectory(n).segments[0]
        versions = np.repeat(np.arange(100, 104, dtype=np.int32), -(-n // 4))[:n]
        columns = (segment.token_ids, segment.logprobs, segment.action_mask.view(np.uint8), versions)
        blob = Blob({"id": "0" * 26, "reward": 1.0, "env": "bench"}, *(memoryview(c).cast("B") for c in columns))
        data = encoder.encode(blob)

        def decode(data: bytes = data) -> list[np.ndarray]:
            got = decoder.decode(data)
            views = (got.ids, got.logprobs, got.mask, got.versions)
            types = (np.int32, np.float32, np.uint8, np.int32)
            return [np.frombuffer(view, dtype) for view, dtype in zip(views, types, strict=True)]

        note = f"{len(data) / n:.2f} bytes a token, no checks"
        budget_s = 0.2 if quick else 1.0
        yield row(
            "encode",
            f"{n} tokens",
            "msgspec, typed",
            times_us(lambda b=blob: encoder.encode(b), budget_s),
            len(data),
            "B",
            note,
        )  # type: ignore[misc]
        yield row("decode", f"{n} tokens", "msgspec, typed", times_us(decode, budget_s), len(data), "B", note)


def packers(quick: bool) -> Iterator[Row]:
    """seqpacker and lightbinpack, the fastest two strategies of each; lightbinpack takes and gives lists."""
    for name, lengths_of, capacity in (
        ("agentic", workloads.agentic_lengths, 200_000),
        ("reasoning", reasoning_lengths, 32_768),
    ):
        for n in (512, 8_192) if quick else (512, 8_192, 131_072):
            lengths = lengths_of(n)
            for how, call, bins in _packers(lengths, capacity):
                durations = times_us(call, 0.2 if quick else 1.0)
                yield row("pack", f"{n} {name}", how, durations, n, "segment", f"{bins} bins")


def _packers(lengths: np.ndarray, capacity: int) -> Iterator[tuple[str, Callable[[], Any], int]]:
    if find_spec("seqpacker"):
        import seqpacker

        for strategy in ("ffd", "obfd"):
            packer = seqpacker.Packer(capacity=capacity, strategy=strategy)
            call = partial(packer.pack_flat, lengths)
            yield f"seqpacker {strategy}", call, len(call()[1]) + 1
    if find_spec("lightbinpack"):
        import lightbinpack

        for strategy in ("ffd", "obfd"):
            call = partial(getattr(lightbinpack, strategy), lengths.tolist(), capacity)
            yield f"lightbinpack {strategy}", call, len(call())


def processes(quick: bool) -> Iterator[Row]:
    """Two producer processes to one consumer through queues that pickle."""
    context = multiprocessing.get_context("spawn")
    for tokens in (1_000, 32_768, 200_000):
        size = 9 * tokens
        count = max(100, min(4000, (1 << 27 if quick else 1 << 29) // size))
        makers: dict[str, Callable[[], Any]] = {"multiprocessing.Queue": lambda: context.Queue(16)}
        if find_spec("faster_fifo"):
            import faster_fifo

            makers["faster-fifo"] = lambda size=size: faster_fifo.Queue(max_size_bytes=20 * (size + 1000))
        if find_spec("echo") and find_spec("optree"):
            yield _echo(size, tokens, count)
        for how, make in makers.items():
            fifo, begin = make(), context.Barrier(3)  # all begin at once
            producers = [context.Process(target=_send, args=(fifo, size, count // 2, begin)) for _ in range(2)]
            for producer in producers:
                producer.start()
            begin.wait(60)
            stamps = []
            for _ in range(count // 2 * 2):
                fifo.get(timeout=60)
                stamps.append(time.perf_counter())
            for producer in producers:
                producer.join(60)
            each = np.full(2, np.diff(stamps[20:]).mean() * 1e6)
            note = f"{size / each[0] / 1e3:.2f} GB/s"
            yield row("2 producers, full speed", f"{tokens} tokens", how, each, 1, "payload", note)
        if find_spec("ray") and not quick:
            yield _ray(size, tokens, min(count, 300))


def _send(fifo: Any, size: int, count: int, begin: Any = None) -> None:
    payload = bytes(size)
    if begin is not None:
        begin.wait(60)
    for _ in range(count):
        fifo.put((b"h" * 400, payload), timeout=60)


def _echo(size: int, tokens: int, count: int) -> Row:
    """InstaDeep echo: samples of a fixed shape over TCP, acknowledged, into its ring."""
    import echo

    example = {"header": np.zeros(400, np.uint8), "payload": np.zeros(size, np.uint8)}
    server = echo.Server(example, batch_size=1, transport=echo.TcpTransport(0), num_buffers=16)
    server.start()
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(3)
    producers = [context.Process(target=_send_echo, args=(server.port, size, begin)) for _ in range(2)]
    for producer in producers:
        producer.start()
    begin.wait(60)
    stamps = []
    for _ in range(count):
        server.sample()
        stamps.append(time.perf_counter())
    for producer in producers:  # they send until they are stopped: what is under way when one closes gets lost
        producer.terminate()
        producer.join(60)
    server.close()
    each = np.full(2, np.diff(stamps[20:]).mean() * 1e6)
    note = f"{size / each[0] / 1e3:.2f} GB/s"
    return row("2 producers, full speed", f"{tokens} tokens", "id-echo tcp", each, 1, "payload", note)


def _send_echo(port: int, size: int, begin: Any) -> None:
    import echo

    sample = {"header": np.zeros(400, np.uint8), "payload": np.zeros(size, np.uint8)}
    client = echo.TcpClient("127.0.0.1", port, sample)
    begin.wait(60)
    while True:
        client.send(sample)


def _ray(size: int, tokens: int, count: int) -> Row:
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        fifo = Queue(16)
        rest = ray.remote(lambda: time.sleep(0.5))
        ray.get([rest.remote() for _ in range(2)])  # two workers are there
        send = ray.remote(_send)
        tasks = [send.remote(fifo, size, count // 2) for _ in range(2)]
        stamps = []
        for _ in range(count // 2 * 2):
            fifo.get(timeout=60)
            stamps.append(time.perf_counter())
        ray.get(tasks)
        each = np.full(2, np.diff(stamps[20:]).mean() * 1e6)
        return row("2 producers, full speed", f"{tokens} tokens", "ray.util.queue", each, 1, "payload")
    finally:
        ray.shutdown()


PEERS: dict[str, tuple[Callable[[bool], Iterator[Row]], ...]] = {
    "buffer": (held, queues, busy_thread),
    "pack": (packers,),
    "wire": (codecs,),
    "transport": (processes,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", choices=[*TOPICS, []], help="default: all")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    for topic in arguments.topics or TOPICS:
        described = machine()
        rows = list(TOPICS[topic](arguments.quick))
        for peer in PEERS.get(topic, ()):
            rows += peer(arguments.quick)
        print(f"\n{topic}")
        for one in rows:
            times = "  ".join(f"{shown_time(us):>9}" for us in (one.p50_us, one.p99_us, one.max_us))
            print(
                f"{one.what:32}  {one.size:30}  {one.how:24}  {times}  {shown_rate(one.per_s, one.unit):>16}  "
                + one.note
            )
        RESULTS.mkdir(exist_ok=True)
        result = {"machine": described, "rows": [asdict(one) | {"per_s": one.per_s} for one in rows]}
        (RESULTS / f"core-{topic}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
