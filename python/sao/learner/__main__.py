"""`python -m sao.learner`: one rank of the learner, started by the supervisor or by torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from msgspec import structs

from sao.config import load
from sao.errors import ConfigError, Error
from sao.storage import checkpoints
from sao.storage.failpoints import failpoint
from sao.storage.parent_death import heeded
from sao.transport.client import Callbacks, Client
from sao.transport.keys import LEARNER, client_keys, server_keys
from sao.transport.messages import Hello, WorkerError
from sao.transport.sockets import Limits
from sao.transport.weight_bus import WeightsServer

if TYPE_CHECKING:
    from sao.learner.step import Learner

DONE, FAILED, BAD_CONFIG = 0, 1, 2
_CONNECT_S = 60.0

log = logging.getLogger("sao.learner")


def _where(learner: Learner, hello: Hello) -> Hello:
    """The greeting of now: a broker that knows nothing of this process any more must not take it for its beginning."""
    return structs.replace(hello, step=learner.steps, weights=learner.published or hello.weights)


def main(argv: list[str] | None = None) -> int:
    """Trains until it is stopped. Exit codes: 0 done, 1 failed, 2 the configuration is wrong (a restart is no use)."""
    parser = argparse.ArgumentParser(prog="python -m sao.learner", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="folder that holds config.json")
    parser.add_argument("--config", type=Path, help="the configuration, if it is another file")
    parser.add_argument("--endpoint", required=True, help="address of the broker")
    parser.add_argument("--weights-folder", type=Path, required=True, help="folder where policy versions are published")
    parser.add_argument("--store", type=Path, help="file at which the ranks meet; default: MASTER_ADDR and MASTER_PORT")
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint to continue from")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], help="recorded steps to make again, nothing else")
    parser.add_argument("--report", type=Path, help="file for what a replay has found")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders; nothing is fetched
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what learner.deterministic needs on GPUs
    asked = _asked_by_signals()
    client: Client | None = None
    learner: Learner | None = None
    server: WeightsServer | None = None
    joined = False
    try:
        config = load(arguments.config or arguments.run_folder / "config.json")
        # Imported late: a wrong config.json is named before torch is loaded.
        from sao.learner.checkpoint import republish, restore
        from sao.learner.loop import train
        from sao.learner.pretrain import pretrain
        from sao.learner.replay import replay
        from sao.learner.step import Learner
        from sao.learner.world import World

        world = World.join(arguments.store)
        transport, limits = config.transport, Limits.of(config.transport)
        if world.rank == 0 and not arguments.replay:
            keys = client_keys(transport.keys, arguments.endpoint, "learner", "learner")
            calls = Callbacks(greet=lambda hello: hello if learner is None else _where(learner, hello))
            client = Client(arguments.endpoint, role="learner", name="learner", limits=limits, keys=keys, calls=calls)
        learner = Learner(config, world, None if arguments.replay else arguments.weights_folder)
        trained, weights = None, None
        if client is not None and transport.weights_bind is not None:
            served = server_keys(transport.keys, transport.weights_bind, LEARNER)
            server = WeightsServer(transport.weights_bind, limits, served)
            learner.announce = server.publish
            log.info("weights for other hosts are served at %s", server.endpoint)
        if arguments.checkpoint is not None:
            checkpoint = checkpoints.read(arguments.checkpoint)
            restore(learner, checkpoint)
            weights = republish(learner, checkpoint)
            trained = checkpoints.Ordinals(checkpoint.manifest["ledger"]["trained"])
            failpoint("learner.restored")
            log.info("continues from %s: step %d, version %d", checkpoint.path, learner.steps, learner.version)
        if client is not None:
            client.connect(deadline_s=_CONNECT_S, step=learner.steps, weights=weights)
            joined = True
        if arguments.replay:
            replay(learner, arguments.replay, arguments.report)
        elif config.run.task == "pretrain_value":
            pretrain(learner, client, arguments.run_folder, asked)
        else:
            train(learner, client, arguments.run_folder / "checkpoints", trained, asked)
        if client is not None:
            with suppress(Error):
                client.flush(deadline_s=5.0)
            client.close()
        if server is not None:
            server.close()
        world.leave()
        return DONE
    except Exception as error:
        if isinstance(error, Error | OSError):  # of a disk: the text says all
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.error("failed", exc_info=error)
        if client is not None:  # the broker ends the run
            with suppress(Error):
                if not joined:
                    client.connect(deadline_s=5.0)
                client.call(WorkerError(text=f"{type(error).__name__}: {error}"), deadline_s=5.0).result()
            client.close()
        return BAD_CONFIG if isinstance(error, ConfigError) else FAILED


def _asked_by_signals() -> Future[str]:
    """Done when a signal has asked this rank to stop: it ends its step then and saves. A second one kills."""
    asked: Future[str] = Future()

    def ask(number: int, _frame: FrameType | None) -> None:
        for again in numbers:
            signal.signal(again, signal.SIG_DFL)
        # On a thread: this one may be just waiting for the very lock.
        threading.Thread(target=asked.set_result, args=(f"received {signal.Signals(number).name}",)).start()

    numbers = heeded(signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else []
    for number in numbers:
        signal.signal(number, ask)
    return asked


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code != DONE:
        os._exit(code)  # a failed rank must not wait at exit for collectives that nobody joins
    sys.exit(code)
