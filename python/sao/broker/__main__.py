"""`python -m sao.broker --run-folder DIR --endpoint E`: the broker of one run. Logs to the standard error output."""

import argparse
import logging
import signal
import sys
from pathlib import Path

from sao.broker.server import Server
from sao.config import load
from sao.errors import ConfigError, Error
from sao.storage.parent_death import heeded


def main(argv: list[str] | None = None) -> int:
    """Serves until the run has ended; 0 in order, 1 after an error, 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(prog="python -m sao.broker", description="The broker of one run.")
    parser.add_argument("--run-folder", type=Path, required=True, help="folder with config.json, and the journal")
    parser.add_argument("--endpoint", required=True, help="ipc://PATH in a folder with mode 0700, or tcp://HOST:PORT")
    parser.add_argument("--resume-step", type=int, help="the run is resumed after this step; later ones are lost")
    parser.add_argument("--line", type=int, help="number of this return to --resume-step; with the same one it is done")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load(arguments.run_folder / "config.json")
        server = Server(config, arguments.run_folder, arguments.endpoint, arguments.resume_step, arguments.line)
    except (Error, OSError) as error:
        logging.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _frame: server.end(f"broker received {signal.Signals(n).name}"))
    try:
        server.run()
    except Exception:
        return 1  # logged where it happened
    return 0


if __name__ == "__main__":
    sys.exit(main())
