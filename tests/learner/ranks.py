"""Ranks of a learner as processes forked from one that has imported torch: an import takes seconds, a fork none."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

PROGRAMS = ("learner.ranks_program", "learner.resume_program")


def run_ranks(program: str, ranks: int, *arguments: object, limit_s: float = 140.0) -> None:
    """Runs `main()` of one of `PROGRAMS` with these arguments on every rank; fails unless all end well in time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    words = [str(argument) for argument in arguments]
    processes = [
        _context().Process(target=_rank, args=(program, words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * ranks, "see the output of the ranks"
    finally:
        for process in processes:
            process.kill()


def _rank(program: str, words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = words
    importlib.import_module(program).main()


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PROGRAMS))
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):  # where the server finds the programs
        forkserver.ensure_running()
    return context
