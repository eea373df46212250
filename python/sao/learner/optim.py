"""One optimizer of the learner: AdamW, its rate by training step, and the end of a backward pass.

Gradients arrive as sums over tokens and ranks. `update` makes them means with the one division of the step, refuses
non-finite ones on all ranks alike, and clips by the global norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sao.config.sections import LearnerSection
from sao.learner.work import Work
from sao.learner.world import World


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
        """Sets and returns the rate of training step `step` (from 0), however many optimizer steps that has.

        rate = base_rate * min(1, (step + 1) / warmup_steps), times 1 - step / total_steps if `lr_decay` is "linear"
        """
        warmup = self.config.lr_warmup_steps
        factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if self.config.lr_decay == "linear":
            factor *= max(0.0, 1.0 - step / self.total_steps)
        rate = self.base_rate * factor
        for group in self.adam.param_groups:
            group["lr"] = rate
        return rate

    def clear(self) -> None:
        """Forgets all gradients."""
        self.adam.zero_grad(set_to_none=True)

    def update(self, count: float, name: str, suffix: str, work: Work) -> str | None:
        """Divides the gradient sums by `count` (> 0, global), clips them to `grad_clip` and makes one AdamW step.

        Returns why nothing was updated, the same on every rank, or None: a non-finite gradient on any rank leaves the
        optimizer as it was. The norm of the mean gradient before clipping becomes the metric `NAME/grad_normSUFFIX`.
        """
        with work.clock.of("optimizer"):
            norm, bad = self._finish(count)
            if bad is not None:
                self.clear()
                return f"non-finite gradient of {name} {bad}"
            work.metrics[f"{name}/grad_norm{suffix}"] = norm
            self.step()
        return None

    def step(self) -> None:
        """One AdamW update with the gradients as they are; clears them."""
        self.adam.step()
        self.clear()

    @torch.no_grad()
    def _finish(self, count: float) -> tuple[float, str | None]:
        """Makes means of the gradients and clips them; returns their norm before, and a tensor that is not finite."""
        gradients = [None if parameter.grad is None else local(parameter.grad) for parameter in self.parameters]
        held = [gradient for gradient in gradients if gradient is not None]
        norms = iter(torch._foreach_norm(held)) if held else iter(())
        zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
        squares = self.world.total(
            torch.stack([zero if g is None else next(norms).to(zero).square() for g in gradients])
        )
        finite = squares.isfinite()
        norm = float(squares.sum().sqrt()) / count
        if not bool(finite.all()):
            return norm, self.names[int((~finite).nonzero()[0, 0])]
        torch._foreach_mul_(held, min(1.0, self.config.grad_clip / (norm + 1e-6)) / count)
        return norm, None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
