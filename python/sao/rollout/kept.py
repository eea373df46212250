"""Results that are kept in memory, up to a number of bytes: what agents send may be long, and differ every time."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
BYTES = 32 << 20


class Kept(Generic[T]):
    """A function whose newest results are kept, with their arguments, in at most so many bytes; for any thread.

    held: bytes now. What alone would take more than a hundredth of them is not kept.
    """

    def __init__(self, function: Callable[..., T], most: int = BYTES) -> None:
        self._function, self._most = function, most
        self._results: OrderedDict[tuple[Any, ...], tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.held = 0

    def __call__(self, *arguments: Any) -> T:
        with self._lock:
            if (known := self._results.get(arguments)) is not None:
                self._results.move_to_end(arguments)
                return known[0]
        result = self._function(*arguments)
        size = _size((arguments, result))
        if size <= self._most // 100:
            with self._lock:
                if arguments not in self._results:
                    self._results[arguments] = result, size
                    self.held += size
                while self.held > self._most:
                    self.held -= self._results.popitem(last=False)[1][1]
        return result


def _size(value: Any) -> int:
    """Bytes of a value with all that is in it, nearly."""
    found = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return found + (value.nbytes if value.base is not None else 0)
    if isinstance(value, dict):
        return found + sum(map(_size, value)) + sum(map(_size, value.values()))
    if isinstance(value, tuple | list):
        return found + sum(map(_size, value))
    if hasattr(value, "__slots__") and not isinstance(value, str):
        return found + sum(_size(getattr(value, name)) for name in value.__slots__)
    return found
