"""A checkpoint saved between passes without gradients, when FSDP still holds the root's parameters gathered."""

from learner.rollouts import make_config, random_batch
from safetensors.torch import load_file

from sao.learner.checkpoint import Checkpointer, state_tensors
from sao.learner.step import Learner
from sao.learner.world import World


def test_a_save_in_critic_warmup_holds_the_policy(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    world = World.join(tmp_path / "store", timeout_s=60.0)
    try:
        learner = Learner(make_config(tiny_model, learner__critic_warmup_steps=3), world, tmp_path)
        before = {name: tensor.full_tensor().clone() for name, tensor in policy_of(learner).items()}
        saver = Checkpointer(learner, tmp_path / "checkpoints")
        for seed in range(2):
            learner.step(random_batch(seed, 4))
            assert saver.save(0, []) is None
            local = [tensor.to_local() for tensor in policy_of(learner).values()]  # shards, not gathered parameters
            assert all(shard.untyped_storage().nbytes() >= shard.numel() for shard in local)
        assert saver.finish() is None
        saved = load_file(tmp_path / "checkpoints" / "step-2" / "model.safetensors")
        held = {name.removeprefix("policy/lm."): tensor for name, tensor in before.items()}
        for name, tensor in saved.items():
            found = [value for key, value in held.items() if key.endswith(name)]
            assert len(found) == 1 and found[0].equal(tensor), name
    finally:
        world.leave()


def policy_of(learner):
    return {name: tensor for name, tensor in state_tensors(learner).items() if name.startswith("policy/")}
