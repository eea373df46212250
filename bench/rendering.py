"""What rendering costs a turn, by length of the history: `python bench/rendering.py`.

A conversation of turns of 100 tokens and observations of 300 grows to the length; then one more turn and observation,
none of which was seen before. "keep": the sampled ids stay. "template": reasoning as the template has it (Qwen3's, of
trl), in a conversation of a shape (roles, calls) that was seen before, since what it leaves out is kept by shape;
"renewed": it has just dropped some, so that all is rendered. "whole": what rendering the conversation anew costs.
The vocabulary is a BPE of 8,192 tokens that was trained on this repository's documents.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report, seconds
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sao.envs.protocol import Message
from sao.rollout.chat import Renderer
from sao.rollout.window import Window, _conversation

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
HISTORIES = (1_000, 10_000, 100_000)
TURN, OBSERVED = 100, 300
fresh = itertools.count()  # so that nothing is rendered twice
NAMES = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
NOTE = "milliseconds; keep, template: an observation of 300 tokens behind a turn of 100 that nobody has seen before"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def folder(path: Path) -> tuple[Path, str]:
    """A tokenizer with Qwen3's template, or plain ChatML where trl is not installed; and text of this repository."""
    from rollout.families import templates

    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").rglob("*.md")))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    template = templates()["qwen3"].read_text(encoding="utf-8") if templates() else CHATML
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=NAMES[1], chat_template=template)
    made.save_pretrained(path)
    return path, text


def measured(renderer: Renderer, text: str, history: int, mode: Any) -> dict[str, float]:
    """Milliseconds: an observation behind a turn, with reading of the turn apart."""
    words = renderer.encode(text)

    def said(role: str) -> Message:
        at = next(fresh) * 37 % (words.size - OBSERVED)
        return Message(role, f"{next(fresh)} {renderer.decode(words[at : at + OBSERVED])}")

    def sampled(start: int) -> np.ndarray:
        thought = renderer._encode(f"<think>\n{start} hm\n</think>\n\n")
        return np.concatenate([thought, words[start : start + TURN], [renderer.stop_token_ids[0]]]).astype(np.int32)

    window = Window(renderer, 10 * history, reasoning=mode)
    window.rebuild([Message("system", "Be brief."), said("user")])
    while window.ids.size < history:
        window.sampled(sampled(next(fresh) % 5000))
        window.observe([said("tool")])
    held, steps = window.ids, list(window.steps)

    def observe(role: str) -> None:
        window.ids, window.steps, window._written, window._stepped = held, list(steps), 0, held.size
        window.sampled(sampled(next(fresh) % 5000))
        window.observe([said(role)])

    conversation = _conversation(window.opening, steps) if mode == "template" else ()
    found = {f"{mode}_ms": median(seconds(lambda: observe("tool"))) * 1e3}
    if mode == "template":
        found["renewed_ms"] = median(seconds(lambda: observe("user"))) * 1e3
        found["whole_ms"] = median(seconds(lambda: renderer.conversation(conversation))) * 1e3
    else:
        found["read_ms"] = median(seconds(lambda: renderer.read(sampled(next(fresh) % 5000), held))) * 1e3
    return found


def main() -> None:
    """Measures and writes."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        path, text = folder(Path(made))
        renderer = Renderer(path)
        for history in HISTORIES:
            row: dict[str, Any] = {"history_tokens": history}
            for mode in ("keep", "template"):
                row |= measured(renderer, text, history, mode)
            rows.append(row)
    report("rendering", list(rows[0]), [list(row.values()) for row in rows], NOTE)


if __name__ == "__main__":
    main()
