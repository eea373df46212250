"""Which models the torch engine takes: those that its decoder samples from as they score, in the context in use."""

import pytest
from learner.architectures import DYNAMIC, LONGROPE, make
from tiny_model import make_model

from sao.engines.torch_engine import check_decoder
from sao.errors import EngineError

TAKEN = ["llama", "qwen3", "glm4_moe", "gpt2", "olmo2", "gptj"]
REFUSED = ["gemma3_text", "mistral", "gpt_oss", "mamba", "qwen3_next", "lfm2", "nemotron_h", "jamba", "bloom"]


@pytest.mark.parametrize("kind", TAKEN)
def test_full_attention_is_taken(kind):
    check_decoder(make(kind), 64, kind)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_more_than_keys_and_values_is_refused_in_one_line(kind):
    with pytest.raises(EngineError, match="keeps keys and values of full attention only") as error:
        check_decoder(make(kind), 64, "folder")
    assert "model.path: folder" in str(error.value) and "generator.engine = 'vllm'" in str(error.value)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_window_that_the_context_does_not_exceed_is_none(kind):
    check_decoder(make(kind), 8, kind)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_scaling_that_changes_while_a_sequence_grows_is_refused_beyond_its_beginning(rope):
    model = make_model(rope_parameters=rope, max_position_embeddings=24 if rope is DYNAMIC else 256)
    check_decoder(model, 24, "folder")
    with pytest.raises(EngineError, match=r"model\.path: folder: (longrope|dynamic) .*context_tokens = 24 at most"):
        check_decoder(model, 25, "folder")
