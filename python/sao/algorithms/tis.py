"""Truncated importance sampling: the rollout's distribution is corrected for, up to a limit, and no token is left out.

    L(theta) = E_t[ min(r_t, 1 + eps_high) * A_t * log pi_theta(a_t | s_t) ]        maximised
    r_t      = exp( log pi_theta(a_t | s_t) - log pi_rollout(a_t | s_t) )

The weight carries no gradient and is never zero: where `sao.algorithms.dis` rejects a token, this one goes on learning
from it. At eps_high = 1: ratio 0.01 has weight 0.01, 1.5 has 1.5, 8 has 2. (Ionides 2008; for language models
"Your efficient RL framework secretly brings you off-policy RL training", 2025.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from sao.algorithms.dis import LossSums, log_ratio


def tis_loss(
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    mask: Tensor | None = None,
    stale: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> LossSums:
    """Sum of -min(r, 1 + eps_high) A log pi over action tokens and the counts to divide by; as `dis.dis_loss`.

    `eps_low` is not used: there is no lower limit.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    fresh = mask if stale is None else mask & ~stale
    chosen = logprobs[fresh]
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    ratio = log_ratio(logprobs=chosen.detach(), rollout_logprobs=rollout_logprobs[fresh]).exp()
    factor = ratio.clamp(max=1.0 + eps_high) * advantages[fresh].detach()
    if token_weights is not None:
        factor = factor * token_weights[fresh]
    return LossSums(-(factor * chosen).sum(), mask.sum(), fresh.sum())
