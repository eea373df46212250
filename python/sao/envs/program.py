"""A program of others, run to its end: in a session of its own, of which nothing is left then."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from sao.storage.parent_death import under_parent

_OUTPUT_BYTES, _ERROR_BYTES = 1 << 20, 2000  # that are kept of what it writes
_REST_S = 1.0  # for what is left in its pipes when it has ended


class Ended(NamedTuple):
    """How a program ended: its exit code, and the ends of its output and its error output."""

    code: int
    out: str
    err: str


async def run(
    parts: Sequence[str],
    *,
    given: bytes = b"",
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a program; given: its input. Its session is killed then, when the call is cancelled, and when this process
    dies: what it left behind, holding its output open, delays nobody.

    Raises `OSError` when it cannot be started.
    """
    with tempfile.TemporaryFile() as file:  # not a pipe, which a program that does not read would fill
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(
            under_parent(parts, signal.SIGKILL),
            stdin=file if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    out, err = _Tail(_OUTPUT_BYTES), _Tail(_ERROR_BYTES)
    try:
        for tail, pipe in ((out, process.stdout), (err, process.stderr)):
            await tail.read(pipe)
        await _ended(process.pid)
        os.killpg(process.pid, signal.SIGKILL)  # the others of its session, which may hold its output open
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_S):
                await out.complete.wait()
                await err.complete.wait()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await _ended(process.pid)
        code = process.wait()
        out.close()
        err.close()
    return Ended(code, out.text, err.text)


class _Tail(asyncio.Protocol):
    """The last bytes of a pipe. `complete`: nobody has its other end any more."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._kept = n_bytes, bytearray()
        self._transport: asyncio.ReadTransport | None = None
        self.complete = asyncio.Event()

    async def read(self, pipe: IO[bytes] | None) -> None:
        """Begins to read."""
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._n_bytes:  # seldom, so that a program that floods costs little
            del self._kept[: -self._n_bytes]

    def connection_lost(self, _: Exception | None) -> None:
        self.complete.set()

    @property
    def text(self) -> str:
        return self._kept[-self._n_bytes :].decode(errors="replace").strip()

    def close(self) -> None:
        """Reads no more."""
        if self._transport is not None:
            self._transport.close()


async def _ended(pid: int) -> None:
    """Waits for the end of a child that nobody has waited for; not for that of its output, which others may hold."""
    descriptor, ended = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
