"""`sao.plan` of lengths that are far from those of rollouts: the slowest plan of each kind over ranks and rows.

Equal segments, segments of which two or three fill a row, two kinds, and one or two that fill a row alone among
short ones.
`python bench/odd_plans.py [--quick]`
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np
from common import median, report, seconds

from sao import plan

CAPACITY = 200_000


def kinds(n: int) -> dict[str, np.ndarray]:
    """Lengths int64[n] by what is odd about them."""
    rng = np.random.default_rng(0)
    short = rng.integers(50, 2000, n)

    def among_short(full: int) -> np.ndarray:
        return np.concatenate([np.full(full, CAPACITY), short[full:]])

    return {
        "equal, each fills a row": np.full(n, CAPACITY),
        "equal, short": np.full(n, 1000),
        "halves": np.full(n, CAPACITY // 2),
        "halves and one token more": CAPACITY // 2 + rng.integers(0, 2, n),
        "thirds": np.full(n, CAPACITY // 3),
        "two kinds": np.where(rng.random(n) < 0.5, 150_000, 50_000),
        "short": short,
        "one full among short": among_short(1),
        "two full among short": among_short(2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2,000 segments, not 50,000")
    n = 2_000 if parser.parse_args().quick else 50_000
    rows = []
    for kind, lengths in kinds(n).items():
        slowest = max(
            (median(seconds(lambda x=lengths, r=ranks, w=width: plan(x, r, CAPACITY, w), 0)), ranks, width)
            for ranks, width in product((1, 2, 8, 64), (1, 4, 16))
        )
        rows.append([kind, slowest[0] * 1e3, f"{slowest[1]}", f"{slowest[2]}"])
    report(
        "odd_plans",
        ["lengths", "ms (slowest of 12)", "ranks", "rows"],
        rows,
        f"{n} segments, rows of {CAPACITY} tokens",
    )


if __name__ == "__main__":
    main()
