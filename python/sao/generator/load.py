"""Load control of a generator: as many episodes at once as its engine has room for, at most `generator.concurrency`.

The signs of an engine that has too much to do are, from bad to good: requests that lose their keys and are computed
again (preempted), a KV cache that is nearly full, and requests that wait while others run. The control is the one of a
network connection: a sign cuts the limit by a quarter, at most once in `COOL_DOWN` reports, since a cut shows only when
episodes have ended; a report without a sign, with the limit in use, raises it by a sixteenth. Between "full" and "room"
nothing changes. An engine that reports no KV cache is never held back.
"""

from sao.engines.base import EngineStats

FULL, ROOM = 0.95, 0.85  # shares of the KV cache
QUEUE = 0.5  # requests waiting for each that runs, from which on more episodes only wait
CUT, COOL_DOWN = 0.75, 5
STEP = 16


class LoadControl:
    """The limit on episodes in flight. most: its upper bound, and where it starts."""

    def __init__(self, most: int) -> None:
        self.most = self.limit = most
        self._quiet = COOL_DOWN
        self._preempted = 0

    def take(self, stats: EngineStats, episodes: int) -> bool:
        """Takes one report of the engine and the episodes in flight; whether the limit was changed."""
        before, self._quiet = self.limit, self._quiet + 1
        thrashing = stats.preempted > self._preempted
        self._preempted = stats.preempted
        queued = stats.kv_use >= ROOM and stats.waiting > QUEUE * max(1, stats.running)
        if thrashing or stats.kv_use >= FULL or queued:
            if self._quiet > COOL_DOWN:
                self.limit = max(1, int(min(self.limit, max(episodes, 1)) * CUT))
                self._quiet = 0
        elif stats.kv_use < ROOM and not stats.waiting and episodes >= self.limit:
            self.limit = min(self.most, self.limit + max(1, self.limit // STEP))
        return self.limit != before
