"""One step of SAO written plainly in float64: one segment at a time, no packing, no kernel, no shared code."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sao.config import Config


def lambda_of(config: Config, n: int) -> float:
    if config.algorithm.lambda_policy == "adaptive":
        return min(1.0, max(0.0, 1.0 - 1.0 / (config.algorithm.lambda_alpha * n)))
    return float(config.algorithm.lambda_policy)


def gae(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    out, following, carried = [], 0.0, 0.0
    for index in reversed(range(len(values))):
        last = index == len(values) - 1
        delta = (reward if last else 0.0) + gamma * following - values[index]
        carried = delta + gamma * lam * carried
        following = values[index]
        out.append(carried)
    return out[::-1]


def single(numbers: Iterable[float]) -> list[float]:
    """Rounded to float32, the type of advantages and targets."""
    return [float(np.float32(number)) for number in numbers]


class Oracle:
    """Policy, critic backbone and head as plain modules with plain AdamW."""

    def __init__(self, lm: Any, config: Config) -> None:
        self.config = config
        lm.set_experts_implementation("eager")  # torch multiplies groups in 32 and 16 bits only
        self.lm = copy.deepcopy(lm).double()
        body = copy.deepcopy(lm).double()
        body = body.base_model if body.base_model is not body else body.model
        self.backbone = getattr(body, "decoder", body)
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1).double()
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        learner = config.learner
        frozen = "self_attn" if learner.critic_frozen == "attention" else "nothing"
        critic = [p for n, p in self.backbone.named_parameters() if frozen not in n] + list(self.head.parameters())
        options = {"betas": learner.betas, "weight_decay": learner.weight_decay}
        self.critic_parameters, self.policy_parameters = critic, list(self.lm.parameters())
        self.critic_adam = torch.optim.AdamW(critic, lr=learner.critic_lr, **options)
        self.policy_adam = torch.optim.AdamW(self.policy_parameters, lr=learner.policy_lr, **options)

    def value(self, segment: Any) -> torch.Tensor:
        ids = torch.from_numpy(segment.token_ids.astype("int64"))[None]
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
        actions = torch.from_numpy(segment.action_mask.nonzero()[0])
        return self.head(hidden[actions - 1])[:, 0]

    def logprob(self, segment: Any, temperature: float) -> torch.Tensor:
        ids = torch.from_numpy(segment.token_ids.astype("int64"))
        logits = self.lm(input_ids=ids[None], use_cache=False).logits[0] / temperature
        actions = torch.from_numpy(segment.action_mask.nonzero()[0])
        return logits.log_softmax(-1)[actions - 1, ids[actions]]

    def step(self, trajectories: list[Any], version: int) -> dict[str, float]:
        algorithm = self.config.algorithm
        total = sum(t.n_actions for t in trajectories)
        advantages, targets = [], []
        with torch.no_grad():
            for t in trajectories:
                lam = lambda_of(self.config, t.n_actions)
                later = t.n_actions
                for segment in t.segments:
                    values = [float(v) for v in self.value(segment).float()]
                    later -= segment.n_actions
                    factor = (algorithm.gamma * lam) ** later
                    advantages.append(single(factor * a for a in gae(values, t.reward, algorithm.gamma, lam)))
                    local = gae(values, t.reward, algorithm.gamma, algorithm.lambda_critic)
                    targets.append(single(a + v for a, v in zip(local, values, strict=True)))
        segments = [(t, segment) for t in trajectories for segment in t.segments]
        out: dict[str, float] = {}
        for number in range(1, self.config.learner.critic_passes + 1):
            losses = [
                ((self.value(segment) - torch.tensor(target, dtype=torch.float64)) ** 2).sum()
                for (_, segment), target in zip(segments, targets, strict=True)
            ]
            loss = sum(losses) / total
            found = self._update(loss, self.critic_parameters, self.critic_adam)
            out[f"loss/critic_{number}"], out[f"critic/grad_norm_{number}"] = found
        losses, staleness = [], self.config.staleness
        for (t, segment), advantage in zip(segments, advantages, strict=True):
            logp = self.logprob(segment, t.temperature)
            behaviour = torch.from_numpy(segment.logprobs[segment.action_mask]).double()
            stamps = torch.full((segment.n_tokens,), -1)
            for start, stop, stamp in segment.version_spans.tolist():
                stamps[start:stop] = stamp
            for index, position in enumerate(segment.action_mask.nonzero()[0].tolist()):
                ratio = (logp[index] - behaviour[index]).exp().item()
                fresh = staleness.stale != "mask" or version - int(stamps[position]) <= staleness.max_lag
                if fresh and 1 - algorithm.eps_low < ratio < 1 + algorithm.eps_high:
                    losses.append(-ratio * advantage[index] * logp[index])
        found = self._update(sum(losses) / total, self.policy_parameters, self.policy_adam)
        out["loss/policy"], out["policy/grad_norm"] = found
        out["tokens/trained"] = float(len(losses))
        return out

    def _update(self, loss: torch.Tensor, parameters: list[Any], adam: torch.optim.Optimizer) -> tuple[float, float]:
        """The loss and the norm of its gradient."""
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.learner.grad_clip)
        adam.step()
        return float(loss.detach()), float(norm)
