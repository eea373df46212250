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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sao.algorithms.advantage import whiten
from sao.config import Config
from sao.errors import LearnerError
from sao.learner.attention import choose
from sao.learner.baseline import Baseline
from sao.learner.batch import flatten, micro_batches, plan_rows
from sao.learner.critic_update import CriticUpdate
from sao.learner.export import export, full_tensors
from sao.learner.metrics import Clock, describe, describe_advantages
from sao.learner.model import Critic, Policy, linear_cost, load_critic, load_policy
from sao.learner.optim import Optimizer
from sao.learner.plan import LINEAR_COST
from sao.learner.policy_update import PolicyUpdate
from sao.learner.record import Record
from sao.learner.work import Work
from sao.learner.world import World
from sao.storage.failpoints import failpoint
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

    # What a checkpoint holds beside tensors.
    NUMBERS = ("version", "steps", "skipped_total", "_skipped_in_a_row", "baseline_state")

    def __init__(self, config: Config, world: World | None = None, weights_folder: Path | None = None) -> None:
        """Loads policy and critic from `config.model.path`. Without a `weights_folder` nothing is published.

        Raises `ConfigError` if the model cannot be loaded or packed.
        """
        self.config, self.world, self.weights_folder = config, world or World.alone(), weights_folder
        self.announce: Callable[[WeightsRef], WeightsRef] = lambda ref: ref  # called with each version's file
        torch.set_num_threads(config.learner.threads)
        torch.use_deterministic_algorithms(config.learner.deterministic)
        torch.manual_seed(config.run.seed)
        learner = config.learner
        steps, self._attention = config.run.steps, choose(config, self.world.device)
        self._linear_cost = LINEAR_COST
        self._policy_update: PolicyUpdate | None = None
        vocabularies = []
        if config.run.task == "train":
            policy = load_policy(config, self.world)
            optimizer = Optimizer(policy, learner.policy_lr, learner, steps, self.world)
            self._policy_update = PolicyUpdate(config, self.world, policy, optimizer)
            self._linear_cost = linear_cost(policy)
            vocabularies.append(policy.vocabulary)
        self._baseline = Baseline(config)
        self._critic_update: CriticUpdate | None = None
        if config.algorithm.has_critic:
            critic = load_critic(config, self.world)
            optimizer = Optimizer(critic, learner.critic_lr, learner, steps, self.world)
            self._critic_update = CriticUpdate(config, self.world, critic, optimizer)
            self._linear_cost = linear_cost(critic)
            vocabularies.append(critic.vocabulary)
        self._vocabulary = min(vocabularies, default=None)
        self.version = 0
        self.steps = 0
        self.skipped_total = 0
        self._skipped_in_a_row = 0

    @property
    def policy(self) -> Policy:
        """The policy. Raises `LearnerError` while only a critic is pretrained."""
        return self._of_policy().policy

    @property
    def policy_optimizer(self) -> Optimizer:
        """The policy's optimizer. Raises `LearnerError` while only a critic is pretrained."""
        return self._of_policy().optimizer

    @property
    def critic(self) -> Critic | None:
        """The critic, if the estimator has one."""
        return None if self._critic_update is None else self._critic_update.critic

    @property
    def critic_optimizer(self) -> Optimizer | None:
        """The critic's optimizer, if the estimator has one."""
        return None if self._critic_update is None else self._critic_update.optimizer

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers that there are: `policy`, `critic`."""
        updates = {"policy": self._policy_update, "critic": self._critic_update}
        return {name: update.optimizer for name, update in updates.items() if update is not None}

    @property
    def value_moments(self) -> torch.Tensor:
        """`algorithms.value.value_moments` of the last batch, before it was trained on; zeros without a critic."""
        return torch.zeros(5) if self._critic_update is None else self._critic_update.moments

    @property
    def baseline_state(self) -> dict[str, Any]:
        """What an estimator without a critic remembers of earlier batches, as plain JSON."""
        return self._baseline.state

    @baseline_state.setter
    def baseline_state(self, value: dict[str, Any]) -> None:
        self._baseline.state = value

    def _of_policy(self) -> PolicyUpdate:
        if self._policy_update is None:
            raise LearnerError("run.task: pretrain_value has a critic and no policy")
        return self._policy_update

    def step(self, trajectories: Sequence[Trajectory]) -> StepResult:
        """Trains on a batch: rollouts in any order, the same on every rank.

        Raises `ValidationError` for trajectories that cannot be trained on (before anything changes), `LearnerError`
        if ranks disagree about the batch or too many steps in a row are skipped, `WeightsError` if publishing fails.
        """
        clock, learner = Clock(), self.config.learner
        with clock.of("plan"):
            summaries = self.config.compaction.train_summaries
            batch = flatten(trajectories, self.version, summaries=summaries, vocabulary=self._vocabulary)
            bound = (learner.row_tokens, learner.rows_per_micro_batch)
            plan = plan_rows(batch, self.world.size, *bound, self._linear_cost, self._attention)
            self.world.agree("batch and plan", (int(plan.hash) ^ batch.checksum()) & (2**64 - 1))
            micro = micro_batches(batch, plan, self.world.rank, self.world.device, self._attention)
            work = Work(batch, micro, clock, describe(batch, self.config.env.success_reward))
            if self.config.telemetry.keep_trajectories > 0:
                work.record = Record(batch, plan, self.world.device)
        for name, optimizer in self.optimizers.items():
            work.metrics[f"{name}/lr"] = optimizer.set_step(self.steps)
        warmup = self.steps < learner.critic_warmup_steps or self._policy_update is None
        kept, weights = 0, None
        advantages, skipped = self._advantages(work)
        if advantages is not None and warmup:
            kept = work.n_actions
            if self._policy_update is not None:
                self._policy_update.measure_gap(work)
        elif advantages is not None:
            kept, skipped = self._of_policy().run(work, torch.from_numpy(advantages).to(self.world.device))
        if skipped is None and not warmup:
            self.version += 1
            with clock.of("publish"):
                weights = self._publish()
        return self._end(work, kept, weights, skipped)

    def _advantages(self, work: Work) -> tuple[NDArray[np.float32] | None, str | None]:
        """Advantages float32[N] by flat index, the critic being updated on the way, or None and why there are none."""
        if self._critic_update is None:
            with work.clock.of("advantages"):
                advantages = self._baseline.advantages(work.batch)
        else:
            found, skipped = self._critic_update.run(work)
            if found is None:
                return None, skipped
            advantages = found
        if self.config.algorithm.whiten_advantages:
            advantages = whiten(advantages, work.batch.action_mask)
        work.metrics.update(describe_advantages(work.batch, advantages))
        if work.record is not None:
            work.record.put(advantages=advantages)
        return advantages, None

    # -- ends

    def _publish(self) -> WeightsRef | None:
        if self.weights_folder is None:
            return None
        tensors = full_tensors(self.policy.lm, self.config.model.dtype, self.world)
        failpoint("publish.begin")
        return None if tensors is None else self.announce(publish(tensors, self.weights_folder, self.version))

    def _end(self, work: Work, kept: int, weights: WeightsRef | None, skipped: str | None) -> StepResult:
        metrics, sampled = work.metrics, work.batch.sampled_tokens
        self.steps += 1
        self.skipped_total += skipped is not None
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        metrics.update({f"time/{cause}_s": seconds for cause, seconds in work.clock.seconds.items()})
        metrics["tokens/trained"], metrics["tokens/masked"] = float(kept), float(sampled - kept)
        metrics["step/skipped"], metrics["step/skipped_total"] = float(skipped is not None), float(self.skipped_total)
        metrics["step/version"] = float(self.version)
        if self._skipped_in_a_row >= self.config.learner.max_skipped_in_a_row:
            raise LearnerError(f"{self._skipped_in_a_row} steps in a row were skipped; the last one: {skipped}")
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        arrays = None if work.record is None else work.record.finish(self.world)
        return StepResult(self.steps, self.version, metrics, kept, sampled - kept, weights, skipped, arrays)

    def export(self, checkpoints: Path) -> Path:
        """Writes the Hugging Face folder `checkpoints/step-N` of the current state; returns its path."""
        target = checkpoints / f"step-{self.steps}"
        model = self.config.model
        kept = self.config.learner.checkpoints_kept
        export(self.policy, self.critic, model.path, target, model.dtype, self.world, kept)
        return target
