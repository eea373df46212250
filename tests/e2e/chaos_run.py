"""`sao` for runs with chaos: the plain learner, restarts without limit, generators behind proxies that can be cut.

`CHAOS_FOLDER` names the folder of the proxies' sockets; where the broker really listens is written there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from plain_run import learner

from sao import cli
from sao.config import Config
from sao.runtime import launch, supervisor
from sao.runtime.processes import Command

FOLDER = Path(os.environ["CHAOS_FOLDER"])
real = launch.generator


def generator(config: Config, places: launch.Places, index: int, incarnation: int) -> Command:
    """The command of a generator that speaks to its proxy."""
    unfinished = FOLDER / f".endpoint-{index}"
    unfinished.write_text(places.endpoint.removeprefix("ipc://"))
    unfinished.replace(FOLDER / "endpoint")
    return real(config, replace(places, endpoint=f"ipc://{FOLDER / f'g{index}'}"), index, incarnation)


if __name__ == "__main__":
    launch.learner, launch.generator = learner, generator
    supervisor.RESTARTS = 10**6
    cli.main()
