"""The policy's part of a step: one update (several for PPO) on the sum of token losses, divided once."""

import logging

import numpy as np
import torch
from torch import Tensor

from sao.algorithms.policy_loss import dis_loss, positive_loss, ppo_loss, tis_loss
from sao.config import Config
from sao.learner.batch import Batch, MicroBatch
from sao.learner.metrics import PolicySums
from sao.learner.model import Policy
from sao.learner.optim import Optimizer
from sao.learner.work import Skipped, Work
from sao.learner.world import World

LOSSES = {"dis": dis_loss, "ppo": ppo_loss, "tis": tis_loss}

log = logging.getLogger(__name__)


class PolicyUpdate:
    """The policy and its optimizer. Every rank makes the same calls."""

    def __init__(self, config: Config, world: World, policy: Policy) -> None:
        self.config, self.world, self.model = config, world, policy
        rate = config.learner.policy_lr if config.lora.policy_lr is None else config.lora.policy_lr
        self.optimizer = Optimizer(policy.trained(), rate, config.learner.policy_lr_warmup_steps, config, world)

    def run(self, work: Work, advantages: Tensor) -> int:
        """The policy passes; `advantages` float32[N] by flat index.

        Returns the number of tokens with a gradient in the first pass, or raises `Skipped` if that cannot be applied. A
        later one that cannot ends the passes; the step counts, since the policy has changed.
        """
        old = None
        if self.config.algorithm.old_logprobs == "recomputed":
            with torch.no_grad(), work.timed("old_logprobs"):
                old = [self._score(part, self._fresh(part))[0] for part in work.micro]
        kept = self._pass(work, advantages, old, 1)
        for number in range(2, self.config.learner.policy_passes + 1):
            try:
                self._pass(work, advantages, old, number)
            except Skipped as fault:
                log.warning("policy pass %d was not applied: %s", number, fault)
                break
        return kept

    @torch.no_grad()
    def measure_gap(self, work: Work) -> None:
        """Adds `logprob_gap/*` of this rank's first micro-batch to the metrics: for steps that leave the policy alone.

        While the critic warms up the version stays, so most tokens are of lag 0: a wrong engine shows at once.
        """
        sums = PolicySums(self.config.algorithm.eps_low, self.config.algorithm.eps_high, self.world)
        with work.timed("gap"):
            part = work.micro[0]
            current = part.lags == 0
            logprobs, entropies = self._score(part, current)
            given = {"logprobs": logprobs, "rollout_logprobs": part.rollout_logprobs[current]}
            sums.add(**given, entropies=entropies, lags=part.lags[current])
            found = sums.metrics(work.n_actions)
        work.metrics.update({name: value for name, value in found.items() if name.startswith("logprob_gap/")})

    def _pass(self, work: Work, advantages: Tensor, old: list[Tensor] | None, number: int) -> int:
        """As `run`, once. `old`: log-probs at the start of the step of each micro-batch's fresh tokens."""
        algorithm = self.config.algorithm
        suffix = "" if number == 1 else f"_{number}"
        token_weights, count = self._denominator(work)
        positive, n_positive = self._positive(work.batch)
        sums = PolicySums(algorithm.eps_low, algorithm.eps_high, self.world)
        # Loss, tokens kept, likelihood loss of successes.
        totals = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        with work.timed("policy"):
            for index, part in enumerate(work.micro):
                fresh = self._fresh(part)
                flat, rollout = part.flat[fresh], part.rollout_logprobs[fresh]
                logprobs, entropies = self._score(part, fresh)
                loss = LOSSES[algorithm.policy_loss](
                    logprobs=logprobs,
                    rollout_logprobs=rollout if old is None else old[index],
                    advantages=advantages[flat],
                    eps_low=algorithm.eps_low,
                    eps_high=algorithm.eps_high,
                    token_weights=None if token_weights is None else token_weights[flat],
                )
                total = loss.total
                if positive is not None:
                    likelihood = positive_loss(logprobs=logprobs, positive=positive[flat]).total
                    total = total + likelihood * (algorithm.positive_weight * count / n_positive)
                    totals[2] += likelihood.detach()
                total.backward()  # also over no tokens: every rank runs the same collectives
                totals[:2] += torch.stack([loss.total.detach().double(), loss.kept.double()])
                sums.add(
                    logprobs=logprobs.detach(), rollout_logprobs=rollout, entropies=entropies, lags=part.lags[fresh]
                )
                if number == 1:
                    work.record_scores(flat, logprobs, entropies)
            self.world.total(totals)
            found = sums.metrics(work.n_actions)
        kept = int(totals[1])
        count = kept if algorithm.denominator == "kept" else count
        work.metrics[f"loss/policy{suffix}"] = float(totals[0]) / count if count else 0.0
        if positive is not None:
            work.metrics[f"loss/positive{suffix}"] = float(totals[2]) / n_positive
        if number == 1:
            work.metrics.update(found)
        if kept == 0:
            self.optimizer.adam.zero_grad()
            raise Skipped("no action token with a policy gradient")
        self.optimizer.update(count, "policy", suffix, work)
        return kept

    def _score(self, part: MicroBatch, fresh: Tensor) -> tuple[Tensor, Tensor]:
        scores: tuple[Tensor, Tensor] = self.model(part, fresh, chunk_tokens=self.config.learner.logprob_chunk_tokens)
        return scores

    def _fresh(self, part: MicroBatch) -> Tensor:
        """The tokens that may have a policy gradient, bool[n]."""
        staleness = self.config.staleness
        return (
            part.lags <= staleness.max_lag
            if staleness.stale == "mask"
            else torch.ones_like(part.lags, dtype=torch.bool)
        )

    def _positive(self, batch: Batch) -> tuple[Tensor | None, int]:
        """For each token whether its rollout succeeded, and how many action tokens that are; None without such."""
        if self.config.algorithm.positive_weight == 0:
            return None, 0
        success = (batch.rewards >= self.config.env.success_reward)[batch.trajectory_of_token]
        count = int(np.count_nonzero(success & batch.action_mask))
        return (torch.from_numpy(success).to(self.world.device), count) if count else (None, 0)

    def _denominator(self, work: Work) -> tuple[Tensor | None, int]:
        """The weight of each token and what their sum is divided by.

        For a mean of means the weight is 1 / action tokens of the token's trajectory or segment, and the divisor is the
        number of those; a segment without action tokens is not counted. `kept` is known only after the pass.
        """
        unit, batch = self.config.algorithm.denominator, work.batch
        if unit not in ("trajectory", "segment"):
            return None, work.n_actions
        owner = batch.trajectory_of_token if unit == "trajectory" else batch.segment_of_token
        actions = np.bincount(owner[batch.action_mask], minlength=int(owner[-1]) + 1)
        weights = 1.0 / np.maximum(actions, 1)[owner]
        units = batch.n_trajectories if unit == "trajectory" else int(np.count_nonzero(actions))
        return torch.from_numpy(weights).to(self.world.device), units
