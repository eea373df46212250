"""How good can a plan be? `sao.plan` beside an annealing of its result that takes as long as it likes.

512 agentic segments over 8 ranks, several draws. Both want ranks within 1.02 of the mean and, with that, the shortest
lock step: the sum over micro-batches of the costliest rank. `python bench/plan_limit.py [--quick]`
"""

from __future__ import annotations

import argparse

import numba
import numpy as np
from common import agentic_lengths, report
from pack import RANKS, cost

from sao import plan
from sao.measure.kernels import evenness

CAPACITY, LIMIT = 200_000, 1.02


@numba.njit(cache=False)
def anneal(lengths, costs, bin_of, n_bins, moves, seed):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Moves and swaps between micro-batches; the best (lock step, heaviest rank) that it meets, the limit first."""
    np.random.seed(seed)
    rows, mean = n_bins // RANKS, costs.sum() / RANKS
    load, cost, count = np.zeros(n_bins, np.int64), np.zeros(n_bins), np.zeros(n_bins, np.int64)
    for item in range(len(bin_of)):
        load[bin_of[item]] += lengths[item]
        cost[bin_of[item]] += costs[item]
        count[bin_of[item]] += 1

    def measure(cost):
        step, worst = 0.0, 0.0
        for row in range(rows):
            step += cost[row * RANKS : (row + 1) * RANKS].max()
        for rank in range(RANKS):
            worst = max(worst, cost[rank::RANKS].sum())
        return step / mean, worst / mean

    step, worst = measure(cost)
    best_step, best_worst = step, worst
    now = step + 3 * max(0.0, worst - LIMIT)
    for move in range(moves):
        heat = 0.02 * (1 - move / moves) ** 2
        a, b = np.random.randint(len(bin_of)), np.random.randint(len(bin_of))
        swap = np.random.random() < 0.5
        source, target = bin_of[a], bin_of[b] if swap else np.random.randint(n_bins)
        other = lengths[b] if swap else 0
        if source == target or (not swap and count[source] == 1):
            continue
        if load[target] + lengths[a] - other > CAPACITY or load[source] + other - lengths[a] > CAPACITY:
            continue
        change = costs[a] - (costs[b] if swap else 0.0)
        cost[source] -= change
        cost[target] += change
        step, worst = measure(cost)
        after = step + 3 * max(0.0, worst - LIMIT)
        if after > now and np.random.random() >= np.exp((now - after) / max(heat, 1e-9)):
            cost[source] += change
            cost[target] -= change
            continue
        now = after
        load[source] += other - lengths[a]
        load[target] += lengths[a] - other
        bin_of[a] = target
        if swap:
            bin_of[b] = source
        else:
            count[source] -= 1
            count[target] += 1
        if (max(worst, LIMIT), step) < (max(best_worst, LIMIT), best_step):
            best_step, best_worst = step, worst
    return best_step, best_worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few draws, short annealing")
    quick = parser.parse_args().quick
    rows = []
    for seed in range(2 if quick else 8):
        lengths = agentic_lengths(512, seed)
        made = plan(lengths, RANKS, CAPACITY, 1)
        costs = cost(lengths)
        imbalance, step = evenness(made.costs)
        bin_of = made.micro_batch.astype(np.int64) * RANKS + made.rank
        n_bins = made.n_micro_batches * RANKS
        moves = 200_000 if quick else 20_000_000
        tries = [anneal(lengths, costs, bin_of.copy(), n_bins, moves, number) for number in range(1 if quick else 3)]
        best_step, best_worst = min(tries, key=lambda found: (max(found[1], LIMIT), found[0]))
        rows.append([f"{seed}", f"{made.n_micro_batches}", imbalance, best_worst, step, best_step])
    columns = ["draw", "micro-batches", "imbalance", "annealed", "lock-step", "annealed lock-step"]
    report("plan_limit", columns, rows, f"512 agentic segments, {RANKS} ranks, imbalance wanted {LIMIT}")


if __name__ == "__main__":
    main()
