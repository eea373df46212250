"""Tiny random models of transformers' causal architectures, and what is checked of each; also by a script of `bench/`.

Two to four layers; windows, chunks and sparse selections of 8 positions, scaled positions from 24 on. One line a model:
its type in transformers' registry (what follows a blank is only a name), and what makes it tiny beyond `COMMON`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner.oracle import Oracle
from learner.rollouts import make_config, make_segment, make_trajectory
from transformers import AutoConfig, AutoModelForCausalLM

from sao.learner.batch import Batch, flatten, micro_batches
from sao.learner.layout import Layout, find_layout
from sao.learner.model import Policy
from sao.learner.plan import plan_segments
from sao.learner.step import Learner

COMMON: dict[str, Any] = {
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"head_dim": 8, "num_key_value_heads": 2}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
LAYERED = {"vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 8}
WINDOW = {"sliding_window": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TWO = [SLIDING, FULL]
SHARED = {"layer_types": TWO * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 1, "laurel_rank": 8}
SHARED |= {"activation_sparsity_pattern": [0.0] * 4}

TINY: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | WINDOW | {"layer_types": TWO, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "axk1": EXPERTS | LATENT | GROUPS,
    "axk2": EXPERTS | LATENT | SPARSE | {"gated_norm_rank": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 2},
    "codegen": {"num_attention_heads": 4, "rotary_dim": 4, "n_ctx": 256},
    "cohere": {},
    "cohere2": WINDOW | {"layer_types": TWO},
    "cwm": WINDOW | {"layer_types": TWO},
    "deepseek_v2": EXPERTS | LATENT | GROUPS | {"topk_method": "greedy"},
    "deepseek_v3": EXPERTS | LATENT | GROUPS,
    "deepseek_v32": EXPERTS | LATENT | GROUPS | SPARSE,
    "deepseek_v4": EXPERTS | SPARSE | WINDOW | {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2},
    "diffllama": {"num_key_value_heads": 2},
    "doge": {},
    "dots1": EXPERTS | GROUPS,
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS,
    "exaone4": WINDOW | {"layer_types": TWO},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW | {"layer_types": TWO},
    "gemma3n_text": WINDOW | LAYERED | SHARED,
    "gemma4_text": WINDOW | LAYERED | {"layer_types": TWO},
    "glm": {},
    "glm4": {},
    "glm4_moe": EXPERTS | GROUPS,
    "glm4_moe_lite": EXPERTS | LATENT | GROUPS,
    "glm_moe_dsa": EXPERTS | LATENT | GROUPS | SPARSE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_neox": {},
    "gpt_oss": EXPERTS | WINDOW | {"layer_types": TWO},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 256},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoehybrid": EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": [2, 2]},
    "hy_v3": EXPERTS,
    "jamba": EXPERTS | {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
    "jetmoe": EXPERTS | {"kv_channels": 16},
    "kimi_linear": EXPERTS | LATENT | {"linear_head_dim": 8, "linear_num_heads": 2, "layer_types": [LINEAR, FULL]},
    "lfm2": {"layer_types": ["conv", FULL]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "llama": {},
    "llama dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 24},
    "llama4_text": EXPERTS | {"attention_chunk_size": 8, "layer_types": ["chunked_attention", FULL]},
    "longcat_flash": EXPERTS
    | LATENT
    | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 2, "moe_topk": 2, "zero_expert_num": 2},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "minicpm3": LATENT,
    "minimax": EXPERTS | {"layer_types": [LINEAR, FULL], "block_size": 8},
    "minimax_m2": EXPERTS,
    "ministral": WINDOW,
    "ministral3": WINDOW,
    "mimo_v2_flash": EXPERTS | WINDOW | {"layer_types": TWO},
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "modernbert-decoder": WINDOW,
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 256},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": EXPERTS
    | {
        **{"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW | {"layer_types": TWO},
    "olmo_hybrid": DELTA | {"layer_types": [LINEAR, FULL]},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phi3 longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24},
    "phimoe": EXPERTS,
    "qwen2": WINDOW | {"use_sliding_window": True, "layer_types": TWO},
    "qwen2_moe": EXPERTS,
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | DELTA | {"layer_types": [LINEAR, FULL]},
    "qwen3_5_text": DELTA | {"layer_types": [LINEAR, FULL]},
    "qwen3_5_moe_text": EXPERTS | DELTA | {"layer_types": [LINEAR, FULL]},
    "recurrent_gemma": {"attention_window_size": 8, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": EXPERTS,
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": WINDOW | {"layer_types": TWO},
    "xlstm": {},
    "youtu": LATENT,
    "zamba": {"mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "hrm_text": {"prefix_lm": False},
    "exaone_moe": EXPERTS | WINDOW | {"layer_types": TWO},
    "granite_swa": WINDOW,
    "jais2": {},
    "mellum": EXPERTS | WINDOW | {"layer_types": TWO},
    "laguna": EXPERTS | WINDOW | {"layer_types": TWO},
    "inkling_text": EXPERTS
    | {
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
    },
    "hy_v4": EXPERTS | LATENT | SPARSE,
    "minimax_m3_vl_text": EXPERTS,
    "cohere2_moe": EXPERTS | WINDOW | {"layer_types": TWO},
}


CONTEXT = 64


def make(kind: str) -> Any:
    """A random model of an architecture of `TINY`, float32, in eval mode; also where its own beginning is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind.partition(" ")[0], **COMMON | TINY[kind])
        lm = AutoModelForCausalLM.from_config(config).eval()
        for parameter in lm.parameters():
            if parameter.ndim > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
        return lm


