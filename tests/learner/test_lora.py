"""LoRA in the learner: two adapters on one frozen base, which stays; what is published is what is trained."""

import pytest
import torch
from learner.ranks import run_ranks
from learner.rollouts import make_config, random_batch
from safetensors.torch import load_file

from sao.errors import ConfigError, WeightsError
from sao.learner import lora
from sao.learner.checkpoint import Checkpointer, republish, restore
from sao.learner.export import full_tensors, write_critic
from sao.learner.model import load_policy
from sao.learner.step import Learner
from sao.learner.world import World
from sao.storage import adapter_folder, checkpoints, model_folder

ALONE = World.alone()


def make(model, dtype="float32", **values):
    return Learner(make_config(model, model__dtype=dtype, lora__rank=4, **values), ALONE)


def trained(model, steps=2, **values):
    learner = make(model, **values)
    for number in range(steps):
        assert learner.step(random_batch(number, 8)).skipped is None
    return learner


def base_of(learner):
    held = learner.policy.lm.state_dict()
    return {name: tensor.clone() for name, tensor in held.items() if lora.part_of(name) is None}


def factors(learner, part):
    named = dict(learner.policy.lm.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in named.items() if lora.part_of(name) == part}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_stays_and_both_adapters_move(tiny_model, dtype):
    learner = make(tiny_model, dtype=dtype)
    base, before = base_of(learner), {part: factors(learner, part) for part in lora.PARTS}
    for number in range(2):
        learner.step(random_batch(number, 8))
    after = base_of(learner)
    assert base.keys() == after.keys() and all(torch.equal(base[name], after[name]) for name in base)
    assert {str(tensor.dtype) for name, tensor in learner.policy.lm.named_parameters() if not lora.part_of(name)} == {
        f"torch.{dtype}"
    }
    for part in lora.PARTS:
        moved = factors(learner, part)
        assert all(tensor.dtype == torch.float32 for tensor in moved.values())
        assert all(not torch.equal(before[part][name], moved[name]) for name in moved)


def test_a_start_is_the_base_to_the_bit(tiny_model):
    learner, plain = make(tiny_model), load_policy(make_config(tiny_model, model__dtype="float32"), ALONE)
    assert all(
        torch.equal(tensor, full_tensors(plain.lm, "float32", ALONE)[name])
        for name, tensor in full_tensors(learner.policy.lm, "float32", ALONE).items()
    )


def test_there_is_one_copy_of_the_base(tiny_model):
    learner = make(tiny_model)
    assert learner.critic.backbone is learner.policy.lm.model
    assert not set(learner.policy.trained()) & set(learner.critic.trained())
    frozen = [name for name in factors(learner, "critic") if "self_attn" in name]
    assert not frozen and any("self_attn" in name for name in factors(learner, "policy"))
    everywhere = make(tiny_model, learner__critic_frozen="none")
    assert factors(everywhere, "critic").keys() == {
        name.replace("policy_", "critic_") for name in factors(everywhere, "policy")
    }
    assert all(".layers." in name for name in factors(everywhere, "policy"))  # neither embedding nor head


def test_turns_give_the_same_bits_and_nothing_of_the_critic_reaches_the_policy(tiny_model):
    learner = trained(tiny_model)
    [part] = learner._lay_out(random_batch(7, 4)).micro[:1]
    with torch.no_grad():
        first = learner.policy(part)[0]
        values = learner.critic(part, part.state_rows, part.state_columns)
        assert torch.equal(learner.policy(part)[0], first)
        assert torch.equal(learner.critic(part, part.state_rows, part.state_columns), values)
        for name, parameter in learner.critic.trained().items():
            parameter.fill_(float("nan") if "head" not in name else 1.0)
        assert torch.equal(learner.policy(part)[0], first)
        assert learner.critic(part, part.state_rows, part.state_columns).isnan().all()


