"""The critic's part of a step: K updates towards the targets, and the advantages that its values give."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sao.algorithms.advantage import advantages as estimate_advantages
from sao.algorithms.value import explained_variance, value_loss, value_moments
from sao.config import Config
from sao.learner.model import Critic
from sao.learner.optim import Optimizer
from sao.learner.work import Skipped, Work
from sao.learner.world import World

Floats = NDArray[np.float32]


class CriticUpdate:
    """The critic and its optimizer. Every rank makes the same calls.

    `moments`: `value_moments` of the last batch, with the values from before its passes: it had not been trained on.
    """

    def __init__(self, config: Config, world: World, critic: Critic) -> None:
        self.config, self.world, self.model = config, world, critic
        rate = config.learner.critic_lr if config.lora.critic_lr is None else config.lora.critic_lr
        self.optimizer = Optimizer(critic.trained(), rate, config.learner.critic_lr_warmup_steps, config, world)
        self.moments = torch.zeros(5, dtype=torch.float64)

    @property
    def bootstraps(self) -> bool:
        """Whether the value of the last state of some rollouts stands behind their end."""
        return self.config.algorithm.bootstrap_truncated or self.config.env.at_time_limit == "bootstrap"

    def run(self, work: Work) -> Floats:
        """K critic passes. Returns advantages float32[N] by flat index. Raises `Skipped`."""
        algorithm, batch = self.config.algorithm, work.batch
        # With lambda_critic = 1 a target is a return and needs no value; then the first critic pass, which runs before
        # any update, gives the values on its way and their own forward pass is saved.
        returns = algorithm.lambda_critic == 1 and algorithm.skip_observations and not self.bootstraps
        values, bootstrap = np.zeros(len(batch.token_ids), dtype=np.float32), None
        if not returns:
            values, bootstrap = self._values(work)
            if not np.isfinite(values[batch.action_mask]).all():
                raise Skipped("non-finite value of the critic")
        advantages, targets, lambdas = self._estimate(work, values, bootstrap)
        for number in range(1, self.config.learner.critic_passes + 1):
            # V_old is what the critic said before the first update of this step. In a first pass that gives the values
            # itself, V is V_old, and the two forms of the loss are one.
            clipped = self.config.learner.value_loss == "clipped" and not (number == 1 and returns)
            with work.timed("critic"):
                seen = self._pass(work, number, targets, values if clipped else None)
            self.optimizer.update(work.n_actions, "critic", f"_{number}", work)
            if number == 1 and returns:
                values = seen
                advantages, _, lambdas = self._estimate(work, values, None)
        mask = torch.from_numpy(batch.action_mask)
        # Below 1 the targets hold values themselves: what a critic explains of them says nothing about rewards.
        gains = targets if returns else self._returns(work)
        self.moments = value_moments(values=torch.from_numpy(values), returns=torch.from_numpy(gains), mask=mask)
        work.metrics["critic/value_mean"] = float(values[batch.action_mask].astype(np.float64).mean())
        if (explained := explained_variance(self.moments)) is not None:
            work.metrics["critic/explained_variance"] = explained
        if algorithm.advantage_values == "after":
            advantages, _, lambdas = self._estimate(work, *self._values(work))
        known = lambdas[np.isfinite(lambdas)]  # a trajectory without action tokens has none
        if known.size:
            work.metrics["lambda/mean"] = float(known.mean())
        work.arrays |= {"targets": targets, "values": values}
        return advantages

    def _pass(self, work: Work, number: int, targets: Floats, old: Floats | None) -> Floats:
        """Leaves gradient sums in the critic. Returns its values by flat index, float32[N]; `old` (V_old) as well."""
        learner, n_actions, device = self.config.learner, work.n_actions, self.world.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, values outside of the clip
        wanted, seen = torch.from_numpy(targets).to(device), torch.zeros(len(targets), device=device)
        frozen = None if old is None else torch.from_numpy(old).to(device)
        for part in work.micro:
            values = self.model(part, part.state_rows, part.state_columns)
            before = None if frozen is None else frozen[part.flat]
            loss = value_loss(values=values, targets=wanted[part.flat], old_values=before, clip=learner.value_clip)
            loss.total.backward()
            totals[0] += loss.total.detach()
            if loss.clipped is not None:
                totals[1] += loss.clipped
            seen[part.flat] = values.detach().float()
        self.world.total(totals)
        work.metrics[f"loss/critic_{number}"] = float(totals[0]) / n_actions
        if learner.value_loss == "clipped":
            work.metrics[f"critic/clipped_{number}"] = float(totals[1]) / n_actions
        return self.world.total(seen).cpu().numpy()

    @torch.no_grad()
    def _values(self, work: Work) -> tuple[Floats, Floats | None]:
        """Value of the state before every action token, float32[N] by flat index, equal on all ranks; and bootstraps.

        Every rank fills in its own tokens; the sum over ranks is exact, since all others hold 0 there.
        """
        batch, algorithm = work.batch, self.config.algorithm
        everywhere = not algorithm.skip_observations or self.bootstraps
        with work.timed("values"):
            after = torch.zeros(len(batch.token_ids) + 1, dtype=torch.float32, device=self.world.device)
            for part in work.micro:
                states = (part.all_rows, part.all_columns) if everywhere else (part.state_rows, part.state_columns)
                after[part.all_flat + 1 if everywhere else part.flat] = self.model(part, *states).float()
            # after[k + 1] is the value of the state that ends with token k, so after[k] is that before token k.
            found = self.world.total(after).cpu().numpy()
        bootstrap = None
        if self.bootstraps:
            cut = batch.truncated if algorithm.bootstrap_truncated else batch.timed_out
            bootstrap = np.where(cut, found[batch.ends], np.float32(0.0))
        return found[:-1], bootstrap

    def _returns(self, work: Work) -> Floats:
        """The rewards to come of every token, float32[N], without any value in them."""
        return self._estimate(work, np.zeros(len(work.batch.token_ids), dtype=np.float32), None, lambda_critic=1.0)[1]

    def _estimate(
        self, work: Work, values: Floats, bootstrap: Floats | None, lambda_critic: float | None = None
    ) -> tuple[Floats, Floats, NDArray[np.float64]]:
        """Advantages, targets (float32[N]) and lambdas (float64[T]) from the native kernel, equal on all ranks."""
        algorithm, batch = self.config.algorithm, work.batch
        with work.timed("advantages"):
            return estimate_advantages(
                values,
                *(batch.action_mask, batch.segment_offsets, batch.trajectory_offsets, batch.rewards),
                gamma=algorithm.gamma,
                lambda_policy=None if isinstance(algorithm.lambda_policy, str) else algorithm.lambda_policy,
                lambda_alpha=algorithm.lambda_alpha,
                lambda_critic=algorithm.lambda_critic if lambda_critic is None else lambda_critic,
                cross_segment=algorithm.cross_segment,
                skip_observations=algorithm.skip_observations,
                bootstrap=bootstrap,
                turn_rewards=batch.turn_rewards,
                after=(batch.later_actions, batch.next_segment),
            )
