"""Failpoints: named places at which a test can kill the process or have its disk be full; idle otherwise.

`SAO_KILL_AT=save.manifest` kills the process (SIGKILL) that comes to this failpoint first, `save.manifest:3` the one
that comes to it for the third time; `SAO_FAIL_AT` raises `OSError` (no space left on device) there instead. Both are
inherited by all processes of a run; the name of a failpoint belongs to one role, so that the right one is hit.
"""

import errno
import os
import signal
from collections import Counter

from sao.errors import ConfigError

KILL, FAIL = "SAO_KILL_AT", "SAO_FAIL_AT"
POINTS = (  # `docs/reference/testing.md` says what each is
    *("supervisor.started", "supervisor.step", "broker.take", "broker.leased", "broker.commit"),
    *("ledger.append", "ledger.synced", "journal.append", "journal.written", "ledger.rewound"),
    *("learner.taken", "publish.begin", "publish.rename", "learner.commit", "learner.committed"),
    *("save.begin", "save.staged", "save.state", "save.model", "save.manifest", "save.visible"),
    *("learner.restored", "generator.task", "generator.deliver"),
)

_reached: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """The process is at this point (one of `POINTS`). Raises `ConfigError` when a variable names no point."""
    for variable in (KILL, FAIL):
        wanted = os.environ.get(variable)
        if not wanted:
            continue
        place, _, count = wanted.partition(":")
        if place not in POINTS or not (count or "1").isdecimal():
            raise ConfigError(f"{variable}: {wanted!r} is no point; points are {', '.join(POINTS)}, with :COUNT or not")
        if place != name:
            continue
        _reached[variable] += 1
        if _reached[variable] != int(count or 1):
            continue
        if variable == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (at {name}, as {FAIL} says)")
