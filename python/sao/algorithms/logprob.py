"""Log-probs of chosen tokens under the distribution they were sampled from.

    log pi(a | s) = z_a / T - log sum_v exp(z_v / T)      z: logits that predict the token, T: its temperature

Temperature acts on the logits before the softmax: logits [2, 1, 0, -1] at T = 2 give token 0 the log-prob -0.787339.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(*, logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """logits float[n, vocabulary], token_ids int64[n], temperatures float[n] -> log-probs [n], float32 or better.

    The softmax is computed in float32 (float64 for float64 logits) whatever the type of the logits.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide / temperatures.to(wide.dtype).unsqueeze(-1)
    return wide.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)


def token_entropies(*, logits: Tensor, temperatures: Tensor) -> Tensor:
    """Entropy in nats of the distribution at each of n positions, without gradient; float32[n] or better."""
    with torch.no_grad():
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logp = (wide / temperatures.to(wide.dtype).unsqueeze(-1)).log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)
