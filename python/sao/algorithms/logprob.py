"""Log-probs of chosen tokens under the distribution they were sampled from.

    log pi(a | s) = z_a / T - log sum_v exp(z_v / T)      z: logits that predict the token, T: its temperature

Temperature acts on the logits before the softmax: logits [2, 1, 0, -1] at T = 2 give token 0 the log-prob -0.787339.

`score` never holds more logits than those of one chunk of tokens: a chunk's logits are computed, reduced to one number
a token and dropped; the backward pass computes them again. It costs one more product with the head.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""From hidden states [n, width] to logits [n, vocabulary]."""


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


def score(
    head: Head, hidden: Tensor, *, token_ids: Tensor, temperatures: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and entropies (not) of n tokens from the hidden states that predict them.

    head: states [n, width] to logits. hidden: float[n, width]. token_ids: int64[n]. temperatures: float[n].
    chunk_tokens: most tokens whose logits exist at once; n or more computes all of them in one piece and keeps what the
    backward pass needs. Returns float32[n] or better, twice; the values do not depend on the cut.
    """

    def one(states: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)
        logprobs = token_logprobs(logits=logits, token_ids=ids, temperatures=temperature)
        # Last: the second run of this function, in the backward pass, ends before it.
        return logprobs, token_entropies(logits=logits.detach(), temperatures=temperature)

    if hidden.shape[0] <= chunk_tokens:
        return one(hidden, token_ids, temperatures)
    pieces = zip(*(tensor.split(chunk_tokens) for tensor in (hidden, token_ids, temperatures)), strict=True)
    scores = [checkpoint(one, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat([logprobs for logprobs, _ in scores]), torch.cat([entropies for _, entropies in scores])
