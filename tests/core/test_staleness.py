"""Versions: lag per token, admission in closed form, the clock."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao import _core
from sao.errors import DeadlineError, ValidationError


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 3)


def mask(*bits: int) -> np.ndarray:
    return np.array(bits, bool)


# Lag per token


def test_a_request_that_lives_through_an_update_has_two_versions() -> None:
    lags = _core.token_lags(np.ones(128, bool), spans((0, 57, 7), (57, 128, 8)), 9)
    assert lags.dtype == np.int32
    assert lags.tolist() == [2] * 57 + [1] * 71
    assert (lags <= 1).sum() == 71


@pytest.mark.parametrize("limit", range(4))
def test_fence_posts_of_the_limit(limit: int) -> None:
    """The update about to be made turns version 10 into 11."""
    trains = [v for v in range(6, 11) if _core.token_lags(mask(1), spans((0, 1, v)), 10)[0] <= limit]
    assert trains == list(range(10 - limit, 11))


def test_the_future_is_an_error_not_a_negative_lag() -> None:
    with pytest.raises(ValidationError, match=r"version_spans\[1\]: version 11 is ahead of the learner's version 10"):
        _core.token_lags(mask(1, 1), spans((0, 1, 10), (1, 2, 11)), 10)


def test_context_has_no_lag() -> None:
    assert _core.token_lags(mask(0, 1, 0, 1, 0), spans((1, 4, 3)), 5).tolist() == [-1, 2, -1, 2, -1]
    assert _core.token_lags(mask(0, 0), spans(), 5).tolist() == [-1, -1]
    assert _core.token_lags(mask(), spans(), 0).tolist() == []


@pytest.mark.parametrize(
    ("bits", "table", "message"),
    [
        ([1, 1], [(0, 1, 3)], r"action_mask\[1\]: an action token lies in no version span"),
        ([1, 0, 1], [(2, 3, 3)], r"action_mask\[0\]: an action token"),
        ([1, 1, 1], [(0, 1, 3), (2, 3, 3)], r"action_mask\[1\]: an action token"),
        ([0, 1], [(1, 1, 3)], r"version_spans\[0\]: \[1, 1\) must be non-empty"),
        ([0, 1], [(1, 3, 3)], r"version_spans\[0\]: \[1, 3\) .* within 2 tokens"),
        ([0, 1], [(-1, 2, 3)], r"version_spans\[0\]: \[-1, 2\)"),
        ([1, 1], [(0, 2, 3), (1, 2, 3)], r"version_spans\[1\]: \[1, 2\) .* start at or after 2"),
        ([0, 1], [(1, 2, 3), (0, 1, 3)], r"version_spans\[1\]: \[0, 1\) .* start at or after 2"),
        ([1], [(0, 1, -1)], r"version_spans\[0\]: version -1 is negative"),
    ],
)
def test_broken_spans_are_named(bits: list[int], table: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _core.token_lags(mask(*bits), spans(*table), 5)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match="version_spans: expected an int64 array"):
        _core.token_lags(mask(1), np.zeros(3, np.int64), 5)
    with pytest.raises(TypeError, match="version_spans: expected an int64 array"):
        _core.token_lags(mask(1), np.zeros((1, 3), np.int32), 5)
    with pytest.raises(ValidationError, match=r"version_spans: shape \[1, 2\]"):
        _core.token_lags(mask(1), np.zeros((1, 2), np.int64), 5)
    with pytest.raises(TypeError, match="action_mask: expected a contiguous"):
        _core.token_lags(np.ones(1, np.float32), spans((0, 1, 0)), 5)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=8), st.data())
def test_lags_of_random_spans(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    cuts = [0, *itertools.accumulate(n for n, _ in runs)]
    versions = list(itertools.accumulate(v for _, v in runs))
    bits = data.draw(st.lists(st.integers(0, 1), min_size=cuts[-1], max_size=cuts[-1]))
    learner = (versions[-1] if versions else 0) + data.draw(st.integers(0, 3))
    table = spans(*zip(cuts, cuts[1:], versions, strict=False))
    wide = np.asfortranarray(table)  # any memory order
    per_token = [v for (n, _), v in zip(runs, versions, strict=True) for _ in range(n)]
    want = [learner - v if m else -1 for m, v in zip(bits, per_token, strict=True)]
    assert _core.token_lags(np.array(bits, bool), wide, learner).tolist() == want


# Admission


def test_permits_in_closed_form() -> None:
    admission = _core.Admission(4, 128)
    assert admission.permits(0, 0, 0, 0, 0) == 5 * 128
    assert admission.permits(3, 384, 128, 100, 28) == 8 * 128 - 640
    assert admission.permits(0, 0, 0, 0, 641) == 0
    assert _core.Admission(2**63 - 1, 2**63 - 1).permits(0, 0, 0, 0, 0) == 2**64 - 1


@pytest.mark.parametrize(("max_lag", "batch", "name"), [(-1, 1, "max_lag"), (0, 0, "batch")])
def test_admission_is_checked(max_lag: int, batch: int, name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}: "):
        _core.Admission(max_lag, batch)
    with pytest.raises(ValidationError, match="running: -1"):
        _core.Admission(0, 1).permits(0, 0, 0, 0, -1)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_work_always_goes_on_and_lag_is_bounded_in_order(
    max_lag: int, batch: int, workers: int, data: st.DataObject
) -> None:
    """A simulated run that is trained in order of start, and starts by permit only.

    It never starves, whatever the limit and however few workers, and no rollout lags by more than `max_lag` learner
    steps behind its start.
    """
    admission = _core.Admission(max_lag, batch)
    running: list[int] = []  # learner step at the start of each rollout, oldest first
    trained = ready = 0
    for steps in range(40):
        while (n := min(admission.permits(steps, trained, 0, ready, len(running)), workers)) and len(running) < 50:
            running += [steps] * data.draw(st.integers(1, n))
        assert len(running) >= batch, "starved"
        started, running = running[:batch], running[batch:]
        assert max(steps - start for start in started) <= max_lag
        trained += batch


# The clock


def test_the_clock_only_goes_forward() -> None:
    clock = _core.VersionClock(3)
    clock.advance(4)
    clock.advance(9)
    assert clock.version == 9
    for same in (9, 8, -1):
        with pytest.raises(ValidationError, match=f"version: {same} does not exceed the current version 9"):
            clock.advance(same)
    assert clock.version == 9
    with pytest.raises(ValidationError, match="version: -1"):
        _core.VersionClock(-1)


def test_waiting_for_a_version_that_is_there_does_not_wait() -> None:
    clock = _core.VersionClock(5)
    assert clock.wait(5, 0) == 5
    assert clock.wait(2, 0.0) == 5


def test_waiting_ends_at_the_deadline() -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 0.15 s for policy version 1"):
        _core.VersionClock().wait(1, 0.15)
    assert 0.14 <= time.monotonic() - begin < 2
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValidationError, match="timeout_s"):
            _core.VersionClock().wait(1, wrong)


def test_everybody_who_waits_is_woken() -> None:
    clock = _core.VersionClock()
    got: list[int] = []
    threads = [threading.Thread(target=lambda v=v: got.append(clock.wait(v, 10))) for v in (1, 1, 2, 3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    clock.advance(1)
    clock.advance(3)
    for thread in threads:
        thread.join(5)
    assert len(got) == 4 and max(got) == 3


def test_many_advances_are_never_missed() -> None:
    clock, top = _core.VersionClock(), 2000

    def follow() -> None:
        seen = 0
        while seen < top:
            seen = clock.wait(seen + 1, 10)

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, top + 1):
        clock.advance(version)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
