"""The scan of `advantage_torch` as one Triton kernel: a program a chain and decay, block by block from its end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512


@triton.jit
def _combine(d1, a1, d2, a2):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    return d1 * d2, a1 * d2 + a2


@triton.jit
def _kernel(delta, decay, first, stop, out, steps, chains, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    chain, which = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(first + chain), tl.load(stop + chain)
    factor = tl.load(decay + which * chains + chain)
    lane = tl.arange(0, BLOCK)
    carry = factor * 0.0
    for ahead in range(0, end - begin, BLOCK):
        # From the end of the chain backwards: lane 0 is the latest step.
        at = end - 1 - ahead - lane
        inside = at >= begin
        step = tl.load(delta + at, mask=inside, other=0.0)
        ratio = tl.zeros_like(step) + factor
        power, total = tl.associative_scan((ratio, step), 0, _combine)
        total += power * carry
        tl.store(out + which * steps + at, total, mask=inside)
        carry = tl.sum(tl.where(lane == BLOCK - 1, total, 0.0), 0)


def reverse_scan(delta: torch.Tensor, decays: torch.Tensor, first: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """A_k = delta_k + d * A_(k+1) within each chain, for two decays at once.

    delta: float64 [steps]; decays: float64 [2, chains]; first, stop: int64 [chains], the steps of each chain. Returns
    float64 [2, steps]; every step must be in a chain.
    """
    out = torch.empty(2, len(delta), dtype=torch.float64, device=delta.device)
    _kernel[(len(first), 2)](delta, decays, first, stop, out, len(delta), len(first), BLOCK=_BLOCK)
    return out
