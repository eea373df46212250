"""The critic's loss and how much of the return it explains (SAO, arXiv 2607.07508, sections 2 and 4.4).

    L_VF = E_t[ (V(s_t) - target_t)^2 ],   target_t = A_t(lambda_critic) + V(s_t)
    EV   = 1 - Var(R - V) / Var(R)

or, with old values (the implementation of VAPO and others, V_old frozen before the first update of the step):

    L_VF = E_t[ max( (V - target)^2, (clip(V, V_old - c, V_old + c) - target)^2 ) ]

V at an action token is the value of the state before that token. The mean is over all action tokens of the batch, and a
token that is out of the policy's band or too old counts like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sao.algorithms.policy_loss import wide


@dataclass(frozen=True, slots=True)
class ValueSums:
    """Sum of squared errors (0-d, differentiable), number of action tokens (0-d int64), and with old values the number
    of those whose value has left V_old +- clip.
    """

    total: Tensor
    count: Tensor
    clipped: Tensor | None = None


def value_loss(
    *,
    values: Tensor,
    targets: Tensor,
    old_values: Tensor | None = None,
    clip: float = 0.0,
    mask: Tensor | None = None,
) -> ValueSums:
    """Sum of squared errors over the tokens of `mask` (bool; default: all) in float32 or better.

    What the others hold outside the mask is never read. `old_values` are not a prediction of the same network now;
    there is no gradient where the held value has the larger error.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    chosen = wide(values[mask])
    target = targets[mask].detach().to(chosen.dtype)
    losses, clipped = (chosen - target).square(), None
    if old_values is not None:
        old = old_values[mask].detach().to(chosen.dtype)
        losses = torch.maximum(losses, (chosen.clamp(min=old - clip, max=old + clip) - target).square())
        clipped = ((chosen.detach() - old).abs() > clip).sum()
    return ValueSums(losses.sum(), mask.sum(), clipped)


def value_moments(*, values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sufficient statistics of the explained variance: float64[5] = count, sums of R, R^2, R - V, (R - V)^2.

    Moments of parts of a batch add up; `explained_variance` reads their sum.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    target = returns.detach()[mask].double()
    error = target - values.detach()[mask].double()
    count = torch.tensor(float(target.numel()), dtype=torch.float64, device=target.device)
    return torch.stack([count, target.sum(), (target * target).sum(), error.sum(), (error * error).sum()])


def explained_variance(moments: Tensor) -> float | None:
    """EV from `value_moments`; None where it does not exist (no token, or all returns equal)."""
    count, total, squares, error, error_squares = moments.tolist()
    if count == 0:
        return None
    variance = squares / count - (total / count) ** 2
    if variance <= 1e-12 * max(1.0, squares / count):
        return None
    return 1.0 - (error_squares / count - (error / count) ** 2) / variance
