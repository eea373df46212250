"""The bound on lag under both orders; a million steps (`window`) of the broker's own task book and admission.

Rollout times are heavy-tailed (Pareto 1.2, capped at 2000 times the shortest), 2 % of the rollouts fail and 0.5 % lose
their generator and start again; the learner needs a random time for a step. Each step publishes a version. The lag of a
rollout is that of its first token: versions between its (last) start and the update that uses it.
`python bench/window.py [--quick]`
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from typing import Any

from common import report

from sao import _core
from sao.broker.persistence import Persistence
from sao.broker.tasks import TaskBook


def simulate(steps: int, lag: int, batch: int, order: str, seed: int) -> dict[int, int]:
    """Number of trained rollouts by lag."""
    rng = random.Random(seed)
    ledger, admission = _core.Ledger(), _core.Admission(lag, batch)
    book = TaskBook(Persistence(ledger))
    started: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    finished: deque[int] = deque()
    lags: dict[int, int] = {}
    now, commits, learner_until, lease = 0.0, 0, 0.0, 0
    held: list[int] | None = None
    while commits < steps:
        counts = ledger.counts()
        in_flight = counts["generating"]
        for _ in range(admission.permits(commits, counts["trained"], counts["leased"], counts["ready"], in_flight)):
            task = book.start("g", now)
            started[task.ordinal] = commits
            heapq.heappush(running, (now + min(rng.paretovariate(1.2), 2000.0), task.ordinal))
        if held is None:
            head = book.head(batch) if order == "window" else []
            if order == "completion" and len(finished) >= batch:
                head = [finished.popleft() for _ in range(batch)]
            if head:
                held, lease, learner_until = head, lease + 1, now + rng.uniform(0.2, 2.0)
                book.lease(lease, held)
                for ordinal in held:
                    behind = commits - started.pop(ordinal)
                    lags[behind] = lags.get(behind, 0) + 1
        if held is not None and (not running or learner_until <= running[0][0]):
            now = learner_until
            book.trained(lease, held, commits + 1, batch, 0)
            commits, held = commits + 1, None
            continue
        now, ordinal = heapq.heappop(running)
        task, luck = book.live[ordinal], rng.random()
        if luck < 0.02:
            book.drop(task, "failed")
            del started[ordinal]
        elif luck < 0.025 and task.attempt < 3:
            book.again(task, "lost")
        else:
            book.ready(task, {"n_tokens": 1, "n_actions": 1, "min_version": 0, "max_version": 0}, (), now)
            finished.append(ordinal)
    ledger.check()
    return lags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows: list[list[Any]] = []
    for order, steps in (("window", 2_500 if quick else 250_000), ("completion", 2_500 if quick else 25_000)):
        for lag, batch in ((0, 4), (1, 4), (3, 2), (8, 2)):
            lags = simulate(steps, lag, batch, order, seed=lag)
            total, largest = sum(lags.values()), max(lags)
            beyond = sum(n for behind, n in lags.items() if behind > lag) / total
            mean = sum(behind * n for behind, n in lags.items()) / total
            rows.append([order, f"{lag}", f"{batch}", f"{steps}", f"{largest}", 100 * beyond, mean])
            if order == "window" and largest > lag:
                raise SystemExit(f"bound broken: lag {largest} > max_lag {lag}")
    columns = ["order", "max_lag", "batch", "steps", "largest lag", "% beyond max_lag", "mean lag"]
    report("window", columns, rows, "heavy-tailed rollouts, 2 % failures, 0.5 % lost generators")


if __name__ == "__main__":
    main()
