"""Weights that are not on this host: brought into a private folder before an engine takes them over."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from sao.config import Config
from sao.transport.keys import LEARNER, client_keys
from sao.transport.reference import WeightsRef
from sao.transport.weight_bus import Pulled, pull, source_of


class Arrivals:
    """Of one generator. `folder` is its own and goes with it."""

    def __init__(self, config: Config, folder: Path, broker: str, name: str, incarnation: int) -> None:
        self._config, self._folder, self._broker = config, folder, broker
        self._name, self._incarnation = name, incarnation
        self.last: Pulled | None = None

    async def local(self, ref: WeightsRef) -> WeightsRef:
        """A reference to the same weights in a file of this host; pulled unless it is here already.

        Raises `WeightsError` that says what was waited for; the file of the version before stays.
        """
        if not ref.source or Path(ref.path).exists():
            return ref
        if self.last is not None and (self.last.ref.version, self.last.ref.fingerprint) == (
            ref.version,
            ref.fingerprint,
        ):
            return self.last.ref
        transport, endpoint = self._config.transport, source_of(ref, self._broker)
        self.last = await asyncio.to_thread(
            pull,
            ref,
            self._folder,
            endpoint,
            name=self._name,
            incarnation=self._incarnation,
            keys=client_keys(transport.keys, endpoint, "generator", self._name, LEARNER),
            heartbeat_s=transport.heartbeat_s,
            patience_s=transport.peer_timeout_s,
        )
        return self.last.ref

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
