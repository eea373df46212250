"""One step of SAO (arXiv 2607.07508, section 3): from trajectories to a new policy version.

    V      <- critic at the state before every action token, before any update of this step
    adv    <- GAE(lambda_policy of each trajectory); target <- GAE(lambda_critic) + V
    K times: critic <- one optimizer step on  sum (V - target)^2 / action tokens of the batch
    policy <- one optimizer step on  -sum f(r) adv log pi / action tokens of the batch
    publish the new version

All sums run over micro-batches and ranks and are divided once, so the result depends neither on packing nor on the
number of ranks. During critic warm-up the policy is not touched and its version stays. With `stale = "mask"` a token
older than `max_lag` has no policy gradient but stays in the denominator, the advantage and the value loss. A step
without anything to train, or with a non-finite gradient, is skipped from there on: the optimizer at hand is left as it
was and the version stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sao.algorithms.advantage import whiten
from sao.algorithms.baselines import group_advantages, window_advantages
from sao.config import Config
from sao.errors import LearnerError
from sao.learner.batch import Batch, flatten, micro_batches
from sao.learner.critic_update import CriticUpdate
from sao.learner.export import full_tensors
from sao.learner.metrics import describe
from sao.learner.model import Policy, linear_cost, load_models
from sao.learner.plan import plan_segments
from sao.learner.policy_update import PolicyUpdate
from sao.learner.work import Skipped, Work
from sao.learner.world import World
from sao.storage.failpoints import failpoint
from sao.trajectory import Trajectory
from sao.transport.weights import WeightsRef, publish

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StepResult:
    """The counts of a step: tokens with a gradient (in critic warm-up the critic's) and tokens without."""

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

    # State of a checkpoint beside tensors.
    NUMBERS = ("version", "steps", "critic_steps", "skipped_total", "_skipped_in_a_row", "baseline_state")

    def __init__(self, config: Config, world: World | None = None, weights_folder: Path | None = None) -> None:
        """Loads policy and critic from `config.model.path`. Without a `weights_folder` nothing is published.

        Raises `ConfigError` if the model cannot be loaded, or no layout of rows is exact.
        """
        self.config, self.world, self.weights_folder = config, world or World.alone(), weights_folder
        self.announce: Callable[[WeightsRef], WeightsRef] = lambda ref: ref  # called with each version's file
        torch.set_num_threads(config.learner.threads)
        torch.use_deterministic_algorithms(config.learner.deterministic)
        torch.manual_seed(config.run.seed)
        policy, self.critic = load_models(config, self.world)
        self._policy_update = None if policy is None else PolicyUpdate(config, self.world, policy)
        self.critic_update = None if self.critic is None else CriticUpdate(config, self.world, self.critic)
        updates = {"policy": self._policy_update, "critic": self.critic_update}
        models = [update.model for update in updates.values() if update is not None]
        self.optimizers = {name: update.optimizer for name, update in updates.items() if update is not None}
        self._layout = models[0].layout.both(models[-1].layout)
        self._vocabulary = min(model.vocabulary for model in models)
        self._linear_cost = linear_cost(models[-1])
        self.baseline_state: dict[str, Any] = {"all": [], "tasks": []}  # of an estimator without a critic
        self.published: WeightsRef | None = None  # the newest version, where it was announced
        self.version = self.steps = self.critic_steps = self.skipped_total = self._skipped_in_a_row = 0

    @property
    def policy(self) -> Policy:
        """The policy. Raises `LearnerError` while only a critic is pretrained."""
        if self._policy_update is None:
            raise LearnerError("run.task: pretrain_value has a critic and no policy")
        return self._policy_update.model

    def step(self, trajectories: Sequence[Trajectory]) -> StepResult:
        """Trains on a batch: rollouts in any order, the same on every rank.

        Raises `ValidationError` for trajectories that cannot be trained on (before anything changes), `LearnerError`
        if ranks disagree about the batch or too many steps in a row are skipped, `WeightsError` if publishing fails.
        """
        work = self._lay_out(trajectories)
        for name, optimizer in self.optimizers.items():
            made = self.version if name == "policy" else self.critic_steps
            work.metrics[f"{name}/lr"] = optimizer.set_step(self.steps, made)
        policy, kept, weights, skipped = self._policy_update, 0, None, None
        try:
            advantages = self._advantages(work)
            if policy is None:
                kept = work.n_actions
            elif self.steps < self.config.learner.critic_warmup_steps:
                kept = work.n_actions
                policy.measure_gap(work)
            else:
                kept = policy.run(work, torch.from_numpy(advantages).to(self.world.device))
                self.version += 1
                with work.timed("publish"):
                    weights = self._publish()
        except Skipped as reason:
            skipped = str(reason)
        return self._end(work, kept, weights, skipped)

    def _lay_out(self, trajectories: Sequence[Trajectory]) -> Work:
        """The batch, flat and the same on every rank, and this rank's micro-batches of it."""
        began, config, world = time.perf_counter(), self.config, self.world
        summaries = config.compaction.train_summaries
        batch = flatten(trajectories, self.version, summaries=summaries, vocabulary=self._vocabulary)
        bounds = (world.size, config.learner.row_tokens, config.learner.rows_per_micro_batch)
        plan = plan_segments(batch.lengths, *bounds, self._linear_cost, layout=self._layout)
        world.agree("batch and plan", int(plan.hash) ^ batch.checksum())
        micro = micro_batches(batch, plan, world.rank, world.device, self._layout)
        work = Work(batch, plan, micro)
        work.metrics.update(describe(trajectories, batch, config.env.success_reward))
        work.seconds["plan"] = time.perf_counter() - began
        return work

    def _advantages(self, work: Work) -> Floats:
        """Advantages float32[N] by flat index, the critic being updated on the way. Raises `Skipped`."""
        if self.critic_update is None:
            with work.timed("advantages"):
                advantages = self._advantages_of_rewards(work.batch)
        else:
            advantages = self.critic_update.run(work)
            self.critic_steps += 1
        if self.config.algorithm.whiten_advantages:
            advantages = whiten(advantages, work.batch.action_mask)
        chosen = advantages[work.batch.action_mask].astype(np.float64)
        work.metrics |= {"advantage/mean": float(chosen.mean()), "advantage/std": float(chosen.std())}
        work.arrays["advantages"] = advantages
        return advantages

    def _advantages_of_rewards(self, batch: Batch) -> Floats:
        """Advantages without a critic: the same at all action tokens of a rollout, 0 elsewhere.

        A rollout's reward here is its outcome plus its turn rewards. Raises `ValidationError` for a group that is not
        whole.
        """
        rewards, algorithm = batch.rewards.astype(np.float64), self.config.algorithm
        positions, extra = batch.turn_rewards
        np.add.at(rewards, batch.trajectory_of_token[positions], extra)
        if algorithm.estimator == "grpo":
            found = group_advantages(rewards, batch.ordinals // algorithm.group_size, algorithm.group_size)
        else:
            tasks = np.array([self.config.prompt_of(int(ordinal)) for ordinal in batch.ordinals], dtype=np.int64)
            window, of_task = algorithm.baseline_window, algorithm.prompt_window
            of_task = of_task if algorithm.estimator == "prompt_mean" else 0
            found, self.baseline_state = window_advantages(rewards, tasks, self.baseline_state, window, of_task)
        return np.where(batch.action_mask, found[batch.trajectory_of_token], 0.0).astype(np.float32)

    def _publish(self) -> WeightsRef | None:
        if self.weights_folder is None:
            return None
        tensors = full_tensors(self.policy.lm, self.config.published_dtype, self.world)
        failpoint("publish.begin")
        return None if tensors is None else self.publish(tensors)

    def publish(self, tensors: dict[str, torch.Tensor]) -> WeightsRef | None:
        """Writes the whole tensors of the policy as the present version and announces it; on rank 0. Raises
        `WeightsError`.
        """
        if self.weights_folder is None:
            return None
        patience_s = self.config.run.disk_patience_s
        self.published = self.announce(publish(tensors, self.weights_folder, self.version, patience_s=patience_s))
        return self.published

    def _end(self, work: Work, kept: int, weights: WeightsRef | None, skipped: str | None) -> StepResult:
        metrics, sampled = work.metrics, work.batch.sampled_tokens
        self.steps += 1
        self.skipped_total += skipped is not None
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        metrics.update({f"time/{cause}_s": seconds for cause, seconds in work.seconds.items()})
        metrics["tokens/trained"], metrics["tokens/masked"] = float(kept), float(sampled - kept)
        metrics["step/skipped"], metrics["step/skipped_total"] = float(skipped is not None), float(self.skipped_total)
        metrics["step/version"] = float(self.version)
        if self._skipped_in_a_row >= self.config.learner.max_skipped_in_a_row:
            raise LearnerError(f"{self._skipped_in_a_row} steps in a row were skipped; the last one: {skipped}")
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        arrays = work.record(self.world) if self.config.telemetry.keep_trajectories else None
        return StepResult(self.steps, self.version, metrics, kept, sampled - kept, weights, skipped, arrays)
