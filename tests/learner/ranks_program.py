"""Run on each rank by `test_ranks.py`: every rank trains on the batches of each scenario and writes what came of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from learner.architectures import make
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch
from torch.distributed.tensor import DTensor

from sao.errors import LearnerError
from sao.learner.checkpoint import Checkpointer
from sao.learner.export import full_tensors
from sao.learner.step import Learner
from sao.learner.world import World
from sao.trajectory import Trajectory

SCENARIOS = ("long-and-tiny", "idle", "five-long-one-short", "kept", "float32", "hybrid")
ONLY_TWO = ("poison", "disagree")
ALONE = ("lora",)  # run by name
ADVERSARIAL = ("budget-and-hundreds", "idle", "five-long-one-short")


def batches(scenario: str) -> list[list[Trajectory]]:
    """The same on every rank."""
    rng = np.random.default_rng(0)
    if scenario == "long-and-tiny":
        return [random_batch(number, 9, long=60) for number in range(3)]
    if scenario == "idle":  # one segment: a second rank has no work at all
        return [[make_trajectory(rng, [make_segment(rng, [(5, 4)])], reward=1.0)] for _ in range(2)]
    if scenario == "budget-and-hundreds":  # one segment as long as a row may be, and 300 of ten tokens
        whole = make_trajectory(rng, [make_segment(rng, [(4, 60)])], reward=1.0)
        return [[whole, *(make_trajectory(rng, [make_segment(rng, [(5, 5)])]) for _ in range(300))]]
    if scenario == "five-long-one-short":
        long = [make_trajectory(rng, [make_segment(rng, [(30, 30)])]) for _ in range(5)]
        return [[*long, make_trajectory(rng, [make_segment(rng, [(2, 1)])])]]
    return [random_batch(number, 8) for number in range(8 if scenario == "float32" else 4)]


def spoil(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
    """Makes the gradient of a module's output not a number."""
    if output.requires_grad:
        output.register_hook(lambda gradient: torch.full_like(gradient, math.nan))


def keep_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Fills up with the whole mean gradients, after clipping, of the last update of each model."""
    kept: dict[str, torch.Tensor] = {}
    for name, optimizer in (("policy", learner.optimizers["policy"]), ("critic", learner.optimizers["critic"])):

        def step(name=name, optimizer=optimizer, update=optimizer.adam.step):
            for key, parameter in optimizer.parameters.items():
                gradient = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                kept[f"{name}.{key}"] = whole.clone()
            update()

        optimizer.adam.step = step
    return kept


def run(scenario: str, model: Path, out: Path, world: World) -> None:
    settings = {"algorithm__denominator": "kept"} if scenario == "kept" else {}
    dtype = "float32" if scenario == "float32" else "float64"
    if scenario in ("float32", "hybrid"):  # the states of a hybrid are float32, whatever its weights are
        settings = {"learner__policy_lr": 1e-4, "learner__critic_lr": 1e-4}
    if world.size == 4:  # what saves memory must not change a number either
        settings |= {"model__activation_checkpointing": True, "learner__logprob_chunk_tokens": 7}
        settings |= {"learner__offload_optimizer": True}
    if scenario == "lora":
        settings = {"lora__rank": 4, "algorithm__lambda_critic": 0.9}
    weights = out / "weights"
    if world.rank == 0:
        weights.mkdir(parents=True)
    if scenario == "hybrid":  # rows of one segment, and experts
        model = out / "model"
        if world.rank == 0:
            make("qwen3_next").save_pretrained(model)
        world.agree("the model is there", 0)
    learner = Learner(make_config(model, model__dtype=dtype, **settings), world, weights)
    gradients = keep_gradients(learner) if scenario in (*ADVERSARIAL, *ALONE) else {}
    report: dict[str, list] = {"steps": [], "skipped": [], "versions": [], "published": [], "error": []}
    for number, batch in enumerate(batches(scenario)):
        if scenario == "disagree" and number == 1 and world.rank == 1:
            batch = batch[::-1]
        poisoned = scenario == "poison" and number == 2 and world.rank == world.size - 1
        hook = learner.policy.lm.model.layers[1].mlp.register_forward_hook(spoil) if poisoned else None
        try:
            result = learner.step(batch)
        except LearnerError as error:
            report["error"].append(str(error))
            break
        if hook is not None:
            hook.remove()
        report["steps"].append({k: v for k, v in result.metrics.items() if not k.startswith("time/")})
        report["skipped"].append(result.skipped)
        report["versions"].append(result.version)
        report["published"].append(None if result.weights is None else result.weights.version)
    tensors = {}
    for name, module in (("policy", learner.policy), ("critic", learner.critic)):
        whole = full_tensors(module, dtype, world)
        tensors.update({f"{name}.{key}": tensor for key, tensor in (whole or {}).items()})
    if scenario == "long-and-tiny":
        saver = Checkpointer(learner, out / "checkpoints")
        assert saver.save(0, []) is None and saver.finish() is None
    if world.rank == 0:
        torch.save(tensors, out / "tensors.pt")
        torch.save(gradients, out / "gradients.pt")
    (out / f"rank-{world.rank}.json").write_text(json.dumps(report))


def main() -> None:
    torch.set_num_threads(1)
    world = World.join(timeout_s=60)
    scenarios = {1: (*SCENARIOS, "budget-and-hundreds"), 2: SCENARIOS + ONLY_TWO, 4: ADVERSARIAL}[world.size]
    scenarios = tuple(sys.argv[3:]) or scenarios
    for scenario in scenarios:
        run(scenario, Path(sys.argv[1]), Path(sys.argv[2]) / scenario, world)
        world.agree("end of a scenario", 0)
    world.leave()


if __name__ == "__main__":
    main()
