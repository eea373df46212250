"""Value pretraining: a critic learns the returns of the start policy before reinforcement learning begins.

The run is an ordinary one in which the policy never changes; each batch trains the critic, with Monte-Carlo targets
(`lambda_critic = 1`). A batch is measured before it is trained on, so the explained variance is that of rollouts the
critic has not seen.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from sao.algorithms.value import explained_variance
from sao.config.sections import ValuePretrainingSection
from sao.learner.export import write_critic
from sao.learner.loop import commit, take, train_on, why_stopped
from sao.learner.step import Learner
from sao.storage.checkpoints import Ordinals
from sao.transport.client import Client

log = logging.getLogger(__name__)

FOLDER = "critic"


class Progress:
    """The explained variance of batches before they were trained on, and whether it is time to stop."""

    def __init__(self, settings: ValuePretrainingSection) -> None:
        self.settings = settings
        self.explained_variance: float | None = None  # over the last `window` batches, once there are as many
        self._moments: deque[Tensor] = deque(maxlen=settings.window)
        self._batches, self._best, self._best_at = 0, -float("inf"), 0

    def add(self, moments: Tensor) -> str | None:
        """Takes the `value_moments` of a batch; returns why to stop, or None."""
        self._batches += 1
        self._moments.append(moments)
        if len(self._moments) == self.settings.window:
            self.explained_variance = explained_variance(torch.stack(list(self._moments)).sum(0))
        value, settings = self.explained_variance, self.settings
        if value is not None:
            if settings.target is not None and value >= settings.target:
                return f"explained variance {value:.3f} reached value_pretraining.target = {settings.target:g}"
            if value > self._best + settings.min_gain:
                self._best, self._best_at = value, self._batches
            elif settings.patience is not None and self._batches - self._best_at >= settings.patience:
                gain = f"has not gained {settings.min_gain:g} in {settings.patience} batches"
                return f"explained variance {value:.3f} {gain}"
        return f"{self._batches} batches done" if self._batches >= settings.steps else None


def pretrain(learner: Learner, connection: Client | None, run_folder: Path, asked: Future[str] | None = None) -> str:
    """Trains the critic until it is time to stop, writes it to `run_folder/critic`, and returns why it ended.

    `connection` is that to the broker on rank 0 and None elsewhere, `asked` as for `train`. A run that is stopped from
    outside before the first batch writes nothing.
    """
    critic = learner.critic_update
    assert critic is not None, "the configuration's rules"
    config, reason, rollouts, tokens = learner.config, "", 0, 0
    progress = Progress(config.value_pretraining)
    while not reason:
        taken, result = take(learner, connection, asked), None
        if taken is None:
            reason = why_stopped(asked)
        else:
            result = train_on(learner, taken, Ordinals())
            rollouts, tokens = rollouts + len(taken.tasks), tokens + result.trained_tokens
            reason = progress.add(critic.moments) or ""
        if reason and learner.steps:
            metadata = {
                "model": config.learner.critic_path or config.model.path,
                "reason": reason,
                "batches": learner.steps,
                "rollouts": rollouts,
                "action_tokens": tokens,
                "explained_variance": progress.explained_variance,
                "window_batches": config.value_pretraining.window,
                "critic_frozen": config.learner.critic_frozen,
                "gamma": config.algorithm.gamma,
            }
            to, patience_s = run_folder / FOLDER, config.run.disk_patience_s
            write_critic(critic.model, to, config, metadata, learner.world, patience_s)
        if taken is not None and result is not None:
            if progress.explained_variance is not None:
                result.metrics["critic/explained_variance_window"] = progress.explained_variance
            commit(connection, taken, result, done=reason)
    log.info("%s; explained variance %s", reason, progress.explained_variance)
    return reason
