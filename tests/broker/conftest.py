"""Broker tests leave no file open: logs have no owner that closes them when a test plays a broker's death."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sao.broker.wal import Log
from sao.errors import Error


@pytest.fixture(autouse=True)
def _logs_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made, begin = list[Log](), Log.__init__

    def noted(log: Log, *arguments: Any, **more: Any) -> None:
        begin(log, *arguments, **more)
        made.append(log)

    monkeypatch.setattr(Log, "__init__", noted)
    yield
    for log in made:
        with suppress(Error):
            log.close()
    gc.collect()  # a world and its state refer to each other, and hold the ledger's file
