"""Results that are kept: the newest ones, within their bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sao.envs.protocol import Message, ToolCall
from sao.rollout.kept import Kept


def test_the_newest_results_are_kept_within_their_bytes() -> None:
    made: list[str] = []

    def function(message: Message, text: str) -> np.ndarray:
        made.append(text)
        return np.zeros(100, np.int32)

    kept = Kept(function, 200_000)
    message = Message("assistant", "x" * 500, (ToolCall("f", "{}" * 100),))
    for text in "abab":
        kept(message, text)
    assert made == ["a", "b"] and 2 * (400 + 500 + 200) < kept.held < 6000
    for number in range(1000):
        kept(message, str(number))
        kept(message, "a")
    assert kept.held <= 200_000 and made.count("a") == 1 and made.count("b") == 1
    kept(message, "b")
    assert made.count("b") == 2


def test_what_is_long_is_not_kept() -> None:
    kept = Kept(len, 200_000)
    assert kept("x" * 3000) == 3000 and kept.held == 0 and kept("x" * 1000) == 1000 and kept.held > 1000
    views = Kept(lambda text: np.zeros(10_000)[:5_000], 200_000)
    views("a")
    assert views.held == 0


def test_results_of_threads_are_counted_once() -> None:
    kept = Kept(lambda number: number * 2)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(kept, [number % 10 for number in range(1000)])) == [n % 10 * 2 for n in range(1000)]
    alone = Kept(lambda number: number * 2)
    for number in range(10):
        alone(number)
    assert kept.held == alone.held
