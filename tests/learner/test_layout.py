"""Which layout a model gets, what is refused, and rows of one segment: little padding, equal on all ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner.architectures import LONGROPE, make
from learner.rollouts import make_config, make_segment, make_trajectory
from learner.test_plan import TINY, heavy_tailed, positions_and_pairs
from tiny_model import make_folder, make_model

from sao.errors import ConfigError
from sao.learner.attention import FLEX
from sao.learner.batch import flatten, micro_batches
from sao.learner.layout import Layout, find_layout
from sao.learner.model import load_policy
from sao.learner.plan import plan_segments
from sao.learner.world import World

CPU = torch.device("cpu")


# -- what is found


def test_full_attention_is_packed_under_one_mask():
    assert find_layout(make_model(), 64, "model") == Layout("masked")


@pytest.mark.parametrize("context, rows", [(8, "masked"), (9, "positions")])
def test_a_window_gets_masks_of_its_own_if_the_context_is_longer(context, rows):
    assert find_layout(make("mistral"), context, "model").rows == rows


def test_a_model_that_ignores_restarting_positions_holds_one_segment_a_row():
    lm = make("gpt2")
    assert find_layout(lm, 64, "model").rows == "masked"
    forward = lm.base_model.forward
    lm.base_model.forward = lambda input_ids=None, **rest: forward(input_ids, **{**rest, "position_ids": None})
    assert find_layout(lm, 64, "model").rows == "single"


def test_a_model_that_ignores_masks_holds_one_segment_a_row():
    lm = make_model()
    forward, whole = lm.base_model.forward, torch.arange(256)[None]

    def blind(**arguments):  # positions of one long sequence too, or they would still mark the cut
        positions = whole[:, : arguments["input_ids"].shape[1]]
        return forward(**{**arguments, "position_ids": positions, "attention_mask": None})

    lm.base_model.forward = blind
    assert find_layout(lm, 64, "model").rows == "single"


def test_a_model_that_sees_what_comes_later_is_refused():
    lm = make_model()
    forward = lm.base_model.forward

    def mean(**arguments):
        output = forward(**arguments)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    lm.base_model.forward = mean
    with pytest.raises(
        ConfigError, match=r"model\.path: model: LlamaForCausalLM scores a segment in a batch otherwise"
    ):
        find_layout(lm, 64, "model")


def test_what_is_behind_the_backbone_is_checked_too():
    lm = make_model()
    other = make_model(seed=1).base_model
    lm.forward = lambda input_ids, **rest: type("Output", (), {"logits": lm.lm_head(other(input_ids)[0])})
    with pytest.raises(ConfigError, match="otherwise than alone"):
        find_layout(lm, 64, "model")


def test_two_models_share_what_is_exact_for_both():
    window = Layout("positions", scalings=(("longrope", 24),))
    assert window.both(window) == window
    assert Layout("masked").both(window) == Layout("single", scalings=(("longrope", 24),))
    assert Layout("masked").both(Layout("masked", FLEX)).rows == "single"


# -- scaled positions


def test_segments_that_are_scaled_differently_never_share_a_micro_batch():
    lengths = np.array([5, 30, 24, 25, 40, 30, 9])
    assert Layout().apart(lengths).tolist() == [0] * 7
    assert Layout(scalings=(("longrope", 24),)).apart(lengths).tolist() == [0, 1, 0, 1, 1, 1, 0]
    assert Layout(scalings=(("dynamic", 24),)).apart(lengths).tolist() == [0, 2, 0, 1, 3, 2, 0]
    for rows in ("masked", "single"):
        layout = Layout(rows, scalings=(("dynamic", 24),))
        plan = plan_segments(lengths, 2, 64, 4, layout=layout)
        for index in range(plan.n_micro_batches):
            assert len(set(layout.apart(lengths)[plan.micro_batch == index])) == 1


ROPES = {"longrope": LONGROPE, "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}


def test_for_vllm_longrope_is_scaled_as_the_context_in_use_is(tmp_path):
    """vLLM takes the long factors for every sequence if its context is long, and the short ones if it is not."""
    ropes = {"rope_parameters": LONGROPE, "max_position_embeddings": 256}
    folder = make_folder(tmp_path, **ropes)
    ids = torch.arange(3, 23)[None]
    for context, pretended in ((64, 256), (24, 24)):
        config = make_config(
            folder, generator__engine="vllm", sampling__context_tokens=context, sampling__max_response_tokens=8
        )
        policy = load_policy(config, World.alone())
        assert policy.layout == Layout("masked", scalings=(("longrope", 24),) if context == 24 else ())
        plain = make_model(**ropes).double()
        if pretended > 24:
            plain.base_model.rotary_emb(torch.zeros(1), torch.tensor([[pretended]]))  # now it holds the long ones
            plain.base_model.rotary_emb.rope_type = "default"
        with torch.no_grad():
            torch.testing.assert_close(policy.lm(ids).logits, plain(ids).logits)


def test_dynamic_scaling_beyond_its_range_is_refused_for_vllm(tmp_path):
    folder = make_folder(tmp_path, rope_parameters=ROPES["dynamic"], max_position_embeddings=24)
    with pytest.raises(ConfigError, match=r"vllm scales positions .* use sampling.context_tokens = 24 at most"):
        load_policy(make_config(folder, generator__engine="vllm"), World.alone())
    layout = load_policy(make_config(folder), World.alone()).layout
    assert layout == Layout("masked", scalings=(("dynamic", 24),))


# -- rows of one segment


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 5),
    linear=st.sampled_from([1.0, TINY, 24576.0]),
)
def test_every_segment_has_a_row_within_the_bound(lengths, ranks, rows, linear):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_segments(lengths, ranks, 300, rows, linear, layout=Layout("single"))
    assert not plan.position.any() and plan.rank.max() < ranks
    places = list(zip(plan.rank.tolist(), plan.micro_batch.tolist(), plan.row.tolist(), strict=True))
    assert len(set(places)) == len(lengths)
    assert set(plan.micro_batch.tolist()) == set(range(plan.n_micro_batches))
    for step in range(plan.n_micro_batches):
        for rank in range(ranks):
            here = lengths[(plan.micro_batch == step) & (plan.rank == rank)]
            assert len(here) * max(here, default=0) <= 300 * rows


@pytest.mark.parametrize("ranks", [1, 4])
def test_little_of_it_is_padding(ranks):
    for seed in range(5):
        lengths = heavy_tailed(seed, n=400)
        plan = plan_segments(lengths, ranks, 1024, 4, layout=Layout("single"))
        assert positions_and_pairs(lengths, plan, ranks)[0] < 1.12 * lengths.sum()


def test_a_plan_depends_on_its_input_alone_and_the_hash_sees_every_change():
    lengths, single = heavy_tailed(0), Layout("single")
    hashes = [plan_segments(each, 2, 1024, 4, layout=single).hash for each in (lengths, lengths.copy())]
    assert hashes[0] == hashes[1]
    others = [plan_segments(np.roll(lengths, 1), 2, 1024, 4, layout=single)]
    others += [plan_segments(lengths, 4, 1024, 4, layout=single), plan_segments(lengths, 2, 1024, 4)]
    assert len({hashes[0], *(other.hash for other in others)}) == 4


def test_a_row_of_one_segment_is_ids_alone():
    rng = np.random.default_rng(0)
    batch = flatten([make_trajectory(rng, [make_segment(rng, [(3, 2)]), make_segment(rng, [(2, 1)])])], 0)
    plan = plan_segments(batch.lengths, 3, 64, 4, layout=Layout("single"))
    parts = [part for rank in range(3) for part in micro_batches(batch, plan, rank, CPU, Layout("single"))]
    assert all(part.inputs.keys() == {"input_ids"} for part in parts)
    for part in parts:
        assert (part.token_ids[part.all_rows, part.all_columns].numpy() == batch.token_ids[part.all_flat.numpy()]).all()
