"""`python -m sao.generator --run-folder DIR --endpoint E --name g0 --incarnation k`: one generator process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from sao.config import load
from sao.errors import ConfigError, Error
from sao.generator.worker import make_generator

DONE, FAILED, BAD_CONFIG = 0, 1, 2
SWITCH_S = 0.0005  # the engine's thread gives up the lock at every tensor operation and would wait 5 ms to get it back

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("sao.generator")


class DaemonExecutor(ThreadPoolExecutor):
    """A daemon thread per call. As the loop's default executor it is what `asyncio.to_thread` uses.

    A tool that blocks for ever holds up neither the others nor the end of the process: the standard pool has few
    threads, and the interpreter waits for them. It is the base class only because asyncio demands that of an executor.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn` in a thread of its own."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="sao-blocking", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for nobody."""


async def _run(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonExecutor())  # tools of environments may block in `asyncio.to_thread`
    config = load(arguments.config or arguments.run_folder / "config.json")
    generator = make_generator(
        config,
        arguments.endpoint,
        arguments.name,
        arguments.incarnation,
        arguments.weights_folder,
        arguments.index,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
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
    except ConfigError as error:
        log.error("%s", error)
        return BAD_CONFIG
    except Error as error:
        log.error("%s: %s", type(error).__name__, error)
        return FAILED
    except Exception:
        log.exception("failed")
        return FAILED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a tool may be stuck in a thread or a task: the interpreter's own end could wait for it
