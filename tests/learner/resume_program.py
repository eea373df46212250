"""Run on each rank by `test_checkpoint.py`: MODEL OUT UNTIL [FOLDER]. Trains, saves, writes the full tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from learner.rollouts import make_config, random_batch
from torch.distributed.tensor import DTensor

from sao.learner.checkpoint import Checkpointer, restore, state_tensors
from sao.learner.step import Learner
from sao.learner.world import World
from sao.storage.checkpoints import newest


def main() -> None:
    model, out, until = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    world = World.join(timeout_s=60)
    learner = Learner(make_config(model, learner__deterministic=True), world)
    torch.manual_seed(world.rank)  # ranks differ, as with dropout
    if len(sys.argv) > 4:
        restore(learner, newest(Path(sys.argv[4]) / "checkpoints")[0])
    saver = Checkpointer(learner, out / "checkpoints")
    while learner.steps < until:
        learner.step(random_batch(learner.steps, 5, long=40))
        torch.rand(3)
        saver.save(1, [(0, 0)])  # every step: the next is made while it is written
    assert saver.finish() is None
    whole = {}
    for name, tensor in state_tensors(learner).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not name.startswith("rng/"):
            whole[name] = full
    for rank in range(world.size):
        state = torch.get_rng_state().to(torch.int64)
        states = [torch.empty_like(state) for _ in range(world.size)]
        if world.size > 1:
            torch.distributed.all_gather(states, state)
        else:
            states = [state]
        whole[f"rng/{rank}"] = states[rank].to(torch.uint8)
    if world.rank == 0:
        torch.save(whole, out / "tensors.pt")
    world.leave()


if __name__ == "__main__":
    main()
