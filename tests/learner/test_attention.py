"""Which attention is chosen, and that each keeps the segments of a row apart by the same rule."""

import numpy as np
import pytest
import torch
from learner.rollouts import make_config, random_batch
from torch.nn.attention.flex_attention import create_mask

from sao.errors import ConfigError
from sao.learner import attention
from sao.learner.attention import FLASH, FLEX, SDPA, choose, mask
from sao.learner.batch import flatten, micro_batches
from sao.learner.layout import Layout
from sao.learner.plan import plan_segments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_cpu_has_one_and_says_so(tiny_model):
    assert choose(make_config(tiny_model), CPU) == SDPA
    for kind in (FLEX, FLASH):
        config = make_config(tiny_model, model__attention=kind, model__dtype="bfloat16")
        with pytest.raises(ConfigError, match=rf"model\.attention: {kind} is not available on cpu; available: sdpa"):
            choose(config, CPU)


def test_a_gpu_gets_the_best_that_is_installed_and_fits(tiny_model, monkeypatch):
    for installed, dtype, deterministic, expected in [
        (True, "bfloat16", False, FLASH),
        (True, "float32", False, FLEX),
        (False, "bfloat16", False, FLEX),
        (True, "bfloat16", True, SDPA),
    ]:
        spec = object() if installed else None
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name, spec=spec: spec)
        config = make_config(tiny_model, model__dtype=dtype, learner__deterministic=deterministic)
        assert choose(config, GPU) == expected


def test_block_mask_and_matrix_are_the_same_rule():
    owners = torch.tensor([[0] * 130 + [1] * 50 + [-1] * 20, [2] * 200])
    blocks = mask(owners, FLEX)
    assert tuple(blocks.shape) == (2, 1, 200, 200)
    whole = create_mask(blocks.mask_mod, 2, 1, 200, 200, device="cpu")
    assert torch.equal(whole, mask(owners, SDPA))


def test_for_flash_attention_a_micro_batch_is_one_row_of_restarting_positions():
    batch = flatten(random_batch(3, 9), 0)
    plan = plan_segments(batch.lengths, 2, 64, 2)
    for rank in range(2):
        rows = micro_batches(batch, plan, rank, CPU)
        flat = micro_batches(batch, plan, rank, CPU, Layout("positions", FLASH))
        assert len(rows) == len(flat) > 1
        for one, other in zip(rows, flat, strict=True):
            assert "attention_mask" not in other.inputs and other.token_ids.shape == (1, one.all_flat.numel() or 1)
            for part in (one, other):  # the same tokens, each with its own position and its own state before
                ids = batch.token_ids[part.all_flat.numpy()]
                assert (part.token_ids[part.all_rows, part.all_columns].numpy() == ids).all()
                assert (part.action_ids.numpy() == batch.token_ids[part.flat.numpy()]).all()
            assert set(one.flat.tolist()) == set(other.flat.tolist())
            starts = np.flatnonzero(other.inputs["position_ids"][0].numpy() == 0)
            assert len(starts) == len(set(batch.segment_of_token[one.all_flat.numpy()])) or one.all_flat.numel() == 0
            before = other.inputs["position_ids"][0, other.state_columns]
            within = batch.segment_offsets[batch.segment_of_token[other.flat.numpy()]]
            assert (before.numpy() == other.flat.numpy() - within - 1).all()
