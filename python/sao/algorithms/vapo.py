"""What VAPO (arXiv 2504.05118) adds to a critic with a length-adaptive lambda: a likelihood loss on successes.

    L_NLL = - 1 / (number of action tokens of successful rollouts) * sum over them of log pi(a_t | s_t)
    L     = L_PPO + mu * L_NLL                                           mu = 0.1 there

The rest of VAPO is made of settings: `policy_loss = "ppo"` with `old_logprobs = "recomputed"`, eps 0.2/0.28,
`lambda_alpha = 0.05`, `lambda_critic = 1`, `denominator = "all"`, `value_loss = "clipped"`, groups of rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sao.algorithms.dis import LossSums


def positive_loss(*, logprobs: Tensor, positive: Tensor) -> LossSums:
    """Sum of -log pi over the tokens of successful rollouts, and their number.

    logprobs: float[n], differentiable. positive: bool[n], true at tokens of rollouts that succeeded; what `logprobs`
    holds elsewhere is never read.
    """
    chosen = logprobs[positive]
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    count = positive.sum()
    return LossSums(-chosen.sum(), count, count)
