"""Failpoints: named places at which a test can kill the process or have its disk be full; idle otherwise.

`SAO_KILL_AT=save.manifest` kills the process (SIGKILL) that comes to this failpoint first, `save.manifest:3` the one
that comes to it for the third time; `SAO_FAIL_AT` raises `OSError` (no space left on device) there instead. Both are
inherited by all processes of a run; the name of a failpoint belongs to one role, so that the right one is hit.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

from sao.errors import ConfigError

KILL, FAIL = "SAO_KILL_AT", "SAO_FAIL_AT"
POINTS = {
    "supervisor.started": "all processes of the run are started",
    "supervisor.step": "a step was reported, it is not yet written to metrics.jsonl",
    "broker.take": "a batch was asked for",
    "broker.leased": "trajectories are leased, the batch is not yet sent",
    "broker.commit": "a commit came, nothing is done yet",
    "ledger.append": "a step's commit is in memory, not on disk",
    "ledger.synced": "a step's commit is on disk, the learner does not know it",
    "journal.append": "a turn of the broker's loop is not yet committed to the journal",
    "journal.written": "a turn is in the journal, nothing of it is sent",
    "ledger.rewound": "a resumed broker has taken steps back, nobody has joined",
    "learner.taken": "a batch has arrived",
    "publish.begin": "the step is done in memory, its weights are not written",
    "publish.rename": "the weights are written, not yet under their name",
    "learner.commit": "the step is done, its commit is not yet sent",
    "learner.committed": "the commit was acknowledged",
    "save.begin": "a checkpoint is due",
    "save.staged": "all tensors are copied, nothing is written",
    "save.state": "sharded tensors are written",
    "save.model": "the model folder is written, checksums and manifest are not",
    "save.manifest": "the manifest is written, the folder still has its temporary name",
    "save.visible": "the folder has its name, older ones are not yet removed",
    "learner.restored": "a checkpoint was read, the broker does not know it",
    "generator.task": "a task was given to a generator",
    "generator.deliver": "a rollout is finished, not yet sent",
}

_reached: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """The process is at this point (a key of `POINTS`). Raises `ConfigError` when a variable names no point."""
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
