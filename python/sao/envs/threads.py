"""Calls of code of others that may block, each in a thread of its own, and what such code may raise."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sao.errors import EnvironmentFailure

T = TypeVar("T")


async def in_thread(call: Callable[[], T], limit_s: float | None, what: str) -> T:
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
            failure = EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            done.set_exception(failure)

    threading.Thread(target=run, name=f"sao-{what}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), limit_s)
    except TimeoutError:
        raise EnvironmentFailure("timeout", f"{what} did not return within {limit_s:g} s") from None


async def called(call: Callable[[], Any], limit_s: float | None, what: str) -> Any:
    """As `in_thread`; what an async function gives is awaited here, with the same deadline."""
    found = await in_thread(call, limit_s, what)
    if not inspect.isawaitable(found):
        return found
    try:
        async with asyncio.timeout(limit_s):
            return await found  # in this task: what leaves the process would end the loop from another one
    except TimeoutError:
        raise EnvironmentFailure("timeout", f"{what} did not return within {limit_s} s") from None
    except EnvironmentFailure:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(f"{what}_error", f"{type(error).__name__}: {error}") from error
