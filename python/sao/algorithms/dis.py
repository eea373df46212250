"""Direct double-sided importance sampling: the policy loss of SAO (arXiv 2607.07508, section 3.1, equations 1-3).

    L(theta) = E_t[ f(r_t) * A_t * log pi_theta(a_t | s_t) ]                        maximised      (1)
    r_t      = exp( log pi_theta(a_t | s_t) - log pi_rollout(a_t | s_t) )                          (2)
    f(x)     = x  if 1 - eps_low < x < 1 + eps_high  else  0                        strict         (3)

f and A carry no gradient. (Differentiating f as well gives r A (1 + log pi) grad log pi, which vanishes at
log pi = -1 and has the wrong sign below p = 1/e.) The denominator of the ratio is the log-prob that the rollout engine
recorded: there is no frozen policy of the start of the step. A token outside the band has weight and gradient 0
whatever the sign of A; it is not clamped to the band's edge, and it stays in the denominator, the advantage and the
value loss.

Example: band 0.3/5.0 is (0.7, 6.0). Ratio 0.69 has weight 0, 0.71 has 0.71, 5.99 has 5.99, 6.01 has 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is cut here before `exp`: far outside every sensible band, far inside float32."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """A policy loss before its one division: `total` (0-d, differentiable) and two 0-d int64 counts.

    `count`: action tokens, masked ones included; `kept`: action tokens that have a gradient.
    """

    total: Tensor
    count: Tensor
    kept: Tensor


def log_ratio(*, logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """log r of equation 2, in float32 or better and cut to +-`LOG_RATIO_LIMIT`; same shape as the inputs."""
    difference = _wide(logprobs) - _wide(rollout_logprobs)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dis_weights(*, logprobs: Tensor, rollout_logprobs: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """f(r_t) of equation 3 for action tokens only, without gradient; same shape as the inputs."""
    with torch.no_grad():
        ratio = log_ratio(logprobs=logprobs, rollout_logprobs=rollout_logprobs).exp()
        inside = (ratio > 1.0 - eps_low) & (ratio < 1.0 + eps_high)
        return torch.where(inside, ratio, torch.zeros_like(ratio))


def dis_loss(
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
    """Sum of -f(r) A log pi over action tokens (equation 1, to be minimised), and the counts to divide by.

    logprobs, rollout_logprobs, advantages: float, one shape. mask: bool, true at action tokens (default: all); what
    the other arrays hold elsewhere is never read. stale: bool, true at action tokens that are too old: no gradient,
    still in `count`. token_weights: float factor per token, for other means than the token mean. The loss of a step is
    the sum of all totals divided once by the sum of all counts, over micro-batches and ranks.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    fresh = mask if stale is None else mask & ~stale
    logp = _wide(logprobs[fresh])
    weights = dis_weights(
        logprobs=logp.detach(), rollout_logprobs=rollout_logprobs[fresh], eps_low=eps_low, eps_high=eps_high
    )
    kept = weights != 0
    factor = weights[kept] * advantages[fresh][kept].detach()
    if token_weights is not None:
        factor = factor * token_weights[fresh][kept]
    return LossSums(-(factor * logp[kept]).sum(), mask.sum(), kept.sum())


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
