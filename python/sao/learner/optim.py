"""One optimizer of the learner: AdamW, its rate by training step, and the end of a backward pass.

Gradients arrive as sums over tokens and ranks. `finish` makes them means with the one division of the step, refuses
non-finite ones on all ranks alike, and clips by the global norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sao.config.sections import LearnerSection
from sao.learner.metrics import Clock
from sao.learner.world import World


def rate_factor(step: int, warmup_steps: int, decay: str, total_steps: int) -> float:
    """Factor of the base rate in training step `step` (from 0), whatever the number of optimizer calls in a step.

    min(1, (step + 1) / warmup_steps), times 1 - step / total_steps if `decay` is "linear".
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return warm * (max(0.0, 1.0 - step / total_steps) if decay == "linear" else 1.0)


@dataclass(frozen=True)
class Gradient:
    """What `finish` found: the norm of the mean gradient before clipping, and the name of a non-finite tensor."""

    norm: float
    bad: str | None


class Optimizer:
    """AdamW over the trainable parameters of one model; matrices decay, vectors (norms, biases) do not."""

    def __init__(self, model: nn.Module, base_rate: float, config: LearnerSection, total_steps: int, world: World):
        self.world, self.config, self.base_rate, self.total_steps = world, config, base_rate, total_steps
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trainable]
        self.parameters = [parameter for _, parameter in trainable]
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=base_rate, betas=config.betas, foreach=True
        )
        self.set_step(0)

    def set_step(self, step: int) -> float:
        """Sets the learning rate of every group for training step `step`; returns it."""
        config = self.config
        rate = self.base_rate * rate_factor(step, config.lr_warmup_steps, config.lr_decay, self.total_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        return rate

    def clear(self) -> None:
        """Forgets all gradients."""
        self.adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def finish(self, count: float) -> Gradient:
        """Divides the gradient sums by `count` (> 0, global) and clips to `grad_clip`; `step` may follow.

        If any element on any rank is not finite, every rank gets the name of that tensor and nothing may follow.
        """
        gradients = [_local(parameter.grad) for parameter in self.parameters]
        held = [gradient for gradient in gradients if gradient is not None]
        norms = iter(torch._foreach_norm(held)) if held else iter(())
        zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
        squares = self.world.total(
            torch.stack([zero if g is None else next(norms).to(zero).square() for g in gradients])
        )
        finite = squares.isfinite()
        norm = float(squares.sum().sqrt()) / count
        if not bool(finite.all()):
            return Gradient(norm, self.names[int((~finite).nonzero()[0, 0])])
        scale = min(1.0, self.config.grad_clip / (norm + 1e-6)) / count
        torch._foreach_mul_(held, scale)
        return Gradient(norm, None)

    def update(self, count: float, name: str, suffix: str, clock: Clock, metrics: dict[str, float]) -> str | None:
        """`finish` and `step` of the model `name`; returns why nothing was updated, the same on every rank, or None."""
        with clock.of("optimizer"):
            gradient = self.finish(count)
            if gradient.bad is not None:
                self.clear()
                return f"non-finite gradient of {name} {gradient.bad}"
            metrics[f"{name}/grad_norm{suffix}"] = gradient.norm
            self.step()
        return None

    def step(self) -> None:
        """One AdamW update with the gradients that `finish` has left; clears them."""
        self.adam.step()
        self.clear()


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
