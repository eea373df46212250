"""Weights that are not on this host: brought into a private folder before an engine takes them over."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from sao.config import Config
from sao.transport.keys import LEARNER, client_keys
from sao.transport.reference import WeightsRef
from sao.transport.weight_bus import Puller, source_of


class Arrivals:
    """Of one generator. `folder` is its own and goes with it."""

    def __init__(self, config: Config, folder: Path, broker: str, name: str, incarnation: int) -> None:
        self._config, self._folder, self._broker = config, folder, broker
        self._name, self._incarnation = name, incarnation
        self._puller: Puller | None = None
        self._last: WeightsRef | None = None

    async def local(self, ref: WeightsRef) -> WeightsRef:
        """A reference to the same weights in a file of this host; pulled unless it is here already.

        Raises `WeightsError` that says what was waited for; the file of the version before stays.
        """
        if not ref.source or Path(ref.path).exists():
            return ref
        if self._last is None or (self._last.version, self._last.fingerprint) != (ref.version, ref.fingerprint):
            self._last = await asyncio.to_thread(self._pull, ref)
        return self._last

    def _pull(self, ref: WeightsRef) -> WeightsRef:
        """Waits for the network, also where the line to an earlier source is closed: not for the event loop."""
        return self._puller_of(source_of(ref, self._broker)).pull(ref).ref

    def _puller_of(self, endpoint: str) -> Puller:
        if self._puller is None or self._puller.endpoint != endpoint:
            transport = self._config.transport
            if self._puller is not None:
                self._puller.close()
            self._puller = Puller(
                endpoint,
                self._folder,
                name=self._name,
                incarnation=self._incarnation,
                keys=client_keys(transport.keys, endpoint, "generator", self._name, LEARNER),
                heartbeat_s=transport.heartbeat_s,
                patience_s=transport.peer_timeout_s,
            )
        return self._puller

    def close(self) -> None:
        """Removes the folder."""
        if self._puller is not None:
            self._puller.close()
        shutil.rmtree(self._folder, ignore_errors=True)
