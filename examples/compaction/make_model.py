"""Makes the start policy of the compaction example: a two-layer Llama of width 64 over the words of the `recall` task.

    python examples/compaction/make_model.py OUT_DIR [--seed N]

The model is pretrained for less than a minute on scripted windows: it says `next`, it puts the facts of a kind that was
drawn at random into its first summary, copies them into every later one, and answers from them. Which facts are worth a
place is nothing that a demonstration could teach: that is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sao.config import load
from sao.envs.recall import KINDS, VALUES, WORDS, draw
from sao.runtime.evaluate import evaluate

REQUEST = "<end><user>sum"  # what follows an observation when a summary is due, see summary.txt
RUN_FILE = Path(__file__).parent / "run.toml"
SPECIAL = ("<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SUMMARY_FACTS = 2  # what a summary of three tokens holds, <end> included
BATCH = 32  # windows of each kind, a step
STEPS, SHORT_STEPS = 620, 250  # steps in all, and the first ones with short windows
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
        model_max_length=64,
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
        max_position_embeddings=64,
        tie_word_embeddings=True,  # what is copied comes out as it went in
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def window(opening: str, observations: Sequence[str], last: str) -> str:
    """A rendered window: an opening, a `next` before every observation, and what is said after the last one."""
    steps = "".join(f"next<end><tool>{text}<end><assistant>" for text in observations)
    return f"<user>{opening}<end><assistant>{steps}{last}<end>"


def windows(rng: random.Random, short: bool) -> tuple[str, str, str]:
    """One of each kind: the facts and a first summary; filler and a copied summary; filler, a question, an answer.

    short: with half of the facts and hardly any filler, from which copying is learned several times as fast.
    """
    task = draw(rng.getrandbits(62), "train", filler=6)
    kinds = rng.sample(list(KINDS), 2)
    facts = [fact for fact in task.facts if not short or fact.key in KINDS[kinds[0]] + KINDS[kinds[1]]]
    kept = [fact for fact in facts if fact.key in KINDS[kinds[0]]]
    rng.shuffle(kept)
    summary = " ".join(map(str, kept))
    asked = rng.choice(kept if short or rng.random() < 0.75 else facts)
    answer = asked.value if asked in kept else rng.choice(VALUES)
    filler, question = task.filler, f"ask {asked.key}"
    if short:
        shown, then, last = [" ".join(map(str, facts))], [filler[0].split()[0]], [question]
    else:
        shown, then = [*task.observations[:2], filler[0]], [*filler[1:4]]
        last = [*filler[4 : rng.randint(4, 6)], question]
    shown[-1] += REQUEST
    then[-1] += REQUEST
    return window("begin", shown, summary), window(summary, then, summary), window(summary, last, f"say {answer}")


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised steps on what the assistant says."""
    rng = random.Random(seed)
    mark, end = tokenizer.convert_tokens_to_ids("<assistant>"), tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.7, div_factor=20, anneal_strategy="linear"
    )
    model.train()
    for step in track(range(STEPS), description="pretraining"):
        optimizer.zero_grad()
        for texts in zip(*(windows(rng, step < SHORT_STEPS) for _ in range(BATCH)), strict=True):
            ids = tokenizer(list(texts), add_special_tokens=False, padding=True, return_tensors="pt")["input_ids"]
            said, turn = torch.zeros_like(ids, dtype=torch.bool), ids == mark
            for _ in range(SUMMARY_FACTS + 1):  # a turn is at most that long, <end> included
                turn = torch.nn.functional.pad(turn & (ids != end), (1, -1))
                said |= turn
            model(input_ids=ids, labels=ids.masked_fill(~said, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


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
    pretrain(model, tokenizer, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    result = evaluate(load(RUN_FILE, [f"model.path={args.out}", "eval.episodes=512"]))
    rate = sum(result.rewards) / len(result.rewards)
    if not 0.15 <= rate <= 0.40:
        raise SystemExit(f"start policy solves {rate:.0%} of held-out tasks, expected 15 % to 40 %; try another --seed")
    print(f"{args.out}: {model.num_parameters():,} parameters; start policy solves {rate:.0%} of 512 held-out tasks")


if __name__ == "__main__":
    main()
