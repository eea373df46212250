"""The chat templates that the package `trl` ships, each with a byte-level tokenizer that knows its markers.

Only the files are read (`pip install --no-deps trl` is enough); trl itself is never imported.
"""

import importlib.util
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKER = re.compile(
    r"<\|[^<>\n'\"| ]*\|>|<｜[^<>\n'\"]*?｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?INST\]|\[gMASK\]"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|end_of_turn|start_of_turn|end_of_utterance|image|sop|s)>"
)
PLAIN = re.compile(r"</?(think|tool_call|tool_response|arg_)")  # markers whose tokens are added, but not special
ENDS = {  # beginning of a template's name -> end token of these models, where it is not <|im_end|>
    **{"gptoss": "<|return|>", "deepseek": "<｜end▁of▁sentence｜>", "phi": "<|endoftext|>", "llava": "</s>"},
    **{"cohere": "<|END_OF_TURN_TOKEN|>", "llama3": "<|eot_id|>", "gemma": "<eos>", "diffusion_gemma": "<eos>"},
    **{"glm": "<|endoftext|>", "smolvlm": "<end_of_utterance>", "idefics": "<end_of_utterance>", "muse": "<|eot|>"},
}


def templates() -> dict[str, Path]:
    """The files by name; empty when trl is not installed."""
    found = importlib.util.find_spec("trl")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for folder in folders for file in (Path(folder) / "chat_templates").glob("*.jinja")]
    return {file.stem: file for file in sorted(files)}


def tokenizer(template: str, end: str = "<|im_end|>", more: str = "") -> PreTrainedTokenizerFast:
    """One token a byte, and one for each marker in the template and in `more`."""
    names = sorted({*MARKER.findall(template + more), end, "<bos>"})
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    for name in names:
        (core.add_tokens if PLAIN.match(name) else core.add_special_tokens)(
            [AddedToken(name, special=not PLAIN.match(name), normalized=False)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        bos_token="<bos>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def folder(path: Path, name: str, more: str = "") -> Path:
    """A folder with the tokenizer of this family; it has the markers in `more`, too."""
    end = next((end for prefix, end in ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    tokenizer(templates()[name].read_text(encoding="utf-8"), end, more).save_pretrained(path)
    return path
