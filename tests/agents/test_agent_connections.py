"""The endpoint of agents holds no more connections than it may, and waits no longer for a head than it may take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from sao.agents import connections as agent_connections
from sao.agents.server import AgentServer

pytest.importorskip("aiohttp", reason="needs the extra `agents`")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def with_server(use: Callable[[Callable[[], Awaitable[Stream]]], Awaitable[None]]) -> None:
    async def main() -> None:
        server = AgentServer("model", "token")
        await server.start("127.0.0.1", 0)
        port = int(server.base_url.removesuffix("/v1").rpartition(":")[2])
        try:
            async with asyncio.timeout(60):
                await use(lambda: asyncio.open_connection("127.0.0.1", port))
        finally:
            await server.close()

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(size))["error"]["message"]


@pytest.mark.parametrize("before", [0, 1])
def test_a_head_that_comes_byte_by_byte_has_a_deadline(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    async def use(connect: Callable[[], Awaitable[Stream]]) -> None:
        if before == 0:
            monkeypatch.setattr(agent_connections, "HEAD_S", 1.0)
        reader, writer = await connect()
        for _ in range(before):  # a request on this connection that is answered changes nothing
            writer.write(GET)
            assert (await answer(reader))[0] == 401
        monkeypatch.setattr(agent_connections, "HEAD_S", 1.0)

        async def drip() -> None:
            writer.write(b"GET /v1/models HTTP/1.1\r\nX: ")
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        try:
            assert await answer(reader) == (408, "the head of the request did not arrive within 1 s")
            assert await reader.read() == b""
        finally:
            dripping.cancel()
            writer.close()

    with_server(use)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connections, "HEAD_S", 0.05)

    async def use(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        assert await reader.read() == b""
        writer.close()

    with_server(use)


def test_one_that_is_kept_is_not_held_to_the_deadline_of_a_head() -> None:
    """Seen at the timer itself: it runs from the first byte of a head to its last, not while nothing is asked."""
    made: list[agent_connections.Connection] = []

    class Noted(agent_connections.Connection):
        def __init__(self, connections: agent_connections.Connections) -> None:
            super().__init__(connections)
            made.append(self)

    async def use(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        for _ in range(3):
            writer.write(GET)
            assert (await answer(reader))[0] == 401
            assert made[0]._timer is None
        writer.write(GET[:10])
        while made[0]._timer is None:
            await asyncio.sleep(0.001)
        writer.write(GET[10:])
        assert (await answer(reader))[0] == 401
        assert made[0]._timer is None
        writer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_connections, "Connection", Noted)
        with_server(use)


def test_one_connection_too_many_is_told_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connections, "MAX_CONNECTIONS", 2)

    async def use(connect: Callable[[], Awaitable[Stream]]) -> None:
        kept = [await connect() for _ in range(2)]
        for reader, writer in kept:
            writer.write(GET)
            assert (await answer(reader))[0] == 401
        reader, writer = await connect()
        assert await answer(reader) == (503, "2 connections are open, no more are taken")
        assert await reader.read() == b""
        writer.close()
        kept[0][1].close()
        while True:  # until the end of that one has been seen
            reader, writer = await connect()
            writer.write(GET)
            status, _ = await answer(reader)
            writer.close()
            if status != 503:
                break
        assert status == 401
        kept[1][1].close()

    with_server(use)


def test_those_that_are_refused_are_bounded_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each may read why for a second; with thousands a second that would be every descriptor of the process."""
    monkeypatch.setattr(agent_connections, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(agent_connections, "_MAX_LINGERING", 3)
    monkeypatch.setattr(agent_connections, "_LINGER_S", 60.0)

    async def use(connect: Callable[[], Awaitable[Stream]]) -> None:
        kept = await connect()
        made = [await connect() for _ in range(12)]
        told = 0
        for reader, _ in made:
            with suppress(ConnectionResetError, asyncio.IncompleteReadError):
                assert await answer(reader) == (503, "1 connections are open, no more are taken")
                told += 1
        assert told == 3
        for _, writer in made:
            writer.close()
        while True:  # until the ends of those have been seen
            reader, writer = await connect()
            with suppress(ConnectionResetError, asyncio.IncompleteReadError):
                assert (await answer(reader))[0] == 503
                writer.close()
                break
            writer.close()
        kept[1].close()

    with_server(use)
    assert sum("is refused" in record.getMessage() for record in caplog.records) == 1
