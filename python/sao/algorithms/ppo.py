"""The clipped policy loss of PPO (arXiv 1707.06347, equation 7).

    L(theta) = E_t[ min( r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t ) ]      maximised
    r_t      = pi_theta(a_t | s_t) / pi_old(a_t | s_t)

pi_old is the rollout's policy, as the engine logged it, or the policy at the start of the step (`old_logprobs`), as in
most synchronous trainers. With the latter r is 1 in the first of several updates, however old a rollout is: the clip
bounds what the step does, not what asynchrony has done.

It clips one side for each sign of A; `sao.algorithms.dis` rejects both sides. At eps 0.2 (PPO) and 0.3/5.0 (DIS) the
factor of grad log pi is: r = 0.5, A = +1: 0.5 and 0. r = 3, A = +1: 0 and 3. r = 8, A = -1: -8 and 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sao.algorithms.dis import LossSums, log_ratio


def ppo_loss(
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    mask: Tensor | None = None,
    stale: Tensor | None = None,
    token_weights: Tensor | None = None,
    old_logprobs: Tensor | None = None,
) -> LossSums:
    """Sum of -min(r A, clip(r) A) over action tokens and the counts to divide by; arguments as `dis.dis_loss`.

    old_logprobs: log pi_old where that is not the rollout's policy, which is then not read.
    `kept` counts tokens on the branch that has a gradient.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    fresh = mask if stale is None else mask & ~stale
    old = rollout_logprobs if old_logprobs is None else old_logprobs.detach()
    ratio = log_ratio(logprobs=logprobs[fresh], rollout_logprobs=old[fresh]).exp()
    advantage = advantages[fresh].detach().to(ratio.dtype)
    plain, clipped = ratio * advantage, ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantage
    objective = torch.minimum(plain, clipped)
    if token_weights is not None:
        objective = objective * token_weights[fresh]
    inside = (ratio >= 1.0 - eps_low) & (ratio <= 1.0 + eps_high)
    return LossSums(-objective.sum(), mask.sum(), (inside | (plain < clipped)).sum())
