"""Policy losses: sums over action tokens, divided once a step by the sum of all counts over micro-batches and ranks.

All take the same arguments, float tensors of one shape:

    logprobs            log pi_theta(a_t | s_t), differentiable
    rollout_logprobs    of the policy that sampled the token, as the engine recorded it
    advantages          A_t, without gradient
    mask                bool, true at action tokens (default: all); what the others hold elsewhere is never read
    token_weights       factor per token, for other means than the token mean

The ratio is r_t = exp(log pi_theta(a_t | s_t) - log pi_rollout(a_t | s_t)). Their factor of grad log pi at eps 0.2 for
`ppo`, 0.3/5.0 for `dis` and 1.0 for `tis`:

    r = 0.5, A = +1     ppo  0.5    dis 0     tis  0.5
    r = 3,   A = +1     ppo  0      dis 3     tis  2
    r = 8,   A = -1     ppo -8      dis 0     tis -2
"""

from collections.abc import Callable
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
    """log r, in float32 or better and cut to +-`LOG_RATIO_LIMIT`; same shape as the inputs."""
    difference = wide(logprobs) - wide(rollout_logprobs)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dis_weights(*, logprobs: Tensor, rollout_logprobs: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """f(r_t) of `dis_loss` for action tokens only, without gradient; same shape as the inputs.

    The band is open: at 0.3/5.0 it is (0.7, 6.0), ratio 0.69 has weight 0, 0.71 has 0.71, 5.99 has 5.99, 6.01 has 0.
    """
    ratios = log_ratio(logprobs=logprobs, rollout_logprobs=rollout_logprobs).exp().detach()
    return ratios * _inside(ratios, eps_low, eps_high)


def _inside(ratios: Tensor, eps_low: float, eps_high: float) -> Tensor:
    return (ratios > 1.0 - eps_low) & (ratios < 1.0 + eps_high)


Terms = tuple[Tensor, Tensor]
"""The objective of the tokens that are not left out, and bool[n]: which of the n action tokens have a gradient."""


class _PolicyLoss:
    """A policy loss, with the arguments that the module lists; made of its `Terms` over the action tokens."""

    def __init__(self, terms: Callable[[Tensor, Tensor, Tensor, float, float], Terms]) -> None:
        self._terms, self.__doc__ = terms, terms.__doc__

    def __call__(
        self,
        *,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        eps_low: float,
        eps_high: float,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> LossSums:
        mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
        chosen, credit = wide(logprobs[mask]), advantages[mask].detach()
        if token_weights is not None:
            credit = credit * token_weights[mask]
        ratios = log_ratio(logprobs=chosen, rollout_logprobs=rollout_logprobs[mask].detach()).exp()
        objective, kept = self._terms(chosen, ratios, credit, eps_low, eps_high)
        return LossSums(-objective.sum(), mask.sum(), kept.sum())


@_PolicyLoss
def dis_loss(logprobs: Tensor, ratios: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Terms:
    """Direct double-sided importance sampling: the loss of SAO (arXiv 2607.07508, section 3.1, equations 1-3).

        L(theta) = E_t[ f(r_t) * A_t * log pi_theta(a_t | s_t) ]                    maximised      (1)
        f(x)     = x  if 1 - eps_low < x < 1 + eps_high  else  0                    strict         (3)

    f and A carry no gradient. (Differentiating f as well gives r A (1 + log pi) grad log pi, which vanishes at
    log pi = -1 and has the wrong sign below p = 1/e.) There is no frozen policy of the start of the step. A token
    outside the band has weight and gradient 0 whatever the sign of A; it is not clamped to the band's edge, and it
    stays in the denominator, the advantage and the value loss.
    """
    inside = _inside(ratios, eps_low, eps_high)
    return ratios[inside].detach() * advantages[inside] * logprobs[inside], inside


@_PolicyLoss
def ppo_loss(logprobs: Tensor, ratios: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Terms:
    """The clipped loss of PPO (arXiv 1707.06347, equation 7); `kept` counts tokens on the branch with a gradient.

        L(theta) = E_t[ min( r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t ) ]  maximised
        r_t      = pi_theta(a_t | s_t) / pi_old(a_t | s_t)

    pi_old is the policy that `rollout_logprobs` are of: the rollout's, or that of the start of the step, as in most
    synchronous trainers. With the latter r is 1 in the first of several updates, however old a rollout is: the clip
    bounds what the step does, not what asynchrony has done. It clips one side for each sign of A.
    """
    advantages = advantages.to(ratios.dtype)
    plain, clipped = ratios * advantages, ratios.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    inside = (ratios >= 1.0 - eps_low) & (ratios <= 1.0 + eps_high)
    return torch.minimum(plain, clipped), inside | (plain < clipped)


@_PolicyLoss
def tis_loss(logprobs: Tensor, ratios: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Terms:
    """Truncated importance sampling: corrected for up to a limit, and no token is left out; `eps_low` is not used.

        L(theta) = E_t[ min(r_t, 1 + eps_high) * A_t * log pi_theta(a_t | s_t) ]    maximised

    The weight carries no gradient and is never zero: where `dis_loss` rejects a token, this one goes on learning from
    it. At eps_high = 1: ratio 0.01 has weight 0.01, 1.5 has 1.5, 8 has 2. (Ionides 2008; for language models "Your
    efficient RL framework secretly brings you off-policy RL training", 2025.)
    """
    return ratios.detach().clamp(max=1.0 + eps_high) * advantages * logprobs, torch.ones_like(ratios, dtype=torch.bool)


def positive_loss(*, logprobs: Tensor, positive: Tensor) -> LossSums:
    """The likelihood loss on successes that VAPO (arXiv 2504.05118) adds to PPO, mu = 0.1 there.

        L_NLL = - 1 / (action tokens of successful rollouts) * sum over them of log pi(a_t | s_t)
        L     = L_PPO + mu * L_NLL

    logprobs: float[n], differentiable. positive: bool[n], true at tokens of rollouts that succeeded. The rest of VAPO
    is made of settings, see the preset `vapo`.
    """
    count = positive.sum()
    return LossSums(-wide(logprobs[positive]).sum(), count, count)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is that already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
