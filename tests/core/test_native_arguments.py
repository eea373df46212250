"""Every entry point of the native core, called with what it does not take: an ordinary exception, never a panic."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sao import _core
from sao.errors import Error

ORDINARY = (Error, TypeError, ValueError, OverflowError, BufferError, AttributeError, OSError)


class Odd:
    """Has every attribute, all of them wrong; raises where it can."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __len__(self) -> int:
        raise ValueError("no length")

    def __iter__(self) -> Any:
        raise ValueError("no items")


JUNK: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 2**200, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "block", "paper", "\0", "\ud800", "x" * 10_000, b"", b"\x00" * 100, b"\xff" * 5),
    *([], [None], [[]], (), ({},), {}, {"a": 1}, object(), Odd(), int, print),
    *(np.zeros(0, np.int64), np.zeros(3, np.int64), np.array([-1, 5], np.int64), np.array([2**62] * 3, np.int64)),
    *(
        np.zeros(3, np.float32),
        np.array([np.nan, np.inf, -1.0], np.float32),
        np.zeros(3, np.float64),
        np.zeros(3, bool),
    ),
    *(np.zeros((2, 3), np.int64), np.zeros((0, 3), np.int64), np.zeros((3, 2), np.int64).T, np.zeros(6, np.int64)[::2]),
    *(np.array([0, 3], np.int64), np.array([0, 1], np.int64), np.array(7, np.int64), np.zeros(3, ">i8")),
    *(np.array(["a"]), np.array([object()]), np.zeros(3, np.uint8), memoryview(b"abc"), bytearray(b"abc")),
]


def made() -> list[tuple[str, Callable[..., Any]]]:
    """(name, call) of every function and method, each on an object that was just made."""
    buffer = lambda: _core.Buffer(2, 1000, "reject")  # noqa: E731

    def held() -> _core.Lease:
        store = buffer()
        store.put(b"h", b"p", min_version=0)
        return store.take(1, 0.1)[0]

    objects: list[tuple[str, Callable[[], Any]]] = [
        ("VersionClock", _core.VersionClock),
        ("Admission", lambda: _core.Admission(1, 2)),
        ("Buffer", buffer),
        ("Lease", held),
        ("Ledger", lambda: _core.Ledger(None)),
    ]
    found: list[tuple[str, Callable[..., Any]]] = []
    for name, value in vars(_core).items():
        if (
            callable(value)
            and not name.startswith("_")
            and not (isinstance(value, type) and issubclass(value, Exception))
        ):
            found.append((name, value))
    for name, make in objects:
        for method in dir(make()):
            if not method.startswith("_") and callable(getattr(make(), method)):
                found.append((f"{name}.{method}", lambda *a, m=method, mk=make, **k: getattr(mk(), m)(*a, **k)))
    return found


CALLS = made()


def test_all_of_the_core_is_called() -> None:
    names = {name for name, _ in CALLS}
    assert {"pack", "plan", "advantages", "token_lags", "decode", "summary", "encode", "Buffer.put"} <= names
    assert {"Ledger.trained", "Ledger.rewind", "VersionClock.wait", "Lease.commit", "ledger_history"} <= names


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_junk_gives_an_ordinary_exception(name: str, call: Callable[..., Any], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # a ledger may take a junk name for a file's
    chance = random.Random(name)
    try:
        parameters = [p for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    except ValueError:
        keywords = []
    keywords = keywords or ["min_version", "timeout_s", "max_bytes", "gamma", "cross_segment"]
    cases: list[tuple[list[Any], dict[str, Any]]] = [([], {}), *(([junk], {}) for junk in JUNK)]
    for _ in range(400):
        positional = [chance.choice(JUNK) for _ in range(chance.randrange(8))]
        named = {key: chance.choice(JUNK) for key in keywords if chance.random() < 0.3}
        cases.append((positional, named))
    for positional, named in cases:
        if waits(name, positional, named):
            continue
        try:
            call(*positional, **named)
        except ORDINARY:
            continue


def waits(name: str, positional: list[Any], named: dict[str, Any]) -> bool:
    """Whether the call would rightly wait for what never comes."""
    method = name.rpartition(".")[2]
    timeout = named.get("timeout_s", positional[1] if len(positional) > 1 else None)
    short = isinstance(timeout, int | float) and timeout == timeout and timeout <= 0
    return method in ("take", "wait") and not short


@pytest.mark.parametrize("entry", ["pack", "plan", "advantages", "token_lags"])
def test_right_types_with_senseless_numbers(entry: str) -> None:
    """Types that are taken, numbers that make no sense: refused by name, or a result; no panic, no endless run."""
    chance = np.random.default_rng(len(entry))
    wild = [0, 1, 2, 3, -1, -5, 7, 2**31, 2**62, -(2**63), 2**63 - 1]
    refused = 0
    for _ in range(1500):
        n = int(chance.integers(0, 6))
        longs = lambda k: chance.choice(wild, k).astype(np.int64)  # noqa: E731
        floats = lambda k: chance.choice([0.0, 0.5, -1.0, np.nan, np.inf, 1e38], k).astype(np.float32)  # noqa: E731
        number = lambda: int(chance.choice(wild))  # noqa: E731
        mask = chance.random(n) < 0.5
        try:
            if entry == "pack":
                _core.pack(longs(n), number())
            elif entry == "plan":
                _core.plan(longs(n), min(number(), 64), number(), number(), linear_cost=float(floats(1)[0]))
            elif entry == "token_lags":
                _core.token_lags(mask, longs(3 * n).reshape(n, 3), number())
            else:
                k = int(chance.integers(1, 4))
                options = {"gamma": float(floats(1)[0]), "lambda_policy": 0.5, "lambda_alpha": float(floats(1)[0])}
                options |= {"lambda_critic": 1.0}
                turns = (longs(2), floats(2)) if chance.random() < 0.3 else None
                offsets = longs(k + 1) if chance.random() < 0.7 else np.linspace(0, n, k + 1).astype(np.int64)
                _core.advantages(floats(n), mask, offsets, longs(2), floats(1), turn_rewards=turns, **options)
        except (Error, OverflowError):
            refused += 1
    assert refused > 100
