"""Makes the start policy: a two-layer Llama that calls a tool as JSON, often with the wrong argument or not at all.

    python examples/agents/learning/make_model.py OUT_DIR [--seed N]

Its tokenizer is byte-level BPE, and its chat template renders tools and calls. It is pretrained for some seconds on
scripted dialogues, right ones first, then sloppy ones; what is worth keeping is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from rich.progress import track
from shop import COLOURS, INSTRUCTIONS, NUMBERS, THINGS, Shop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
CALL = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<system>' + tool['function']['name'] + '('"
    " + tool['function'].get('parameters', {}).get('properties', {}) | join(', ') + '): '"
    " + tool['function'].get('description', '') + '<end>' }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + (message['content'] or '') }}"
    "{% for call in message.get('tool_calls', []) %}"
    "{{ '<tool_call>' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson)"
    " + '</tool_call>' }}{% endfor %}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "price_of",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
NO_CALLS, WRONG_ITEMS, WRONG_SUMS = 0.35, 0.3, 0.35  # shares of mistakes in sloppy dialogues
BATCH = 64  # dialogues a step
STEPS, SLOPPY_STEPS = 900, 100  # steps in all, and the last ones with sloppy dialogues
LEARNING_RATE = 3e-3
CONTEXT = 192


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, special token and word of the task."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = [f"{before}{word}" for word in (*COLOURS, *THINGS, *map(str, NUMBERS)) for before in ("", " ")]
    call = json.dumps({"name": "price_of", "arguments": {"item": "x"}})
    others = [f"{Shop(0, 'train').question} {INSTRUCTIONS} {call} price_of(item): The price of an item. unknown"]
    core.train_from_iterator(
        [*words, *others] * 2,
        trainers.BpeTrainer(
            vocab_size=2000,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(SPECIAL),
            show_progress=False,
        ),
    )
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: 2 layers, width 64, 4 heads, about 0.2 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def dialogue(shop: Shop, rng: random.Random, sloppy: bool) -> list[dict[str, object]]:
    """A demonstration, with mistakes of the three kinds that `sloppy` asks for: no call, a wrong item, a wrong sum."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": shop.question},
    ]
    answer = shop.answer
    if sloppy and rng.random() < NO_CALLS:
        return [*messages, {"role": "assistant", "content": str(rng.choice(NUMBERS))}]
    wrong = sloppy and rng.random() < WRONG_ITEMS
    item = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}" if wrong else shop.item
    call = {"type": "function", "function": {"name": "price_of", "arguments": {"item": item}}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    price = shop.price_of(item)
    answer = str(int(price) + shop.postage)
    if sloppy and rng.random() < WRONG_SUMS:
        answer = str(rng.choice(NUMBERS))
    return [*messages, {"role": "tool", "content": price}, {"role": "assistant", "content": answer}]


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """Supervised steps on what the assistant says; the last loss."""
    rng = random.Random(seed)
    opens, ends = tokenizer.convert_tokens_to_ids("<assistant>"), tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    model.train()
    for step in track(range(STEPS), description="pretraining"):
        sloppy = step >= STEPS - SLOPPY_STEPS
        chats = [dialogue(Shop(rng.getrandbits(62), "train"), rng, sloppy) for _ in range(BATCH)]
        texts = [str(tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False)) for chat in chats]
        rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        said = torch.zeros_like(ids, dtype=torch.bool)
        speaking = torch.zeros(len(rows), dtype=torch.bool)
        for at in range(ids.shape[1]):
            said[:, at] = speaking
            speaking = (speaking & (ids[:, at] != ends)) | (ids[:, at] == opens)
        loss = model(input_ids=ids, labels=ids.masked_fill(~said, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return float(loss)


def main() -> None:
    """Builds, pretrains and saves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    loss = pretrain(model, tokenizer, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, loss {loss:.3f}")


if __name__ == "__main__":
    main()
