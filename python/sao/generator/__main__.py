"""`python -m sao.generator --run-folder DIR --endpoint E --name g0 --incarnation k`: one generator process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sao.config import load
from sao.errors import ConfigError, Error
from sao.generator.worker import make_generator
from sao.storage.parent_death import heeded

DONE, FAILED, BAD_CONFIG = 0, 1, 2
SWITCH_S = 0.0005  # the engine's thread gives up the lock at every tensor operation and would wait 5 ms to get it back
TOOLS = 4096  # calls of environments in `asyncio.to_thread` at once: one that blocks for ever holds up no other

log = logging.getLogger("sao.generator")


async def _run(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(TOOLS, "sao-blocking"))
    config = load(arguments.config or arguments.run_folder / "config.json")
    who = arguments.endpoint, arguments.name, arguments.incarnation
    generator = make_generator(config, *who, arguments.weights_folder, arguments.index)
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, generator.stop, signal.Signals(number).name)
    await generator.run()


def main() -> int:
    """Runs until it is stopped. Exit codes: 0 done, 1 failed, 2 the configuration is wrong (a restart is no use)."""
    parser = argparse.ArgumentParser(prog="python -m sao.generator", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="folder that holds config.json")
    parser.add_argument("--config", type=Path, help="the configuration, if it is another file")
    parser.add_argument("--endpoint", required=True, help="address of the broker")
    parser.add_argument("--name", required=True, help="name of this generator, unique in the run")
    parser.add_argument("--incarnation", type=int, default=0, help="how often this name was started before")
    parser.add_argument("--index", type=int, default=0, help="number of this generator on its host, from 0")
    parser.add_argument("--weights-folder", type=Path, help="own folder for weights pulled from another host")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders; nothing is fetched
    sys.setswitchinterval(SWITCH_S)
    try:
        # Not `asyncio.run`: its end waits for whatever ignores being cancelled. The process ends right after.
        asyncio.new_event_loop().run_until_complete(_run(arguments))
        return DONE
    except Exception as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=not isinstance(error, Error | OSError))
        return BAD_CONFIG if isinstance(error, ConfigError) else FAILED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a tool may be stuck in a thread or a task: the interpreter's own end could wait for it
