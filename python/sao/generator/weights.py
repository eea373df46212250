"""The weights of a generator's engine: the newest version that was announced, taken over again and again."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from sao.config import Config
from sao.engines.base import Engine
from sao.errors import WeightsError
from sao.transport.keys import LEARNER, client_keys
from sao.transport.messages import WeightsRef
from sao.transport.sockets import Limits
from sao.transport.weight_bus import Puller, source_of

log = logging.getLogger(__name__)


class WeightsFollower:
    """Loads what is announced into the engine, while requests go on; of several versions only the newest.

    arrivals: brings weights of other hosts here; None: all are on this host.
    """

    def __init__(self, engine: Engine, patience_s: float, arrivals: "Arrivals | None" = None) -> None:
        self._engine, self._patience_s, self._arrivals = engine, patience_s, arrivals
        self._wanted: WeightsRef | None = None
        self._newer = asyncio.Event()

    def announce(self, ref: WeightsRef) -> None:
        """Wants this version from now on."""
        self._wanted = ref
        self._newer.set()

    async def follow(self, loaded: Callable[[], None]) -> None:
        """Takes over what is announced, again and again; calls `loaded` after each. Raises `WeightsError`."""
        while True:
            await self._newer.wait()
            if await self.take_newest():
                loaded()

    async def take_newest(self) -> bool:
        """Loads the newest version that was announced, unless the engine serves it; whether it loaded one.

        A version that is refused may have been followed by others: it waits for these. Raises `WeightsError` when none
        comes and the learner is on this host.
        """
        loaded, engine = False, self._engine
        self._newer.clear()
        while (ref := self._wanted) is not None and ref.version >= engine.version:
            if (ref.version, ref.fingerprint) == (engine.version, engine.fingerprint):
                break
            self._newer.clear()
            try:
                await engine.update_weights(ref if self._arrivals is None else await self._arrivals.local(ref))
                loaded = True
            except WeightsError as error:
                # The file may be gone because there are newer ones: their announcement is then on the way.
                log.warning("weights of version %d not taken: %s", ref.version, error)
                try:
                    await asyncio.wait_for(self._newer.wait(), self._patience_s)
                except TimeoutError:
                    if self._arrivals is None:
                        raise error from None
                    log.warning("still waiting for weights of version %d; %d is served", ref.version, engine.version)
        return loaded

    def close(self) -> None:
        """Removes what was brought here."""
        if self._arrivals is not None:
            self._arrivals.close()


class Arrivals:
    """Weights of another host, brought into a private folder, `folder`, which goes with it."""

    def __init__(self, config: Config, folder: Path, broker: str, name: str, incarnation: int) -> None:
        self._config, self._folder, self._broker = config, folder, broker
        self._name, self._incarnation = name, incarnation
        self._puller: Puller | None = None
        self._last: WeightsRef | None = None

    async def local(self, ref: WeightsRef) -> WeightsRef:
        """A reference to the same weights in a file of this host; pulled unless it is here already.

        Raises `WeightsError` that names what was waited for; the file of the version before stays.
        """
        if not ref.source or Path(ref.path).exists():
            return ref
        if self._last is None or (self._last.version, self._last.fingerprint) != (ref.version, ref.fingerprint):
            self._last = await asyncio.to_thread(self._pull, ref)  # it waits for the network, also to close
        return self._last

    def close(self) -> None:
        """Removes the folder."""
        if self._puller is not None:
            self._puller.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pull(self, ref: WeightsRef) -> WeightsRef:
        endpoint, transport = source_of(ref, self._broker), self._config.transport
        if self._puller is None or self._puller.endpoint != endpoint:
            if self._puller is not None:
                self._puller.close()
            keys = client_keys(transport.keys, endpoint, "generator", self._name, LEARNER)
            limits, name = Limits.of(transport), self._name
            self._puller = Puller(endpoint, self._folder, limits, name=name, incarnation=self._incarnation, keys=keys)
        return self._puller.pull(ref)
