"""The endpoint's address as agents are told it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from sao.agents import server as agent_server


@pytest.mark.parametrize("known", [True, False])
def test_an_address_that_is_told_can_be_reached(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Every interface is none to connect to, and a container may not know its own name."""
    server, real = agent_server, socket.getaddrinfo

    def found(host: str, *more: Any, **named: Any) -> Any:
        if host == "box":
            if known:
                return real("127.0.0.1", *more, **named)
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *more, **named)

    monkeypatch.setattr(server.socket, "gethostname", lambda: "box")
    monkeypatch.setattr(server.socket, "getaddrinfo", found)

    async def told(host: str) -> str:
        serving = server.AgentServer("m", "token")
        await serving.start(host, 0)
        await serving.close()
        return serving.base_url.removeprefix("http://").rpartition(":")[0]

    for host in ("0.0.0.0", "*"):
        assert asyncio.run(told(host)) in (("box",) if known else ("127.0.0.1", "[::1]"))
