"""Makes a model folder small enough for tests: a random Llama, a word-level tokenizer and a ChatML template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["<unk>", "\n", "system", "user", "assistant", "tool", *"0123456789", *LETTERS, "yes", "no", "!"]


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """48 tokens: one per word of `WORDS`, split at blanks and newlines; <|im_end|> ends a turn."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama: vocabulary 48, 2 layers, width 64, 4 heads over 2 key/value heads, float32."""
    values: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**values, **overrides})).eval()


def make_folder(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes config, safetensors, tokenizer and chat template into `folder`."""
    make_model(seed, **overrides).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
