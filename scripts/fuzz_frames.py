"""Fuzzes the decoder of messages between actors: `python scripts/fuzz_frames.py [SECONDS [SEED]]` (default 60).

Starts from one valid message of every kind and from hostile ones (deep nesting, huge lengths, extensions, pickles), and
mutates bytes, lengths and whole frames. Whatever comes in, `decode` and `message` return one that encodes again, or
raise `WireError`; neither may take long or hold memory. Memory is bounded from outside, too: the process may not get
more than 256 MiB beyond what it has at the start, so an allocation that trusts a length ends it. Ends with statistics
in the words of libFuzzer; exit code 1 at the first input that does anything else, which is then printed.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
from msgspec import inspect

from sao.errors import WireError
from sao.transport.encoding import decode, encode
from sao.transport.messages import Message

LIMIT_BYTES = 1 << 20
ROOM_BYTES = 256 << 20
SLOWEST_S = 0.5  # of CPU time, for inputs of at most some tens of kilobytes
PEAK_BYTES = 32 << 20  # that Python may hold in one call
BATCH = 1000


def corpus() -> list[list[bytes]]:
    """One message of each kind with all its fields, and what a hostile peer would begin with."""
    found = []
    for kind in Message.__subclasses__():
        message = example(inspect.type_info(kind))
        for count in range(kind.n_frames[0], 3):
            message.frames = (b"header", b"payload" * 100)[:count]
            found.append([bytes(frame) for frame in encode(message, LIMIT_BYTES, seq=3, low=2)])
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    packed = msgpack.packb({"v": 1, "kind": "hello", "seq": 1, "body": {"a": {"b": [1, {"c": "d"}]}}})
    hostile = [
        msgpack.packb(deep),
        b"\x81" * 10_000,
        b"\x91" * 10_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        msgpack.packb(msgpack.ExtType(5, b"x" * 50)),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
        packed[:-1],
        packed + packed,
    ]
    return [*found, *([item] for item in hostile), [], [b""]]


def example(of: inspect.Type) -> Any:
    """Some value of a type, with no field at its default."""
    if isinstance(of, inspect.StructType | inspect.DataclassType):
        return of.cls(**{field.name: example(field.type) for field in of.fields if field.name != "frames"})
    if isinstance(of, inspect.UnionType):
        return example(next(kind for kind in of.types if not isinstance(kind, inspect.NoneType)))
    if isinstance(of, inspect.LiteralType):
        return of.values[0]
    if isinstance(of, inspect.VarTupleType):
        return (example(of.item_type),) * 2
    if isinstance(of, inspect.TupleType):
        return tuple(map(example, of.item_types))
    if isinstance(of, inspect.DictType):
        return {"key": example(of.value_type)}
    values = {inspect.IntType: 7, inspect.FloatType: 0.5, inspect.StrType: "text", inspect.BoolType: True}
    return values.get(type(of), [1, {"a": None}])


def mutated(frames: list[bytes], others: list[list[bytes]], chance: random.Random) -> list[bytes]:
    """One to six changes of a message: bits, bytes, cuts, repeats, lengths, pieces of others, frames."""
    frames = list(frames)
    for _ in range(chance.randint(1, 6)):
        if not frames or chance.random() < 0.05:
            frames.insert(chance.randint(0, len(frames)), chance.randbytes(chance.randint(0, 64)))
            continue
        index = 0 if chance.random() < 0.8 else chance.randrange(len(frames))
        data = bytearray(frames[index])
        at, how = chance.randint(0, len(data)), chance.randrange(8)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif how == 1 and data:
            data[at % len(data)] = chance.choice(
                (0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC7, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
            )
        elif how == 2:
            del data[at : at + chance.randint(1, 16)]
        elif how == 3:
            data[at:at] = chance.randbytes(chance.randint(1, 16))
        elif how == 4:
            data[at : at + 4] = chance.randbytes(4)
        elif how == 5:
            piece = data[at : at + chance.randint(1, 64)]
            data[at:at] = piece * chance.choice((1, 2, 50))
        elif how == 6:
            other = chance.choice(others)
            if other:
                source = chance.choice(other)
                begin = chance.randint(0, len(source))
                data[at:at] = source[begin : begin + chance.randint(1, 64)]
        elif chance.random() < 0.2:
            del frames[index]
            continue
        frames[index] = bytes(data[:40_000])
    return frames[:12]


def run(frames: list[bytes]) -> bool:
    """Whether the frames are a message. Raises `AssertionError` for one that does not encode to what it says."""
    try:
        received = decode(frames, LIMIT_BYTES, max_frames=8)
        message = received.message()
    except WireError:
        return False
    header = received.header
    again = decode(encode(message, LIMIT_BYTES, header.seq, header.re, header.low), LIMIT_BYTES)
    same = again.header.kind == header.kind and repr(again.message()) == repr(message)  # NaN is not equal to itself
    assert same and (again.header.seq, again.header.re, again.header.low) == (header.seq, header.re, header.low)
    return True


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns())
    pool = corpus()
    first, executions, valid, slowest, peak = len(pool), 0, 0, 0.0, 0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watched = executions % (20 * BATCH) == 0  # measuring memory makes it slow
        if watched:
            tracemalloc.start()
        for _ in range(BATCH):
            frames = mutated(chance.choice(pool), pool, chance)
            executions += 1
            try:
                begin = time.thread_time()
                accepted = run(frames)
                slowest = max(slowest, time.thread_time() - begin)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}\n{frames!r}")
                return 1
            if accepted:
                valid += 1
                if len(pool) < first + 5000:
                    pool.append(frames)
                else:
                    pool[chance.randrange(first, len(pool))] = frames
        if watched:
            peak = max(peak, tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        if slowest > SLOWEST_S or peak > PEAK_BYTES:
            print(f"an input took {slowest:.3f} s or {peak} bytes")
            return 1
    print(f"stat::number_of_executed_units: {executions}")
    print(f"stat::accepted_units: {valid}")
    print(f"stat::corpus_units: {len(pool)}")
    print(f"stat::slowest_unit_time_ms: {1000 * slowest:.0f}")
    print(f"stat::peak_call_bytes: {peak}")
    print(f"stat::peak_rss_mb: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