def test_merged_is_unmerged(tiny_model, tmp_path):
    learner = trained(tiny_model, steps=3)
    [part] = learner._lay_out(random_batch(7, 4)).micro[:1]
    merged = load_policy(make_config(tiny_model, model__dtype="float32"), ALONE)
    start = merged(part)[0].detach()
    merged.lm.load_state_dict(full_tensors(learner.policy.lm, "float32", ALONE), strict=False)
    with torch.no_grad():
        expected = learner.policy(part)[0]
        assert float((expected - start).abs().max()) > 1e-2  # it has learned something
        torch.testing.assert_close(merged(part)[0], expected, rtol=0, atol=1e-5)


def test_on_a_base_in_16_bits_merged_weights_come_in_32(tiny_model):
    learner = trained(tiny_model, dtype="bfloat16")
    published = full_tensors(learner.policy.lm, learner.config.published_dtype, ALONE)
    name, layer = next(lora.adapted(learner.policy.lm, "policy"))
    delta = layer.scale * (layer.policy_B @ layer.policy_A).detach()
    found = published[f"{name}.weight"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found - layer.weight.float(), delta, rtol=1e-3, atol=1e-6)
    rounded = found.to(torch.bfloat16).float() - layer.weight.float()
    assert (rounded - delta).norm() > 0.02 * delta.norm()  # why


def test_a_checkpoint_holds_adapters_and_goes_on_to_the_bit(tiny_model, tmp_path):
    learner = trained(tiny_model, steps=2)
    saver = Checkpointer(learner, tmp_path)
    assert saver.save(0, []) is None and saver.finish() is None
    [folder] = checkpoints.steps(tmp_path).values()
    saved = checkpoints.read(folder)
    names = {name for name in saved.manifest["tensors"] if name.startswith(("policy/", "critic/"))}
    assert names and all(lora.part_of(name) or "/head." in name for name in names)
    again = make(tiny_model)
    restore(again, saved)
    republish(again, saved)  # compares fingerprints
    one, two = (each.step(random_batch(5, 8)).metrics for each in (learner, again))
    clocks = [name for name in one if name.startswith("time/")]
    assert {**one, **dict.fromkeys(clocks)} == {**two, **dict.fromkeys(clocks)}
    plain = model_folder.load(folder, dtype=torch.float32)  # the checkpoint is the merged model
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not (folder / "critic.safetensors").exists()

    later = make(tiny_model, learner__critic_path=str(folder))
    assert all(
        torch.equal(tensor, dict(later.critic.named_parameters())[name]) for name, tensor in _restored(saved).items()
    )
    with pytest.raises(ConfigError, match="critic's adapter"):
        Learner(make_config(tiny_model, model__dtype="float32", learner__critic_path=str(folder)), ALONE)


def _restored(saved):
    tensors = load_file(saved.path / "critic_adapter" / adapter_folder.WEIGHTS)
    named = {}
    for name, tensor in tensors.items():
        layer, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        named[f"{layer}.critic_{factor}"] = tensor
    return named


def test_a_pretrained_critic_is_an_adapter_and_a_head(tiny_model, tmp_path):
    learner = make(tiny_model, run__task="pretrain_value", algorithm__lambda_policy=1.0)
    learner.step(random_batch(0, 8))
    write_critic(learner.critic, tmp_path / "critic", learner.config, {}, ALONE)
    later = make(tiny_model, learner__critic_path=str(tmp_path / "critic"))
    expected = learner.critic.trained()
    assert later.critic.trained().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in later.critic.trained().items())


