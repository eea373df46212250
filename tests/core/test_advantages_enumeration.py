"""Both modes of credit across compactions, by enumeration: every mask and every cut of up to 12 tokens.

The oracle is the sum that the equations write, in float64:

    A_i = (gamma lambda)^N * sum over actions j >= i of the same chain of (gamma lambda)^(actions between) * delta_j

In mode `paper` the chains are the segments and N counts the actions of later segments; in mode `chained` the only
chain is the rollout and N = 0. A chain's sums depend on its tokens and on lambda alone, so they are kept per stretch of
tokens. Nothing is shared with the kernel's recurrence.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from sao import advantages

N_MAX = 12
GAMMA, LAMBDA_CRITIC, ALPHA, REWARD = 0.95, 0.8, 1.5, 1.25

Float = NDArray[np.float64]


def masks_of(n: int) -> NDArray[np.int64]:
    """All masks of n tokens, int64[2^n, n]; row r has the bits of r, the first token's highest."""
    return np.array(list(itertools.product((0, 1), repeat=n)), dtype=np.int64).reshape(2**n, n)


def lambda_of(actions: int) -> float:
    return min(max(1 - 1 / (ALPHA * actions), 0.0), 1.0) if actions else np.nan


def sums(values: Float, decay: float) -> Float:
    """A_i of a chain of these tokens under every mask, float64[2^n, n]; 0 where the mask is."""
    masks = masks_of(len(values))
    acting = masks.astype(bool)
    place = np.cumsum(masks, axis=1)
    steps = place[:, None, :] - place[:, :, None]
    pair = acting[:, :, None] & acting[:, None, :]
    following = (pair & (steps == 1)).astype(np.float64)
    last = 1.0 - following.sum(axis=2)
    delta = REWARD * last + GAMMA * (following @ values) - values
    weights = np.where(pair & (steps >= 0), decay ** np.maximum(steps, 0), 0.0)
    return np.einsum("mij,mj->mi", weights, delta)


class Oracle:
    """Answers for all masks of n tokens at once."""

    def __init__(self, values: Float) -> None:
        self.n, self.values = len(values), values
        self.masks = masks_of(self.n)
        self.actions = self.masks.sum(axis=1)
        self.lambdas = np.array([lambda_of(int(count)) for count in self.actions])
        self.decays = [GAMMA * (lambda_of(count) if count else 0.0) for count in range(self.n + 1)]
        self.powers = np.array([[decay**k for k in range(self.n + 1)] for decay in self.decays])
        bits = 1 << np.arange(self.n - 1, -1, -1)
        self.policy: dict[tuple[int, int], Float] = {}
        self.critic: dict[tuple[int, int], Float] = {}
        self.rows: dict[tuple[int, int], NDArray[np.int64]] = {}
        for a, b in itertools.combinations(range(self.n + 1), 2):
            self.policy[a, b] = np.stack([sums(values[a:b], decay) for decay in self.decays])
            self.critic[a, b] = sums(values[a:b], GAMMA * LAMBDA_CRITIC)
            self.rows[a, b] = self.masks[:, a:b] @ bits[self.n - (b - a) :]

    def answer(self, bounds: list[int], factor: bool) -> tuple[Float, Float]:
        """(advantages, targets) float64[2^n, n] of the chains between the bounds."""
        adv, tgt = np.zeros(self.masks.shape), np.zeros(self.masks.shape)
        for a, b in itertools.pairwise(bounds):
            rows = self.rows[a, b]
            adv[:, a:b] = self.policy[a, b][self.actions, rows]
            if factor:
                adv[:, a:b] *= self.powers[self.actions, self.masks[:, b:].sum(axis=1)][:, None]
            tgt[:, a:b] = (self.critic[a, b][rows] + self.values[a:b]) * self.masks[:, a:b]
        return adv, tgt


@pytest.mark.parametrize("n", [*range(1, N_MAX), pytest.param(N_MAX, marks=pytest.mark.slow)])
def test_every_mask_and_every_cut(n: int) -> None:
    """2^n masks times 2^(n-1) cuts. A chain does not see a cut at all: one answer for all of them."""
    values = np.random.default_rng(n).uniform(-2, 2, n).astype(np.float32)
    oracle = Oracle(values.astype(np.float64))
    count = len(oracle.masks)
    mask, tiled = np.ascontiguousarray(oracle.masks.reshape(-1).astype(bool)), np.tile(values, count)
    rewards = np.full(count, REWARD, np.float32)
    whole = oracle.answer([0, n], factor=False)
    compared = 0
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        bounds = np.array([0, *cuts], np.int64)
        offsets = np.append((np.arange(count)[:, None] * n + bounds).reshape(-1), count * n)
        firsts = np.arange(count + 1, dtype=np.int64) * len(bounds)
        for mode, wanted in (("paper", oracle.answer([0, *cuts, n], factor=True)), ("chained", whole)):
            adv, tgt, lambdas = advantages(
                tiled,
                mask,
                offsets,
                firsts,
                rewards,
                gamma=GAMMA,
                lambda_alpha=ALPHA,
                lambda_critic=LAMBDA_CRITIC,
                cross_segment=mode,
            )
            for found, expected in ((adv, wanted[0]), (tgt, wanted[1])):
                assert np.abs(found.reshape(count, n) - expected).max() < 2e-6, f"{mode}, cuts {cuts}"
            assert np.nanmax(np.abs(lambdas - oracle.lambdas), initial=0.0) < 1e-12
            compared += count
    assert compared == 2 * 2**n * 2 ** (n - 1)
