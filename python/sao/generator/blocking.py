"""Threads for tools that block: one that never returns may hold up neither the others nor the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(ThreadPoolExecutor):
    """A daemon thread per call. As the loop's default executor it is what `asyncio.to_thread` uses.

    The standard pool has few threads (a handful of stuck tools stops all others) and the interpreter waits for them at
    its end. Derives from it only because asyncio demands that of a default executor.
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