def test_a_full_critic_beside_an_adapter(tiny_model):
    learner = trained(tiny_model, lora__critic="full", lora__policy_lr=2e-3)
    assert learner.critic.backbone is not learner.policy.lm.model
    assert not any(map(lora.part_of, learner.critic.trained()))
    assert learner.optimizers["policy"].base_rate == 2e-3 and learner.optimizers["critic"].base_rate == 1e-2


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lora__targets": ["q_proj", "nowhere"]}, "lora.targets: nowhere"),
        ({"lora__targets": ["lm_head"]}, "lora.targets: lm_head"),
        ({"lora__targets": []}, "lora.targets: names no layer"),
        ({"lora__critic": "full", "lora__critic_lr": 1e-3}, "lora.critic_lr: has no effect"),
        ({"lora__rank": 0, "lora__alpha": 8.0}, "lora.alpha: has no effect with lora.rank = 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_model, values, text):
    with pytest.raises(ConfigError, match=text):
        Learner(make_config(tiny_model, **{"lora__rank": 4, **values}), ALONE)


def test_two_ranks_do_exactly_what_one_does(tiny_model, tmp_path):
    found = []
    for ranks in (1, 2):
        run_ranks("learner.ranks_program", ranks, tiny_model, tmp_path / str(ranks), "lora")
        folder = tmp_path / str(ranks) / "lora"
        found.append([torch.load(folder / name, weights_only=True) for name in ("gradients.pt", "tensors.pt")])
    (gradients, tensors), (others, other_tensors) = found
    assert gradients.keys() == others.keys() and any("policy_B" in name for name in gradients)
    for one, two in ((gradients, others), (tensors, other_tensors)):
        for name in one:
            torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-9)


def test_peft_loads_the_adapter_and_scores_the_same(tiny_model, tmp_path):
    peft = pytest.importorskip("peft", reason="the oracle of the file format")
    learner = trained(tiny_model, steps=3)
    own = full_tensors(learner.policy.lm, "float32", ALONE, own="policy")
    lora.write(tmp_path / "adapter", own, "policy", learner.config.lora, str(tiny_model))
    theirs = peft.PeftModel.from_pretrained(model_folder.load(tiny_model, dtype=torch.float32), tmp_path / "adapter")
    ids = torch.arange(3, 33)[None]
    learner.policy(learner._lay_out(random_batch(7, 4)).micro[0])  # the policy's turn
    with torch.no_grad():
        mine, base = learner.policy.lm(ids).logits.log_softmax(-1), learner.policy.lm
        torch.testing.assert_close(theirs(ids).logits.log_softmax(-1), mine, rtol=0, atol=1e-5)
        base.model.layers[0].mlp.up_proj.turn.part = ""
        assert float((base(ids).logits.log_softmax(-1) - mine).abs().max()) > 1e-2


def test_an_adapter_comes_back_from_its_folder(tiny_model, tmp_path):
    learner, other = trained(tiny_model), make(tiny_model)
    own = full_tensors(learner.policy.lm, "float32", ALONE, own="policy")
    lora.write(tmp_path, own, "policy", learner.config.lora, "base")
    lora.read(tmp_path, other.policy.lm, "policy", other.config.lora, "here")
    assert all(torch.equal(own[name], tensor) for name, tensor in factors(other, "policy").items())
    with pytest.raises(WeightsError, match=r"lora_alpha = 32\.0, expected 8\.0"):
        lora.read(tmp_path, other.policy.lm, "policy", other.config.lora.model_copy(update={"alpha": 8.0}), "here")


def test_memory_at_rest_is_one_base_and_16_bytes_a_trained_parameter(tiny_model):
    learner = trained(tiny_model, dtype="bfloat16")
    held = [*learner.policy.lm.parameters(), *learner.critic.parameters()]
    held += [p.grad for p in held if p.grad is not None]
    for optimizer in learner.optimizers.values():
        held += [tensor for state in optimizer.adam.state.values() for tensor in state.values() if tensor.ndim]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    n_trained = sum(p.numel() for optimizer in learner.optimizers.values() for p in optimizer.parameters.values())
    n_base = sum(tensor.numel() for tensor in base_of(learner).values())
    assert sum(storages.values()) <= 2.1 * n_base + 16 * n_trained
