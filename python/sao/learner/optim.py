"""One optimizer of the learner: AdamW, its rate by training step, and the end of a backward pass.

Gradients arrive as sums over tokens and ranks. `update` makes them means with the one division of the step, refuses
non-finite ones on all ranks alike, and clips by the global norm.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sao.config import Config
from sao.learner.work import Skipped, Work
from sao.learner.world import World


class Optimizer:
    """AdamW over the parameters that one model trains; matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        base_rate: float,
        warmup_steps: int,
        config: Config,
        world: World,
    ) -> None:
        self.world, self.config, self.base_rate, self.warmup_steps = world, config.learner, base_rate, warmup_steps
        self.total_steps = config.run.steps
        self.parameters = parameters
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim >= 2], "weight_decay": self.config.weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=base_rate, betas=self.config.betas, foreach=True
        )
        self.set_step(0, 0)

    def set_step(self, step: int, updates: int) -> float:
        """Sets and returns the rate of training step `step` (from 0), however many optimizer steps that has.

        updates: training steps before it that have updated this model; the warm-up counts these, the decay all.
        """
        factor = min(1.0, (updates + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.config.lr_decay == "linear":
            factor *= max(0.0, 1.0 - step / self.total_steps)
        rate = self.base_rate * factor
        for group in self.adam.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def update(self, count: float, name: str, suffix: str, work: Work) -> None:
        """Divides the gradient sums by `count` (> 0, global), clips them to `grad_clip` and makes one AdamW step.

        The norm of the mean gradient before clipping becomes the metric `NAME/grad_normSUFFIX`. Raises `Skipped` for a
        non-finite gradient on any rank, and leaves the optimizer as it was.
        """
        with work.timed("optimizer"):
            held = {key: p.grad for key, p in self.parameters.items() if p.grad is not None}
            gradients = {key: g.to_local() if isinstance(g, DTensor) else g for key, g in held.items()}
            norms = dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True))
            zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
            squares = self.world.total(torch.stack([norms.get(key, zero).to(zero).square() for key in self.parameters]))
            bad = [key for key, finite in zip(self.parameters, squares.isfinite().tolist(), strict=True) if not finite]
            if not bad:
                norm = float(squares.sum().sqrt()) / count
                work.metrics[f"{name}/grad_norm{suffix}"] = norm
                factor = min(1.0, self.config.grad_clip / (norm + 1e-6)) / count
                torch._foreach_mul_(list(gradients.values()), factor)
                self.adam.step()
            self.adam.zero_grad()
        if bad:
            raise Skipped(f"non-finite gradient of {name} {bad[0]}")
