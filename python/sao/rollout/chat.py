"""Messages to token ids, by the tokenizer and chat template of the model folder.

Ids that were sampled are never encoded again. What follows an assistant turn (its end, the next messages, the start of
the next assistant turn) is computed apart: a short conversation with a dummy assistant turn is rendered, and what the
template puts behind the dummy is encoded by itself. That is exact if the template renders earlier turns the same way
whatever follows, and if an assistant turn ends in a special token, at which every tokenizer splits. Both are checked
at the start; a template that fails, such as one that drops earlier reasoning, is refused with the reason.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sao.envs.protocol import Message
from sao.errors import ConfigError, EnvironmentFailure

_OPENING = Message("user", "a")
_DUMMY = "b"
_CACHED = 4096


class Renderer:
    """Renders for the model in `model_path` (local files only, no code from the folder is run).

    stop_token_ids: the template's end-of-turn token first, then the model's other end tokens.
    vocab_size: ids that the tokenizer knows; the model may have more.

    Raises `ConfigError` when there is no tokenizer or chat template, or the template is not stable in the sense above.
    """

    def __init__(self, model_path: str | Path) -> None:
        from transformers import AutoTokenizer  # slow to import, and only generators need it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {model_path}: no usable tokenizer: {error}") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path: {model_path}: the tokenizer has no chat template")
        added = self._tokenizer.added_tokens_decoder
        self._special = {token.content: index for index, token in added.items() if token.special}
        # Environments repeat themselves; rendering costs a few hundred microseconds.
        self._initial = lru_cache(_CACHED)(self.conversation)
        self._then = lru_cache(_CACHED)(lambda messages: self._encode(self._behind_dummy(messages)))
        self.vocab_size = len(self._tokenizer)
        self._head = self._text([_OPENING], prompt=True)
        try:
            self._end_of_turn = self._check()
        except ConfigError as error:
            raise ConfigError(f"model.path: {model_path}: chat template: {error}") from error
        others = {self._tokenizer.eos_token_id, *_generation_ends(Path(model_path))} - {None, self._end_of_turn}
        self.stop_token_ids: tuple[int, ...] = (self._end_of_turn, *sorted(others))

    def initial(self, messages: Sequence[Message]) -> np.ndarray:
        """int32[n]: a conversation and the start of the assistant turn. Raises `EnvironmentFailure("bad_messages")`."""
        return self._initial(tuple(messages))

    def conversation(self, messages: Sequence[Message]) -> np.ndarray:
        """The same as `initial`, for what does not come a second time: it is not kept in memory."""
        return self._encode(self._text(messages, prompt=True))

    def observation(self, messages: Sequence[Message], last_id: int | None) -> np.ndarray:
        """int32[n]: what follows an assistant turn up to the start of the next: its end, the messages, the start.

        last_id: the last id that was sampled (None: nothing was). If it is the end-of-turn token, that token is not
        repeated; else (the turn was cut by its length, or ended by another stop token) it is here, as context.
        Raises `EnvironmentFailure("bad_messages")` when the template refuses these messages.
        """
        ids = self._then(tuple(messages))
        return ids[1:] if last_id == self._end_of_turn else ids

    def cut(self, messages: Sequence[Message], last_id: int | None, limit: int) -> tuple[Message, ...] | None:
        """The messages with as much of their text, from its beginning, as an observation of `limit` tokens holds.

        The longest text loses its end until it fits. None when the observation is longer even without any text.
        """
        found = list(messages)
        texts = [self._encode(self._harmless(message.content)) for message in found]
        while (excess := self.observation(found, last_id).size - limit) > 0:
            at = max(range(len(texts)), key=lambda index: texts[index].size)
            if not texts[at].size:
                return None
            texts[at] = texts[at][: max(0, texts[at].size - excess)]
            found[at] = Message(found[at].role, self.decode(texts[at]).rstrip("\ufffd"))  # half of a character
        return tuple(found)

    @property
    def reasons_first(self) -> bool:
        """Whether an assistant turn begins inside `<think>`, opened by the template."""
        return self._head.rfind("<think>") > self._head.rfind("</think>")

    def same_tokens(self, other: "Renderer") -> bool:
        """Whether both tokenizers give every token the same id."""
        return bool(self._tokenizer.get_vocab() == other._tokenizer.get_vocab())

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of sampled ids, without special tokens: what an environment gets to see."""
        known = [int(i) for i in ids if int(i) < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _behind_dummy(self, messages: Sequence[Message]) -> str:
        text = self._text([_OPENING, Message("assistant", _DUMMY), *messages], prompt=True)
        if not text.startswith(self._head + _DUMMY):
            raise ConfigError(
                "an assistant turn is rendered differently once others follow it "
                f"({text!r} does not begin with {self._head + _DUMMY!r}); "
                "the ids of a turn would not be those that were sampled"
            )
        return text[len(self._head) + len(_DUMMY) :]

    def _check(self) -> int:
        """The end-of-turn token of a template that is stable."""
        behind = self._behind_dummy([Message("user", "c")])
        ids = self._encode(behind)
        first = next((index for text, index in self._special.items() if behind.startswith(text)), None)
        if first is None or ids[0] != first:
            raise ConfigError(
                f"an assistant turn is followed by {behind[:40]!r}; expected a special token that ends the turn"
            )
        then, again = Message("user", "c"), Message("assistant", _DUMMY)
        longer = self._text([_OPENING, again, then, again, then], prompt=True)
        if longer != self._head + _DUMMY + behind + _DUMMY + behind:
            raise ConfigError("turns are rendered differently depending on their place; expected the same every time")
        whole, head = self._encode(longer).tolist(), self._encode(self._head).tolist()
        if whole[: len(head)] != head or whole[-len(ids) :] != ids.tolist():
            raise ConfigError("parts of a conversation have other token ids than the whole of it")
        return first

    def _text(self, messages: Sequence[Message], prompt: bool) -> str:
        plain = [{"role": message.role, "content": self._harmless(message.content)} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, add_generation_prompt=prompt, tokenize=False)
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(message.role for message in messages)
            raise EnvironmentFailure("bad_messages", f"the chat template refuses the roles {roles}: {error}") from error
        return str(text)

    def _harmless(self, content: str) -> str:
        """Text cannot open or close a turn: the name of a special token inside it is broken by a blank."""
        for text in self._special:
            if text in content:
                content = content.replace(text, text[:1] + " " + text[1:])
        return content

    def _encode(self, text: str) -> np.ndarray:
        ids = np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        ids.flags.writeable = False
        return ids


def _generation_ends(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ends = json.loads(path.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    return [int(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
