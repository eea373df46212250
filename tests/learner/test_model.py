"""Policy and critic: packed segments never meet, heads see chosen positions only, the right parts are frozen."""

import numpy as np
import pytest
import torch
from learner.rollouts import make_config, make_segment, make_trajectory, random_batch
from tiny_model import make_folder, make_model
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sao.errors import ConfigError, ValidationError
from sao.learner.batch import flatten, micro_batches
from sao.learner.model import Critic, Policy, freeze_attention, head_of, load_critic, load_policy
from sao.learner.plan import plan_segments
from sao.learner.step import Learner
from sao.learner.world import World

ALONE = World.alone()


def one_batch(trajectories, row_tokens=64, rows=64, cut=None):
    batch = flatten(trajectories, 0)
    plan = plan_segments(batch.lengths, 1, row_tokens, rows)
    return micro_batches(batch, cut(plan) if cut else plan, 0, ALONE.device)


def in_one_row(lengths):
    """A plan that puts all segments into one row."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    zeros = np.zeros(len(lengths), dtype=int)
    fields = {"rank": zeros, "micro_batch": zeros, "row": zeros, "position": starts, "n_micro_batches": 1, "hash": 0}
    return lambda _: type("Plan", (), fields)


@pytest.fixture(scope="module")
def models():
    critic = Critic(make_model(seed=1).base_model)
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return {"policy": Policy(make_model()), "critic": critic}


def run(model, part):
    with torch.no_grad():
        if isinstance(model, Critic):
            return model(part, part.state_rows, part.state_columns)
        return model(part)[0]


def logits(policy, part):
    """Of the states that predict the action tokens."""
    with torch.no_grad():
        output = policy.lm.base_model(**part.inputs, use_cache=False)
        return head_of(policy.lm, output, output.last_hidden_state[part.state_rows, part.state_columns])


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_packed_segments_equal_themselves_alone_and_never_see_each_other(models, name):
    rng = np.random.default_rng(0)
    segments = [make_segment(rng, [(4, 5)]), make_segment(rng, [(3, 2), (2, 4)]), make_segment(rng, [(6, 3)])]
    lengths = [segment.n_tokens for segment in segments]
    alone = [run(models[name], one_batch([make_trajectory(rng, [segment])])[0]) for segment in segments]
    packed = run(models[name], one_batch([make_trajectory(rng, segments)], cut=in_one_row(lengths))[0])
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)

    for changed in range(3):
        ids = segments[changed].token_ids.copy()
        ids[0] = 3 + (ids[0] - 2) % 45
        other = list(segments)
        other[changed] = type(segments[changed])(
            kind="execution",
            token_ids=ids,
            action_mask=segments[changed].action_mask,
            logprobs=segments[changed].logprobs,
            version_spans=segments[changed].version_spans,
        )
        again = run(models[name], one_batch([make_trajectory(rng, other)], cut=in_one_row(lengths))[0])
        counts = [segment.n_actions for segment in segments]
        for index, (before, after) in enumerate(zip(packed.split(counts), again.split(counts), strict=True)):
            assert torch.equal(before, after) == (index != changed)


def test_chosen_logits_are_those_of_the_whole_model(models):
    (part,) = one_batch(random_batch(5, 6))
    lm = models["policy"].lm
    with torch.no_grad():
        whole = lm(**part.inputs).logits
    torch.testing.assert_close(logits(models["policy"], part), whole[part.state_rows, part.state_columns])
    assert whole.shape[:2] == part.token_ids.shape  # outside the wrapper the head is an ordinary head


def test_what_a_model_does_to_its_logits_after_the_head_is_kept():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.01, attn_implementation="sdpa",
    )  # fmt: skip
    lm = Gemma2ForCausalLM(config)
    (part,) = one_batch(random_batch(5, 4))
    assert 0 < float(logits(Policy(lm), part).abs().max()) <= 0.01


def test_attention_is_frozen_and_nothing_else(tiny_model):
    critic = load_critic(make_config(tiny_model, model__dtype="float32"), ALONE)
    frozen = {name for name, parameter in critic.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == 8 and all(".self_attn." in name for name in frozen)
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {"head.weight", "head.bias", "backbone.embed_tokens.weight", "backbone.norm.weight"} <= trained
    assert {f"backbone.layers.{n}.post_attention_layernorm.weight" for n in (0, 1)} <= trained
    free = load_critic(make_config(tiny_model, learner__critic_frozen="none"), ALONE)
    assert all(parameter.requires_grad for parameter in free.parameters())


MOE = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
}


@pytest.mark.parametrize("kind", MOE)
def test_of_a_mixture_of_experts_the_critics_attention_stays_and_its_experts_learn(tmp_path, kind):
    """Found by kind of module; a frozen tensor has no gradient and not one other bit after a step."""
    config, model, settings = MOE[kind]
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None}
    model(config(vocab_size=48, eos_token_id=2, max_position_embeddings=256, **shape, **settings)).save_pretrained(
        tmp_path
    )
    learner = Learner(make_config(tmp_path, model__dtype="float32"))
    learner.critic.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: parameter.detach().clone() for name, parameter in learner.critic.named_parameters()}
    policy = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    learner.optimizers["critic"].adam.zero_grad = lambda: None  # so that the last gradients can be looked at
    result = learner.step(random_batch(0, 8))
    assert result.skipped is None
    for name, parameter in learner.critic.named_parameters():
        frozen = ".self_attn." in name
        assert parameter.requires_grad != frozen and (parameter.grad is None) == frozen, name
        assert torch.equal(before[name], parameter) == frozen, name
    assert any("experts" in name for name in before) and any(".gate." in name for name in before)
    assert all(not torch.equal(policy[name], parameter) for name, parameter in learner.policy.named_parameters())


def test_token_mixers_of_other_kinds_are_found():
    module = torch.nn.Module()
    kinds = {
        "linear_attn": "Linear",
        "mamba": "Linear",
        "x": "FooGatedDeltaNet",
        "y": "MambaMixer",
        "z": "BarAttention",
    }
    for name, kind in kinds.items():
        module.add_module(name, type(kind, (torch.nn.Linear,), {})(2, 2))
    for name in ("mlp", "input_layernorm", "post_attention_layernorm", "experts"):
        module.add_module(name, torch.nn.Linear(2, 2))
    assert freeze_attention(module) == sorted(f"{name}.{part}" for name in kinds for part in ("weight", "bias"))


@pytest.mark.parametrize("kind", ["NemotronHMLP", "NemotronHMoE", "FooExperts"])
def test_feed_forward_layers_that_are_named_mixer_are_trained(kind):
    """Some hybrids have one layer a block and call it `mixer`, whatever it is."""
    module = torch.nn.Module()
    for name, layer in (("0", "FooMamba2Mixer"), ("1", kind)):
        block = torch.nn.Module()
        block.add_module("mixer", type(layer, (torch.nn.Linear,), {})(2, 2))
        module.add_module(name, block)
    assert freeze_attention(module) == ["0.mixer.bias", "0.mixer.weight"]


def test_the_critic_starts_as_the_policy_with_a_zero_head(tiny_model):
    critic = load_critic(make_config(tiny_model, model__dtype="float32"), ALONE)
    policy = load_policy(make_config(tiny_model, model__dtype="float32"), ALONE)
    backbone = policy.lm.base_model.state_dict()
    assert all(torch.equal(backbone[name], tensor) for name, tensor in critic.backbone.state_dict().items())
    (part,) = one_batch(random_batch(0, 3))
    assert run(critic, part).tolist() == [0.0] * part.flat.numel()


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_policy(make_config(tmp_path / "nowhere"), ALONE)
    assert make_config(make_folder(tmp_path / "model")).model.path == str(tmp_path / "model")


def test_a_segment_never_begins_with_a_sampled_token():
    """The state before the first action token must exist: the position k - 1 is in the same segment."""
    from sao.trajectory import SegmentBuilder

    builder = SegmentBuilder("execution")
    with pytest.raises(ValidationError):
        builder.append_sampled(np.array([1], np.int32), np.array([-1.0], np.float32), np.array([[0, 1, 0]]))
        builder.build()