def ragged(seed: int) -> list[Any]:
    """Rollouts of 3 to 61 tokens, most of them short: below and above every length at which a model changes."""
    rng = np.random.default_rng(seed)
    turns = [[(20, 30)], [(2, 3), (3, 2)], [(4, 5)], [(1, 2)], [(25, 9), (7, 20)], [(6, 20)], [(12, 12)], [(3, 6)]]
    segments = [make_segment(rng, turn) for turn in turns]
    rollouts = [[segments[0]], [segments[1], segments[2]], [segments[3]], [segments[4]], segments[5:7], [segments[7]]]
    rewards = [1.0, 0.0, 1.0, 0.0, 0.5, 1.0]
    return [make_trajectory(rng, one, reward=r) for one, r in zip(rollouts, rewards, strict=True)]


def check(kind: str) -> tuple[Layout, float, float]:
    """Layout; largest distance of float32 log-probs from those alone; largest of gradients from the float64 reference.

    The reference scores one segment at a time with `model(input_ids)`. Gradients are of the sum of weighted log-probs,
    relative to the largest one.
    """
    lm = make(kind)
    layout, batch = find_layout(lm, CONTEXT, kind), flatten(ragged(0), 0)
    chosen = np.flatnonzero(batch.action_mask)
    with torch.no_grad():
        gap = float((in_rows(Policy(lm, layout), batch)[chosen] - alone(lm, batch)[chosen]).abs().max())
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(len(chosen)))
    lm.set_experts_implementation("eager")  # torch multiplies groups in 32 and 16 bits only
    gradients = []
    for score, model in ((in_rows, Policy(copy.deepcopy(lm).double(), layout)), (alone, copy.deepcopy(lm).double())):
        (score(model, batch)[chosen] * weights).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None or b is not None]
    assert pairs and all(a is not None and b is not None for a, b in pairs)
    largest = max(float(b.abs().max()) for _, b in pairs)
    return layout, gap, max(float((a - b).abs().max()) for a, b in pairs) / largest


def in_rows(policy: Policy, batch: Batch) -> torch.Tensor:
    """Log-probs by flat index, as a step computes them."""
    out = torch.zeros(len(batch.token_ids), dtype=torch.float64)
    plan = plan_segments(batch.lengths, 1, CONTEXT, 3, layout=policy.layout)
    for part in micro_batches(batch, plan, 0, torch.device("cpu"), policy.layout):
        out = out.index_put((part.flat,), policy(part)[0].double())
    return out


def alone(lm: Any, batch: Batch) -> torch.Tensor:
    """Log-probs by flat index: of each segment as the only one there is, by a model that has seen no other."""
    out = []
    for begin, end in zip(batch.segment_offsets[:-1], batch.segment_offsets[1:], strict=True):
        forget(lm)
        ids = torch.from_numpy(batch.token_ids[begin:end].astype(np.int64))
        logprobs = lm(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        out += [logprobs.new_zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(out)


def forget(lm: Any) -> None:
    """Undoes what transformers keeps of the longest sequence so far: `dynamic` position scaling."""
    for module in lm.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq, module.max_seq_len_cached = module.original_inv_freq, module.original_max_seq_len


def three_steps(kind: str, folder: Path, first: int = 0) -> dict[str, float]:
    """Largest distances of three steps from the plain float64 reference: losses and norms of gradients, relative;
    parameters, absolute (where a gradient is 0 but for rounding, Adam moves one by its rate in any direction).
    """
    lm = make(kind)
    lm.save_pretrained(folder)
    config = make_config(folder, learner__critic_frozen="none", learner__policy_lr=1e-4, learner__critic_lr=1e-4)
    learner, oracle = Learner(config), Oracle(lm, config)
    for model in (oracle.lm, oracle.backbone):
        model.register_forward_pre_hook(lambda module, _: forget(module))
    found = {"losses": 0.0}
    for number in range(3):
        batch = ragged(first + number)
        expected, got = oracle.step(batch, number), learner.step(batch)
        assert got.version == number + 1 and got.skipped is None
        for name, value in expected.items():
            found["losses"] = max(found["losses"], abs(got.metrics[name] - value) / max(abs(value), 1e-9))
    for name, mine, theirs in (
        ("policy", learner.policy.lm, oracle.lm),
        ("critic", learner.critic.backbone, oracle.backbone),
    ):
        plain = dict(theirs.named_parameters())
        found[name] = max(float((p - plain[n]).abs().max().detach()) for n, p in mine.named_parameters())
    return found
