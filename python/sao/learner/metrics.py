"""Numbers that a step reports, all true values of the global batch: sums, counts and maxima are added up over
micro-batches and ranks, and divided once. `docs/reference/metrics.md` says what each name means.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sao.algorithms.policy_loss import log_ratio
from sao.learner.batch import Batch
from sao.learner.world import World
from sao.trajectory import Trajectory

_SUMS = ("tokens", "ratio", "low", "high", "entropy", "kl", "lag0", "gap")
_MAXIMA = ("ratio", "gap")


def describe(trajectories: Sequence[Trajectory], batch: Batch, success_reward: float) -> dict[str, float]:
    """Metrics of the batch alone: rewards, lengths, lags. The same on every rank, so nothing is reduced."""
    mask, count, lags = batch.action_mask, batch.n_trajectories, batch.lags[batch.action_mask]
    actions = np.bincount(batch.trajectory_of_token[mask], minlength=count)
    starts = mask.copy()
    starts[1:] &= ~mask[:-1]
    starts[batch.segment_offsets[:-1]] = mask[batch.segment_offsets[:-1]]
    numbers = {
        "reward/mean": batch.rewards.mean(),
        "reward/success": (batch.rewards >= success_reward).mean(),
        "rollout/tokens": len(mask) / count,
        "rollout/actions": actions.mean(),
        "rollout/compactions": np.mean([int(t.metadata.get("compactions") or 0) for t in trajectories]),
        "rollout/truncated": batch.truncated.mean(),
        "rollout/timed_out": batch.timed_out.mean(),
        "rollout/actions_max": actions.max(),
        "rollout/turns": starts.sum() / count,
        "rollout/segments": np.add.reduceat(mask, batch.segment_offsets[:-1], dtype=np.bool_).sum() / count,
        "tokens/action": mask.sum(),
        "lag/mean": lags.mean(),
        "lag/max": lags.max(),
    }
    if batch.summary.any():
        tokens = np.bincount(batch.segment_of_token[mask], minlength=len(batch.summary))
        numbers["rollout/summary_tokens"] = tokens[batch.summary].mean()
    if drift := [int(t.metadata["agent_drift"] or 0) for t in trajectories if "agent_drift" in t.metadata]:
        numbers["rollout/drift"] = np.mean(drift)
    return {name: float(number) for name, number in numbers.items()}


class PolicySums:
    """Sums and maxima over the tokens that a policy pass sees, micro-batch by micro-batch."""

    def __init__(self, eps_low: float, eps_high: float, world: World) -> None:
        self.eps_low, self.eps_high, self.world = eps_low, eps_high, world
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=world.device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=world.device)

    @torch.no_grad()
    def add(self, *, logprobs: Tensor, rollout_logprobs: Tensor, entropies: Tensor, lags: Tensor) -> None:
        """Adds n action tokens that are not too old; all arguments [n]."""
        if logprobs.numel() == 0:
            return
        log_r = log_ratio(logprobs=logprobs, rollout_logprobs=rollout_logprobs).double()
        ratio = log_r.exp()
        gap = (logprobs.double() - rollout_logprobs.double()).abs()[lags == 0]
        self.sums += torch.stack(
            [
                torch.full_like(ratio, 1.0).sum(),
                ratio.sum(),
                (ratio <= 1 - self.eps_low).double().sum(),
                (ratio >= 1 + self.eps_high).double().sum(),
                entropies.double().sum(),
                (ratio - 1 - log_r).sum(),
                torch.full_like(gap, 1.0).sum(),
                gap.sum(),
            ]
        )
        largest = gap.max() if gap.numel() else torch.zeros_like(ratio.max())
        self.maxima = torch.maximum(self.maxima, torch.stack([ratio.max(), largest]))

    def metrics(self, n_actions: int) -> dict[str, float]:
        """Means and shares over all ranks; a collective, to be called once.

        `n_actions`: all action tokens of the global batch, stale ones included.
        """
        sums = dict(zip(_SUMS, self.world.total(self.sums).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self.world.largest(self.maxima).tolist(), strict=True))
        numbers = {
            "policy/masked_low": sums["low"] / n_actions,
            "policy/masked_high": sums["high"] / n_actions,
            "policy/stale": (n_actions - sums["tokens"]) / n_actions,
        }
        if sums["tokens"]:
            numbers |= {f"policy/{name}": sums[name] / sums["tokens"] for name in ("entropy", "kl")}
            numbers |= {"policy/ratio_mean": sums["ratio"] / sums["tokens"], "policy/ratio_max": maxima["ratio"]}
        if sums["lag0"]:
            numbers |= {"logprob_gap/mean": sums["gap"] / sums["lag0"], "logprob_gap/max": maxima["gap"]}
        return numbers
