"""One step of SAO (arXiv 2607.07508, section 3): from trajectories to a new policy version.

    V      <- critic at the state before every action token, before any update of this step
    adv    <- GAE(lambda_policy of each trajectory); target <- GAE(lambda_critic) + V
    K times: critic <- one optimizer step on  sum (V - target)^2 / action tokens of the batch
    policy <- one optimizer step on  -sum f(r) adv log pi / action tokens of the batch
    publish the new version

All sums run over micro-batches and ranks and are divided once, so the result depends neither on packing nor on the
number of ranks. During critic warm-up the policy is not touched and its version stays. A token older than `max_lag` has
no policy gradient but stays in the denominator, the advantage and the value loss. A step without anything to train, or
with a non-finite gradient, is skipped from there on: the optimizer at hand is left as it was and the version stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sao.algorithms.advantage import advantages as estimate_advantages
from sao.algorithms.dis import dis_loss
from sao.algorithms.ppo import ppo_loss
from sao.algorithms.value import value_loss
from sao.algorithms.whiten import whiten
from sao.config import Config
from sao.errors import LearnerError
from sao.learner.attention import choose
from sao.learner.batch import Batch, MicroBatch, flatten, micro_batches, plan_rows
from sao.learner.export import export, full_tensors
from sao.learner.metrics import Clock, PolicySums, describe, describe_advantages, describe_values
from sao.learner.model import load_critic, load_policy
from sao.learner.optim import Optimizer
from sao.learner.record import Record
from sao.learner.world import World
from sao.transport.weights import WeightsRef, publish

if TYPE_CHECKING:
    from sao.trajectory import Trajectory


@dataclass(frozen=True)
class StepResult:
    """What a step did. Tokens with a gradient (of the policy; in critic warm-up, of the critic) and tokens without."""

    step: int  # steps done, this one included
    version: int  # policy version after the step
    metrics: dict[str, float]
    trained_tokens: int
    masked_tokens: int
    weights: WeightsRef | None  # published by this step (rank 0)
    skipped: str | None  # why nothing, or not all, was updated
    arrays: dict[str, NDArray[Any]] | None = None  # what `sao.telemetry.recording` keeps, if that is wanted


class Learner:
    """Policy, critic and their optimizers; `step` is all of training. Every rank makes the same calls.

    >>> learner = Learner(config)                      # one process, no torchrun, no broker
    >>> result = learner.step(trajectories)
    >>> result.metrics["loss/policy"], result.version
    """

    def __init__(self, config: Config, world: World | None = None, weights_folder: Path | None = None) -> None:
        """Loads policy and critic from `config.model.path`. Without a `weights_folder` nothing is published.

        Raises `ConfigError` if the model cannot be loaded or packed.
        """
        self.config, self.world, self.weights_folder = config, world or World.alone(), weights_folder
        torch.set_num_threads(config.learner.threads)
        torch.use_deterministic_algorithms(config.learner.deterministic)
        torch.manual_seed(config.run.seed)
        learner = config.learner
        self.policy, self.critic = load_policy(config, self.world), load_critic(config, self.world)
        self._attention = choose(config, self.world.device)
        steps = config.run.steps
        self.policy_optimizer = Optimizer(self.policy, learner.policy_lr, learner, steps, self.world)
        self.critic_optimizer = Optimizer(self.critic, learner.critic_lr, learner, steps, self.world)
        self.version = 0
        self.steps = 0
        self.skipped_total = 0
        self._skipped_in_a_row = 0
        self._record: Record | None = None

    def step(self, trajectories: Sequence[Trajectory]) -> StepResult:
        """Trains on a batch: rollouts in any order, the same on every rank.

        Raises `ValidationError` for trajectories that cannot be trained on (before anything changes), `LearnerError`
        if ranks disagree about the batch or too many steps in a row are skipped, `WeightsError` if publishing fails.
        """
        clock, metrics, learner = Clock(), {}, self.config.learner
        with clock.of("plan"):
            batch = flatten(trajectories, self.version, summaries=self.config.compaction.train_summaries)
            plan = plan_rows(batch, self.world.size, learner.row_tokens, learner.rows_per_micro_batch)
            self.world.agree("batch and plan", (int(plan.hash) ^ batch.checksum()) & (2**64 - 1))
            micro = micro_batches(batch, plan, self.world.rank, self.world.device, self._attention)
            metrics.update(describe(batch, self.config.env.success_reward))
            keep = self.config.telemetry.keep_trajectories > 0
            self._record = Record(batch, plan, self.world.device) if keep else None
        metrics["policy/lr"] = self.policy_optimizer.set_step(self.steps)
        metrics["critic/lr"] = self.critic_optimizer.set_step(self.steps)
        warmup = self.steps < learner.critic_warmup_steps
        n_actions = int(batch.action_mask.sum())
        kept, weights = 0, None
        advantages, skipped = self._update_critic(batch, micro, clock, metrics)
        if advantages is not None and warmup:
            kept = n_actions
        elif advantages is not None:
            kept, skipped = self._update_policy(batch, micro, advantages, clock, metrics)
        if skipped is None and not warmup:
            self.version += 1
            with clock.of("publish"):
                weights = self._publish()
        return self._end(clock, metrics, batch.sampled_tokens, kept, weights, skipped)

    # -- the critic, and what it says about the batch

    def _update_critic(
        self, batch: Batch, micro: list[MicroBatch], clock: Clock, metrics: dict[str, float]
    ) -> tuple[torch.Tensor | None, str | None]:
        """K critic passes. Returns advantages float32[N] by flat index, or None and why the step is skipped."""
        algorithm, n_actions = self.config.algorithm, int(batch.action_mask.sum())
        # With lambda_critic = 1 a target is a return and needs no value; then the first critic pass, which runs before
        # any update, gives the values on its way and their own forward pass is saved.
        returns = algorithm.lambda_critic == 1 and algorithm.skip_observations and not algorithm.bootstrap_truncated
        values, bootstrap = np.zeros(len(batch.token_ids), dtype=np.float32), None
        if not returns:
            with clock.of("values"):
                values, bootstrap = self._values(batch, micro)
            if not np.isfinite(values[batch.action_mask]).all():
                return None, "non-finite value of the critic"
        with clock.of("advantages"):
            advantages, targets, lambdas = self._estimate(batch, values, bootstrap)
        for number in range(1, self.config.learner.critic_passes + 1):
            with clock.of("critic"):
                loss, seen = self._critic_pass(micro, torch.from_numpy(targets).to(self.world.device))
            metrics[f"loss/critic_{number}"] = loss / n_actions
            skipped = self._apply(self.critic_optimizer, n_actions, "critic", f"_{number}", clock, metrics)
            if skipped:
                return None, skipped
            if number == 1 and returns:
                values = seen
                with clock.of("advantages"):
                    advantages, _, lambdas = self._estimate(batch, values, None)
        metrics.update(describe_values(batch, values, targets))
        if algorithm.advantage_values == "after":
            with clock.of("values"):
                after = self._values(batch, micro)
            with clock.of("advantages"):
                advantages, _, lambdas = self._estimate(batch, *after)
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, batch.action_mask)
        metrics.update(describe_advantages(batch, advantages, lambdas))
        if self._record is not None:
            self._record.put(advantages=advantages, targets=targets, values=values)
        return torch.from_numpy(advantages).to(self.world.device), None

    def _critic_pass(self, micro: list[MicroBatch], targets: torch.Tensor) -> tuple[float, NDArray[np.float32]]:
        """Leaves gradient sums in the critic. Returns the global loss sum and the values by flat index, float32[N]."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        seen = torch.zeros(len(targets), dtype=torch.float32, device=self.world.device)
        for part in micro:
            values = self.critic(part, part.state_rows, part.state_columns)
            loss = value_loss(values=values, targets=targets[part.flat])
            loss.total.backward()
            total += loss.total.detach()
            seen[part.flat] = values.detach().float()
        return float(self.world.total(total)), self.world.total(seen).cpu().numpy()

    @torch.no_grad()
    def _values(self, batch: Batch, micro: list[MicroBatch]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Value of the state before every action token, float32[N] by flat index, equal on all ranks; and bootstraps.

        Every rank fills in its own tokens; the sum over ranks is exact, since all others hold 0 there.
        """
        n_tokens = len(batch.token_ids)
        everywhere = not self.config.algorithm.skip_observations
        after = torch.zeros(n_tokens + 1, dtype=torch.float32, device=self.world.device)
        for part in micro:
            if everywhere or self.config.algorithm.bootstrap_truncated:
                rows, columns, flat = part.all_rows, part.all_columns, part.all_flat
            else:
                rows, columns, flat = part.state_rows, part.state_columns, part.flat - 1
            after[flat + 1] = self.critic(part, rows, columns).float()
        # after[k + 1] is the value of the state that ends with token k, so after[k] is that before token k.
        found = self.world.total(after).cpu().numpy()
        bootstrap = None
        if self.config.algorithm.bootstrap_truncated:
            ends = batch.segment_offsets[batch.trajectory_offsets[1:]]
            bootstrap = np.where(batch.truncated, found[ends], np.float32(0.0)).astype(np.float32)
        return found[:-1], bootstrap

    def _estimate(
        self, batch: Batch, values: NDArray[np.float32], bootstrap: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
        """Advantages, targets (float32[N]) and lambdas (float64[T]) from the native kernel, equal on all ranks."""
        algorithm = self.config.algorithm
        return estimate_advantages(
            values,
            batch.action_mask,
            batch.segment_offsets,
            batch.trajectory_offsets,
            batch.rewards,
            gamma=algorithm.gamma,
            lambda_policy=None if isinstance(algorithm.lambda_policy, str) else algorithm.lambda_policy,
            lambda_alpha=algorithm.lambda_alpha,
            lambda_critic=algorithm.lambda_critic,
            cross_segment=algorithm.cross_segment,
            skip_observations=algorithm.skip_observations,
            bootstrap=bootstrap,
            turn_rewards=batch.turn_rewards,
        )

    # -- the policy

    def _update_policy(
        self,
        batch: Batch,
        micro: list[MicroBatch],
        advantages: torch.Tensor,
        clock: Clock,
        metrics: dict[str, float],
    ) -> tuple[int, str | None]:
        """The policy pass. Returns the number of tokens with a gradient and why the step is skipped, if it is."""
        algorithm, n_actions = self.config.algorithm, int(batch.action_mask.sum())
        loss_of = dis_loss if algorithm.policy_loss == "dis" else ppo_loss
        sums = PolicySums(algorithm.eps_low, algorithm.eps_high, self.world.device)
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # loss, tokens kept
        token_weights, units = self._unit_weights(batch)
        with clock.of("policy"):
            for part in micro:
                fresh = part.lags <= self.config.staleness.max_lag
                rollout = part.rollout_logprobs[fresh]
                logprobs, entropies = self.policy(part, fresh, chunk_tokens=self.config.learner.logprob_chunk_tokens)
                loss = loss_of(
                    logprobs=logprobs,
                    rollout_logprobs=rollout,
                    advantages=advantages[part.flat[fresh]],
                    eps_low=algorithm.eps_low,
                    eps_high=algorithm.eps_high,
                    token_weights=None if token_weights is None else token_weights[part.flat[fresh]],
                )
                if self._record is not None:
                    self._record.add_logprobs(part.flat[fresh], logprobs)
                loss.total.backward()  # also over no tokens: every rank runs the same collectives
                totals += torch.stack([loss.total.detach().double(), loss.kept.double()])
                sums.add(
                    logprobs=logprobs.detach(), rollout_logprobs=rollout, entropies=entropies, lags=part.lags[fresh]
                )
            self.world.total(totals)
            self.world.total(sums.sums)
            self.world.largest(sums.maxima)
        kept = int(totals[1])
        count = {"all": n_actions, "kept": kept}.get(algorithm.denominator, units)
        metrics["loss/policy"] = float(totals[0]) / count if count else 0.0
        metrics.update(sums.metrics(n_actions))
        if kept == 0:
            self.policy_optimizer.clear()
            return 0, "no action token with a policy gradient"
        skipped = self._apply(self.policy_optimizer, count, "policy", "", clock, metrics)
        return (0 if skipped else kept), skipped

    def _unit_weights(self, batch: Batch) -> tuple[torch.Tensor | None, int]:
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

    # -- ends

    def _apply(
        self, optimizer: Optimizer, count: float, name: str, suffix: str, clock: Clock, metrics: dict[str, float]
    ) -> str | None:
        with clock.of("optimizer"):
            gradient = optimizer.finish(count)
            if gradient.bad is not None:
                optimizer.clear()
                return f"non-finite gradient of {name} {gradient.bad}"
            metrics[f"{name}/grad_norm{suffix}"] = gradient.norm
            optimizer.step()
        return None

    def _publish(self) -> WeightsRef | None:
        if self.weights_folder is None:
            return None
        tensors = full_tensors(self.policy.lm, self.config.model.dtype, self.world)
        return None if tensors is None else publish(tensors, self.weights_folder, self.version)

    def _end(
        self,
        clock: Clock,
        metrics: dict[str, float],
        sampled: int,
        kept: int,
        weights: WeightsRef | None,
        skipped: str | None,
    ) -> StepResult:
        self.steps += 1
        self.skipped_total += skipped is not None
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        metrics.update({f"time/{cause}_s": seconds for cause, seconds in clock.seconds.items()})
        metrics["tokens/trained"], metrics["tokens/masked"] = float(kept), float(sampled - kept)
        metrics["step/skipped"], metrics["step/skipped_total"] = float(skipped is not None), float(self.skipped_total)
        metrics["step/version"] = float(self.version)
        if self._skipped_in_a_row >= self.config.learner.max_skipped_in_a_row:
            raise LearnerError(f"{self._skipped_in_a_row} steps in a row were skipped; the last one: {skipped}")
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        arrays = None if self._record is None else self._record.finish(self.world)
        return StepResult(self.steps, self.version, metrics, kept, sampled - kept, weights, skipped, arrays)

    def export(self, checkpoints: Path) -> Path:
        """Writes the Hugging Face folder `checkpoints/step-N` of the current state; returns its path."""
        target = checkpoints / f"step-{self.steps}"
        model = self.config.model
        kept = self.config.learner.checkpoints_kept
        export(self.policy, self.critic, model.path, target, model.dtype, self.world, kept)
        return target
