"""Makes the start policy of the quickstart: a two-layer Llama of width 64 over the 48 words of the `lookup` task.

    python examples/quickstart/make_model.py OUT_DIR [--seed N]

The model is pretrained for some seconds on scripted dialogues: right ones first, then sloppy ones, in which many keys
and sums are wrong. The policy that comes out keeps to the format and is right in about a third of all episodes; which
of its habits are worth keeping is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sao.envs.lookup import LETTERS, NUMBERS, WORDS, Lookup, LookupTask, draw

SPECIAL = ("<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
WRONG_CALLS, WRONG_SUMS = 0.2, 0.6  # shares of mistakes in sloppy dialogues
BATCH = 64  # dialogues a step
STEPS, SLOPPY_STEPS = 440, 80  # steps in all, and the last ones with sloppy dialogues
LEARNING_RATE = 5e-3


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, split at white space; `<end>` ends every message and every turn."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=list(SPECIAL[3:]),
        model_max_length=128,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: 2 layers, width 64, 4 heads, about 0.1 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
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


def dialogue(task: LookupTask, rng: random.Random, sloppy: bool) -> str:
    """A rendered demonstration, with mistakes of the two kinds that `sloppy` asks for: a wrong key, a wrong sum."""
    call, observation, answer = task.call, task.observation, task.answer
    if sloppy and rng.random() < WRONG_CALLS:
        wrong, value = f"{rng.choice(LETTERS)} {rng.choice(LETTERS)}", rng.randrange(7)
        call, observation, answer = f"get {wrong}", f"{wrong} {value}", f"say {value + task.operand}"
    if sloppy and rng.random() < WRONG_SUMS:
        answer = f"say {rng.choice(NUMBERS)}"
    turns = [("user", task.question), ("assistant", call), ("tool", observation), ("assistant", answer)]
    return "".join(f"<{role}>{content}<end>" for role, content in turns)


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised steps on what the assistant says: right dialogues first, sloppy ones at the end."""
    rng = random.Random(seed)
    texts = [
        dialogue(draw(rng.getrandbits(62), "train"), rng, sloppy=step >= STEPS - SLOPPY_STEPS)
        for step in range(STEPS)
        for _ in range(BATCH)
    ]
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    mark = ids == tokenizer.convert_tokens_to_ids("<assistant>")
    said, turn = torch.zeros_like(mark), mark
    for _ in range(4):  # a turn is at most four tokens, <end> included
        turn = torch.nn.functional.pad(turn & (ids != tokenizer.eos_token_id), (1, -1))
        said |= turn
    labels = ids.masked_fill(~said, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    model.train()
    for step in track(range(STEPS), description="pretraining"):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def success_rate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, episodes: int, seed: int, split: str = "eval"
) -> float:
    """Mean reward of sampled episodes (temperature 1) on tasks of a split, played through the environment itself."""
    envs = [Lookup() for _ in range(episodes)]
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    chats = [asyncio.run(env.reset(rng.getrandbits(62), split)) for env in envs]
    texts = [
        tokenizer.apply_chat_template([m.as_dict() for m in c], tokenize=False, add_generation_prompt=True)
        for c in chats
    ]
    rewards: dict[int, float] = {}
    while len(rewards) < episodes:
        alive = [i for i in range(episodes) if i not in rewards]
        for i, said in zip(alive, _sample(model, tokenizer, [texts[i] for i in alive], generator), strict=True):
            result = asyncio.run(envs[i].step(said))
            if result.done:
                rewards[i] = float(result.reward or 0.0)
            else:
                texts[i] += f"{said}<end><tool>{result.messages[0].content}<end><assistant>"
    return sum(rewards.values()) / episodes


def _sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], generator: torch.Generator
) -> list[str]:
    """One sampled turn for each text, at most 8 tokens, without the stop token."""
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(p) for p in [*prompts, [0] * (max(map(len, prompts)) + 8)]], True
    )[:-1]
    ends = torch.tensor([len(p) for p in prompts])
    rows = torch.arange(len(prompts))
    said: list[list[int]] = [[] for _ in prompts]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(8):
        logits = model(input_ids=ids[:, : int(ends.max())]).logits[rows, ends - 1]
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        done |= token == tokenizer.eos_token_id
        if done.all():
            break
        for i in (~done).nonzero()[:, 0].tolist():
            said[i].append(int(token[i]))
        ids[rows, ends] = torch.where(done, ids[rows, ends], token)
        ends += (~done).long()
    return [tokenizer.decode(s) for s in said]


def main() -> None:
    """Builds, pretrains, measures and saves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    pretrain(model, tokenizer, args.seed)
    rate = success_rate(model, tokenizer, episodes=512, seed=args.seed)
    if not 0.20 <= rate <= 0.45:
        raise SystemExit(f"start policy solves {rate:.0%} of held-out tasks, expected 20 % to 45 %; try another --seed")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters; start policy solves {rate:.0%} of 512 held-out tasks")


if __name__ == "__main__":
    main()
