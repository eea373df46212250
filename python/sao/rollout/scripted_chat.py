"""A renderer without a tokenizer."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from sao.envs.protocol import Message, ToolCall
from sao.errors import ConfigError
from sao.rollout.chat import Renderer


class ScriptedRenderer(Renderer):
    """A renderer without tokenizer and template, for runs of the whole system without a model: text becomes one id a
    byte, and an assistant turn is opened by id 1 and ended by id 0.

    Only the vocabulary's size is read from the model folder. Raises `ConfigError` when it is not there.
    """

    def __init__(self, model_path: str | Path) -> None:
        try:
            config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
            self.vocab_size = int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model.path: {model_path}: no vocab_size in config.json: {error}") from None
        self.stop_token_ids = (0,)
        self.renders_tools = False

    def initial(self, messages: Sequence[Message], tools: str = "") -> np.ndarray:
        texts = [self.encode(message.content) for message in messages]
        return np.concatenate([*texts, np.array([1], np.int32)])

    def conversation(self, messages: Sequence[Message], tools: str = "") -> np.ndarray:
        return self.initial(messages)

    def observation(
        self, messages: Sequence[Message], last_id: int | None, calls: Sequence[ToolCall] = (), tools: str = ""
    ) -> np.ndarray:
        end = np.zeros(0 if last_id == 0 else 1, np.int32)
        return np.concatenate([end, self.initial(messages)])

    def forgets(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        return []

    def read(self, ids: np.ndarray, prompt_ids: np.ndarray, tools: str = "") -> Message:
        return Message("assistant", self.decode(ids))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return " ".join(str(int(i)) for i in ids if i)

    def encode(self, text: str) -> np.ndarray:
        return np.array([2 + byte % (self.vocab_size - 2) for byte in text.encode()], np.int32)
