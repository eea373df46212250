"""Drawing tokens: temperature only, log-probs of the very distribution that was drawn from.

A token is drawn by inverting the cumulative distribution at a uniform number that depends on nothing but the request's
seed and the token's place in the completion. So a request draws the same numbers whatever else runs beside it; its
tokens are the same up to the rounding of the logits, which does depend on the shape of the batch.
"""

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """float64[n] in [0, 1 - 2^-52]: number `places[i]` of the stream of `seeds[i]` (both int64[n], >= 0).

    SplitMix64 (Steele, Lea, Flood 2014) started at a mixed seed; the state after k steps has a closed form.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, temperatures: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws one token a row.

    logits: [n, vocabulary], any float type; temperatures: float32[n], 0 = most likely token; draws: float64[n] in
    [0, 1). Returns token ids int64[n] and log-probs float32[n]: of log_softmax(logits / temperature) in float32, for
    temperature 0 of log_softmax(logits). Non-finite logits give a non-finite log-prob.
    """
    logits = logits.float()
    greedy = temperatures == 0
    if (temperatures != 1).any():
        logits = logits / torch.from_numpy(np.where(greedy, np.float32(1), temperatures))[:, None]
    scores = torch.log_softmax(logits, dim=-1)
    # float64: in float32 the rounding of a sum over a large vocabulary would shift probability between tokens.
    total = scores.double().exp_().cumsum_(-1)
    target = torch.from_numpy(draws)[:, None] * total[:, -1:]
    tokens = torch.searchsorted(total, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy)[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].numpy(), scores.gather(1, tokens)[:, 0].numpy()
