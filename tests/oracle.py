"""The slow, plain float64 reference of advantages and critic targets: sums written as the papers write them.

No recurrence, no shared code with the kernel. A trajectory is a list of segments, each a pair (mask, values).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Segments = Sequence[tuple[Sequence[int], Sequence[float]]]


def adaptive_lambda(actions: int, alpha: float = 1.5) -> float:
    """1 - 1/(alpha * l), clamped to [0, 1]; NaN for a trajectory without actions, which has no lambda."""
    return min(max(1 - 1 / (alpha * actions), 0.0), 1.0) if actions else math.nan


def discounted(deltas: Sequence[float], decay: float) -> list[float]:
    """A_t = sum over l of decay^l * delta_(t+l)."""
    return [sum(decay**ahead * delta for ahead, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def deltas(values: Sequence[float], rewards: Sequence[float], gamma: float, after: float) -> list[float]:
    """delta_t = r_t + gamma * V_(t+1) - V_t, with the value `after` behind the last step."""
    following = [*values[1:], after]
    return [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]


def gae(
    segments: Segments,
    reward: float,
    *,
    gamma: float,
    lambda_policy: float | None,
    lambda_critic: float,
    cross_segment: str = "paper",
    skip_observations: bool = True,
    bootstrap: float = 0.0,
    turn_rewards: dict[tuple[int, int], float] | None = None,
    alpha: float = 1.5,
    after: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[list[float]], list[list[float]], float]:
    """(advantages, targets) per segment, 0 where the mask is, and the lambda of one trajectory.

    `turn_rewards` maps (segment, token) to a reward. `lambda_policy=None` is adaptive. `after`: of each segment the
    action tokens sampled after it, and the segment that goes on behind it or -1; None: in order.
    """
    extra = turn_rewards or {}
    counts = [sum(1 for m in mask if m) for mask, _ in segments]
    lam = adaptive_lambda(sum(counts), alpha) if lambda_policy is None or not sum(counts) else lambda_policy
    advantages = [[0.0] * len(mask) for mask, _ in segments]
    targets = [[0.0] * len(mask) for mask, _ in segments]

    # A step is (segment, token); a chain is a list of steps that ends with the outcome.
    # Of each, the own steps of its first segment are written.
    order = after or [(sum(counts[s + 1 :]), s + 1 if s + 1 < len(segments) else -1) for s in range(len(segments))]
    own: list[list[tuple[int, int]]] = []
    for s, (mask, _) in enumerate(segments):
        actions = [t for t, m in enumerate(mask) if m]
        steps = actions if skip_observations or not actions else list(range(actions[0], actions[-1] + 1))
        own.append([(s, t) for t in steps])

    for first, steps in enumerate(own):
        chain, at = list(steps), first
        while cross_segment == "chained" and order[at][1] != -1:
            at = order[at][1]
            chain += own[at]
        if not steps:
            continue
        values = [segments[s][1][t] for s, t in chain]
        rewards = [extra.get(step, 0.0) for step in chain]
        rewards[-1] += reward
        delta = deltas(values, rewards, gamma, bootstrap)
        later = order[first][0] if cross_segment == "paper" else 0
        factor = (gamma * lam) ** later
        policy, critic = discounted(delta, gamma * lam), discounted(delta, gamma * lambda_critic)
        for (s, t), a, c, v in zip(chain, policy, critic, values, strict=True):
            if s == first and segments[s][0][t]:
                advantages[s][t] = factor * a
                targets[s][t] = c + v
    return advantages, targets, lam
