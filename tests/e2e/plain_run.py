"""`sao` with the learner of `plain_learner.py` in place of the real one; arguments and other processes are the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from sao import cli
from sao.config import Config
from sao.runtime import launch
from sao.runtime.processes import Command

PLAIN = Path(__file__).with_name("plain_learner.py")
real = launch.learner


def learner(config: Config, places: launch.Places, rank: int, torchrun: bool = False) -> Command:
    """The command of the real learner, run by the plain one."""
    command = real(config, places, rank, torchrun)
    return replace(command, argv=(sys.executable, str(PLAIN), *command.argv[3:]))


if __name__ == "__main__":
    launch.learner = learner
    cli.main()
