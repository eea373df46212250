"""The policy's part of a step: one update (several for PPO) on the sum of token losses, divided once.

    policy <- one optimizer step on  -sum f(r) adv log pi / action tokens of the batch  (SAO; `algorithms.policy_loss`)

A token older than `max_lag` has no policy gradient but stays in the denominator.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sao.algorithms.policy_loss import LossSums, dis_loss, positive_loss, ppo_loss, tis_loss
from sao.config import Config
from sao.learner.batch import Batch, MicroBatch
from sao.learner.metrics import PolicySums
from sao.learner.model import Policy
from sao.learner.optim import Optimizer
from sao.learner.work import Work
from sao.learner.world import World

log = logging.getLogger(__name__)


class PolicyUpdate:
    """Runs the policy's part; every rank makes the same calls."""

    def __init__(self, config: Config, world: World, policy: Policy, optimizer: Optimizer) -> None:
        self.config, self.world, self.policy, self.optimizer = config, world, policy, optimizer

    def run(self, work: Work, advantages: Tensor) -> tuple[int, str | None]:
        """The policy passes; `advantages` float32[N] by flat index.

        Returns the number of tokens with a gradient (in the first pass) and why the step is skipped, if it is. A pass
        after the first that cannot be applied ends the passes; the step counts, since the policy has changed.
        """
        old = self._old_logprobs(work) if self.config.algorithm.old_logprobs == "recomputed" else None
        kept, skipped = self._pass(work, advantages, old, 1)
        for number in range(2, self.config.learner.policy_passes + 1):
            if skipped:
                break
            fault = self._pass(work, advantages, old, number)[1]
            if fault:
                log.warning("policy pass %d was not applied: %s", number, fault)
                break
        return kept, skipped

    @torch.no_grad()
    def measure_gap(self, work: Work) -> None:
        """Adds `logprob_gap/*` of this rank's first micro-batch to the metrics: for steps that leave the policy alone.

        While the critic warms up the version stays, so most tokens are of lag 0: a wrong engine shows at once.
        """
        algorithm = self.config.algorithm
        sums = PolicySums(algorithm.eps_low, algorithm.eps_high, self.world.device)
        with work.clock.of("gap"):
            for part in work.micro[:1]:
                current = part.lags == 0
                logprobs, entropies = self._score(part, current)
                given = {"logprobs": logprobs, "rollout_logprobs": part.rollout_logprobs[current]}
                sums.add(**given, entropies=entropies, lags=part.lags[current])
            self.world.total(sums.sums)
            self.world.largest(sums.maxima)
        found = sums.metrics(work.n_actions)
        work.metrics.update({name: value for name, value in found.items() if name.startswith("logprob_gap/")})

    @torch.no_grad()
    def _old_logprobs(self, work: Work) -> list[Tensor]:
        """Log-probs of the policy at the start of the step: float32[n] or better of each micro-batch's fresh tokens."""
        with work.clock.of("old_logprobs"):
            return [self._score(part, self._fresh(part))[0] for part in work.micro]

    def _pass(self, work: Work, advantages: Tensor, old: list[Tensor] | None, number: int) -> tuple[int, str | None]:
        algorithm, batch, device = self.config.algorithm, work.batch, self.world.device
        suffix = "" if number == 1 else f"_{number}"
        sums = PolicySums(algorithm.eps_low, algorithm.eps_high, device)
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, tokens kept, likelihood loss of successes
        token_weights, units = self._unit_weights(batch)
        count = work.n_actions if algorithm.denominator == "all" else units
        positive, n_positive = self._positive(batch)
        with work.clock.of("policy"):
            for index, part in enumerate(work.micro):
                fresh = self._fresh(part)
                flat, rollout = part.flat[fresh], part.rollout_logprobs[fresh]
                logprobs, entropies = self._score(part, fresh)
                loss = self._loss(
                    logprobs=logprobs,
                    rollout_logprobs=rollout,
                    old_logprobs=None if old is None else old[index],
                    advantages=advantages[flat],
                    token_weights=None if token_weights is None else token_weights[flat],
                )
                total = loss.total
                if positive is not None:
                    likelihood = positive_loss(logprobs=logprobs, positive=positive[flat]).total
                    total = total + likelihood * (algorithm.positive_weight * count / n_positive)
                    totals[2] += likelihood.detach()
                if work.record is not None and number == 1:
                    work.record.add_logprobs(flat, logprobs)
                total.backward()  # also over no tokens: every rank runs the same collectives
                totals[:2] += torch.stack([loss.total.detach().double(), loss.kept.double()])
                sums.add(
                    logprobs=logprobs.detach(), rollout_logprobs=rollout, entropies=entropies, lags=part.lags[fresh]
                )
            self.world.total(totals)
            self.world.total(sums.sums)
            self.world.largest(sums.maxima)
        kept = int(totals[1])
        if algorithm.denominator == "kept":
            count = kept
        work.metrics[f"loss/policy{suffix}"] = float(totals[0]) / count if count else 0.0
        if positive is not None:
            work.metrics[f"loss/positive{suffix}"] = float(totals[2]) / n_positive
        if number == 1:
            work.metrics.update(sums.metrics(work.n_actions))
        if kept == 0:
            self.optimizer.clear()
            return 0, "no action token with a policy gradient"
        skipped = self.optimizer.update(count, "policy", suffix, work.clock, work.metrics)
        return (0 if skipped else kept), skipped

    def _loss(
        self,
        *,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        token_weights: Tensor | None,
    ) -> LossSums:
        algorithm = self.config.algorithm
        given: dict[str, Any] = {
            "logprobs": logprobs,
            "rollout_logprobs": rollout_logprobs,
            "advantages": advantages,
            "token_weights": token_weights,
            "eps_low": algorithm.eps_low,
            "eps_high": algorithm.eps_high,
        }
        if algorithm.policy_loss == "ppo":
            return ppo_loss(**given, old_logprobs=old_logprobs)
        return (dis_loss if algorithm.policy_loss == "dis" else tis_loss)(**given)

    def _score(self, part: MicroBatch, fresh: Tensor) -> tuple[Tensor, Tensor]:
        scores: tuple[Tensor, Tensor] = self.policy(part, fresh, chunk_tokens=self.config.learner.logprob_chunk_tokens)
        return scores

    def _fresh(self, part: MicroBatch) -> Tensor:
        return part.lags <= self.config.staleness.max_lag

    def _positive(self, batch: Batch) -> tuple[Tensor | None, int]:
        """For each token whether its rollout succeeded, and how many action tokens that are; None without such."""
        if self.config.algorithm.positive_weight == 0:
            return None, 0
        success = (batch.rewards >= self.config.env.success_reward)[batch.trajectory_of_token]
        count = int(np.count_nonzero(success & batch.action_mask))
        return (torch.from_numpy(success).to(self.world.device), count) if count else (None, 0)

    def _unit_weights(self, batch: Batch) -> tuple[Tensor | None, int]:
        """For a mean of means: for each token 1 / action tokens of its trajectory or segment; and how many there are.

        A segment without action tokens is not counted.
        """
        unit = self.config.algorithm.denominator
        if unit not in ("trajectory", "segment"):
            return None, 0
        owner = batch.trajectory_of_token if unit == "trajectory" else batch.segment_of_token
        actions = np.bincount(owner[batch.action_mask], minlength=int(owner[-1]) + 1)
        weights = 1.0 / np.maximum(actions, 1)[owner]
        units = batch.n_trajectories if unit == "trajectory" else int(np.count_nonzero(actions))
        return torch.from_numpy(weights).to(self.world.device), units
