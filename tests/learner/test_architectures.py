"""Causal architectures of transformers, one tiny random model each: rows give what `model(input_ids)` gives alone."""

import pytest
import torch
from learner.architectures import (
    COMMON,
    CONTEXT,
    DELTA,
    TINY,
    TWO,
    WINDOW,
    alone,
    check,
    in_rows,
    make,
    ragged,
    three_steps,
)
from learner.rollouts import make_config
from transformers import AutoConfig, AutoModelForImageTextToText

from sao.learner.batch import flatten
from sao.learner.model import load_policy
from sao.learner.step import Learner
from sao.learner.world import World

NAMED = {
    "deepseek_v3": "masked",
    "gemma3_text": "positions",
    "gemma4_text": "positions",
    "glm4_moe": "masked",
    "gpt_oss": "single",
    "nemotron_h": "single",
    "qwen3_5_text": "single",
    "qwen3_next": "single",
}


@pytest.mark.parametrize("kind", TINY)
def test_log_probs_and_gradients_are_those_of_each_segment_alone(kind):
    layout, logprobs, gradients = check(kind)
    assert layout.rows == NAMED.get(kind, layout.rows)
    assert logprobs < 1e-5 and gradients < 1e-5


@pytest.mark.parametrize("kind", [*NAMED, "llama dynamic", "phi3 longrope"])
def test_three_steps_equal_the_float64_reference(tmp_path, kind):
    found = three_steps(kind, tmp_path)
    assert found["losses"] < 1e-5 and found["policy"] < 1e-5 and found["critic"] < 1e-5


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
SEEING = {
    "qwen3_5": ("single", DELTA | {"layer_types": ["linear_attention", "full_attention"]}, {}, {}),
    "gemma3": ("positions", WINDOW | {"layer_types": TWO}, {}, {"mm_tokens_per_image": 4}),
    "qwen3_vl": ("masked", {}, {"deepstack_visual_indexes": [0]}, {}),
}


@pytest.mark.parametrize("kind", SEEING)
def test_of_a_model_of_images_and_text_the_text_is_trained(tmp_path, kind):
    rows, text, vision, more = SEEING[kind]
    config = AutoConfig.for_model(kind, text_config=COMMON | text, vision_config=VISION | vision, **more)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    config = make_config(tmp_path, model__dtype="float32", sampling__context_tokens=CONTEXT)
    policy, batch = load_policy(config, World.alone()), flatten(ragged(0), 0)
    assert policy.layout.rows == rows
    with torch.no_grad():
        gap = (in_rows(policy, batch) - alone(whole, batch))[torch.from_numpy(batch.action_mask)].abs().max()
    assert float(gap) < 1e-5
    assert Learner(config).step(ragged(0)).skipped is None


def test_a_router_decides_in_float32_in_bfloat16_passes():
    """As transformers writes it for GLM-4 MoE; nothing of the learner's changes that."""
    lm, seen = make("glm4_moe").bfloat16(), []
    router = next(module for name, module in lm.named_modules() if name.endswith("mlp.gate"))
    router.register_forward_hook(lambda module, inputs, output: seen.append(output))
    lm(input_ids=torch.arange(3, 20)[None])
    logits = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert logits.dtype == torch.float32
