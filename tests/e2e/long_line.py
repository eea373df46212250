"""Two network namespaces and the line between them: delay, loss and cuts, packet by packet, without netem.

    host a --veth--> relay <--veth-- host b

The relay is this file as a program in a third namespace: it carries Ethernet frames between two interfaces, each after
`delay_s`, drops a share of them, and while the line is cut all of them. Needs root and `ip` (iproute2); `missing` says
what is not there. Each host also gets a `/dev/shm` of its own: no file of the other is seen there.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ADDRESSES = {"a": "10.201.7.1", "b": "10.201.7.2"}
_ETH_P_ALL, _SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS, _OUTGOING = 3, 263, 1, 1, 4
_SIOCETHTOOL, _OFFLOADS = 0x8946, (0x17, 0x1F, 0x24, 0x2C)  # transmit checksums, TSO, GSO, GRO


def missing() -> str:
    """Why there can be no such line here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is not installed (iproute2)"
    name = f"sao-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class LongLine:
    """The line while it stands; made by `long_line`."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        self.name = f"sao-{os.getpid()}"
        for side in "arb":
            _ip("netns", "add", f"{self.name}-{side}")
            _ip("-n", f"{self.name}-{side}", "link", "set", "lo", "up")
        for side, address in ADDRESSES.items():
            host, relay = f"{self.name}-{side}", f"{self.name}-r"
            _ip("link", "add", "wire", "netns", host, "type", "veth", "peer", "name", f"to{side}", "netns", relay)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", host, "link", "set", "wire", "up")
            _ip("-n", relay, "link", "set", f"to{side}", "up")
            subprocess.run([*self.on(side, shm=False), sys.executable, __file__, "--plain", "wire"], check=True)
        command = [*self.on("r", shm=False), sys.executable, __file__, "--relay", str(delay_s), str(loss), str(seed)]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None and self._relay.stdout.readline() == "ready\n"

    def on(self, side: str, *, shm: bool = True) -> list[str]:
        """What is put before a command so that it runs on host `a` or `b`."""
        before = ["ip", "netns", "exec", f"{self.name}-{side}"]
        return [*before, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"] if shm else before

    def say(self, word: str) -> None:
        """`cut` or `mend` the line."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{word}\n")
        self._relay.stdin.flush()

    def cut(self, seconds: float) -> None:
        """Nothing passes for so long."""
        self.say("cut")
        time.sleep(seconds)
        self.say("mend")

    def close(self) -> dict[str, int]:
        """Takes all away; returns how many packets and bytes were carried, lost by chance and lost to cuts."""
        assert self._relay.stdout is not None
        self.say("end")
        counts = self._relay.stdout.readline()
        self._relay.wait(10)
        for side in "arb":
            _ip("netns", "del", f"{self.name}-{side}")
        return dict(json.loads(counts))


@contextmanager
def long_line(delay_s: float = 0.04, loss: float = 0.01, seed: int = 0) -> Iterator[tuple[LongLine, dict[str, Any]]]:
    """The line, and a map that holds the relay's counts when the block is left."""
    line, counts = LongLine(delay_s, loss, seed), {}
    try:
        yield line, counts
    finally:
        counts.update(line.close())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _plain(interface: str) -> None:
    """Packets leave the interface as they would leave a card: of wire size, with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def _relay(delay_s: float, loss: float, seed: int) -> None:
    """Carries frames until `end` is read."""
    chance, counts = random.Random(seed), {"carried": 0, "bytes": 0, "lost": 0, "cut": 0}
    ends = []
    for interface in ("toa", "tob"):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        end.bind((interface, 0))
        member = struct.pack("iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
        end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
        end.setblocking(False)
        ends.append(end)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    order, cut = itertools.count(), False
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # gone with the test
    print("ready", flush=True)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([*ends, sys.stdin], [], [], left)[0]:
            if source is sys.stdin:
                word = sys.stdin.readline().strip()
                if word in ("end", ""):
                    print(json.dumps(counts), flush=True)
                    return
                cut = word == "cut"
                continue
            for _ in range(64):
                try:
                    frame, about = source.recvfrom(65536)
                except BlockingIOError:
                    break
                if about[2] == _OUTGOING:
                    continue
                if cut or chance.random() < loss:
                    counts["cut" if cut else "lost"] += 1
                    continue
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            counts["carried"] += 1
            counts["bytes"] += len(frame)
            try:
                target.send(frame)
            except OSError:
                counts["lost"] += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"{Path(__file__).name}: see the module's text")
    parser.add_argument("--plain", metavar="INTERFACE")
    parser.add_argument("--relay", nargs=3, metavar=("DELAY_S", "LOSS", "SEED"))
    arguments = parser.parse_args()
    if arguments.plain:
        _plain(arguments.plain)
    else:
        _relay(float(arguments.relay[0]), float(arguments.relay[1]), int(arguments.relay[2]))
