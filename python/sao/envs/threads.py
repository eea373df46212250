"""Calls of code of others that may block, each in a thread of its own and with a deadline."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sao.errors import EnvironmentFailure

T = TypeVar("T")


async def in_thread(call: Callable[[], T], limit_s: float, what: str) -> T:
    """Runs `call` in a daemon thread of its own: one that hangs holds up neither others nor the end of the process.

    Raises `EnvironmentFailure`: "timeout" after `limit_s` seconds, f"{what}_error" for anything that `call` raises.
    """
    done = Future[T]()
    done.set_running_or_notify_cancel()  # a caller that leaves cancels its own wait only

    def run() -> None:
        try:
            done.set_result(call())
        except EnvironmentFailure as error:
            done.set_exception(error)
        except BaseException as error:  # code of others: whatever it raises is a failure with a reason
            done.set_exception(EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name=f"sao-{what}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), limit_s)
    except TimeoutError:
        raise EnvironmentFailure("timeout", f"{what} did not return within {limit_s:g} s") from None
