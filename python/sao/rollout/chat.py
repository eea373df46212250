"""Messages to token ids, by the tokenizer and chat template of the model folder.

Ids that were sampled are never encoded again. What follows an assistant turn (its end, the next messages, the start of
the next assistant turn) is what the template puts behind a stand-in of the turn: a short conversation is rendered in
which a marker stands for what was sampled, and what is behind the marker, from the end of the turn on, is encoded by
itself. That is exact if an assistant turn ends in a special token, at which every tokenizer splits, and if the template
puts the same there wherever the turn stands. Both are checked at the start. How the template would have written the
turn itself (without its reasoning, say) does not matter: `forgets` tells it to whom it does.
"""

import contextlib
import datetime
import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sao.config.sections import ModelSection
from sao.envs.protocol import Message, ToolCall
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout import chat_template, reading
from sao.rollout.chat_template import ChatTemplate
from sao.rollout.kept import Kept
from sao.rollout.reading import PROBE, PROBE_TOOLS, THOUGHT, Reader

_TAIL_TOKENS = 64  # of a prompt: holds the start of the assistant turn
_MARK = f"turn{secrets.token_hex(8)}"  # the stand-in of what was sampled; no message can hold it
_THEN = (Message("user", "c"),)
_BEFORE = (Message("assistant", "b"), Message("user", "c"))  # moves a stand-in to a later place
_RESULT = "result"


class Renderer:
    """Renders for the model in `model_path` (local files only, no code from the folder is run).

    template: a file with another chat template than the folder's. values: variables of the template. date: the day that
    it sees, default: that on which this was made.
    tools, in all methods: a JSON list of function schemas as the OpenAI API has them; empty: none.

    stop_token_ids: that which ends a turn first, then those behind a call, and the model's other end tokens.
    vocab_size: ids that the tokenizer knows; the model may have more. reader: tells content, reasoning and calls of a
    turn apart. renders_tools: whether results of calls can be rendered.

    Raises `ConfigError` when there is no tokenizer or chat template, or the template is not stable in the sense above.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        template: str | None = None,
        values: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        from transformers import AutoTokenizer  # slow to import, and only generators need it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {model_path}: no usable tokenizer: {error}") from error
        text = None if template is None else chat_template.source(Path(model_path), template)
        if not text and not self._tokenizer.chat_template:
            raise ConfigError(f"model.path: {model_path}: the tokenizer has no chat template")
        assert not isinstance(text, dict)
        self.template = ChatTemplate(self._tokenizer, text, values or {}, date, reading.NAMES)
        # The tokenizer itself: what `transformers` does around a call costs as much as a short text. A first call of it
        # has it neither cut nor pad, whatever the folder says.
        self._tokenizer("a", add_special_tokens=False)
        self._backend: Any = self._tokenizer.backend_tokenizer
        # Environments repeat themselves; rendering costs a few hundred microseconds.
        self._initial = Kept(self.conversation)
        self._then = Kept(lambda messages, calls, tools: self._encode(self._behind(messages, calls, tools)))
        self._forgets = Kept(self._forgotten)
        self._begun = Kept(self._beginning)
        self.vocab_size = len(self._tokenizer)
        try:
            self._check({self._tokenizer.eos_token_id, *_generation_ends(Path(model_path))} - {None})
        except (ConfigError, EnvironmentFailure) as error:
            where = f"model.path: {model_path}" if template is None else f"model.chat_template: {template}"
            raise ConfigError(f"{where}: chat template: {error}") from error

    @classmethod
    def of(cls, model: ModelSection) -> "Renderer":
        """The renderer that `[model]` describes."""
        date = None if model.date is None else datetime.date.fromisoformat(model.date)
        return cls(model.path, template=model.chat_template, values=model.chat_template_kwargs, date=date)

    def initial(self, messages: Sequence[Message], tools: str = "") -> np.ndarray:
        """int32[n]: a conversation and the start of the assistant turn. Raises `EnvironmentFailure("bad_messages")`."""
        return self._initial(tuple(messages), tools)

    def conversation(self, messages: Sequence[Message], tools: str = "") -> np.ndarray:
        """The same as `initial`, for what does not come a second time: it is not kept in memory."""
        return self._encode(self.template.text(messages, tools))

    def observation(
        self, messages: Sequence[Message], last_id: int | None, calls: Sequence[ToolCall] = (), tools: str = ""
    ) -> np.ndarray:
        """int32[n]: what follows an assistant turn up to the start of the next: its end, the messages, the start.

        last_id: the last id that was sampled (None: nothing was). A token that ends turns takes the place of the
        template's own; behind any other (the turn was cut by its length) that one is here, as context.
        calls: those that the turn made. Raises `EnvironmentFailure("bad_messages")` when the template refuses these
        messages.
        """
        return self._cut(self._then(tuple(messages), tuple(calls), tools), last_id)

    def _cut(self, ids: np.ndarray, last_id: int | None) -> np.ndarray:
        """What is behind a turn, without what of it was sampled."""
        if last_id is None or last_id not in (*self.stop_token_ids, int(ids[0])):
            return ids
        for at, token in enumerate(ids.tolist()):  # a turn may end in several markers, and any of them be sampled
            if token == last_id:
                return ids[at + 1 :]
            if token not in self._marks:
                break
        return ids if self._open_ended else ids[1:]

    def following(
        self, sampled: np.ndarray, turn: Message, messages: Sequence[Message], tools: str = ""
    ) -> tuple[np.ndarray, bool]:
        """The `observation` behind a sampled turn, and whether the turn drifts: had other ids, were it encoded as the
        message `turn`. Not kept in memory; one rendering tells both where a turn does not drift.
        """
        begun, at, start = self._begun(tools)
        with contextlib.suppress(EnvironmentFailure):  # a template that cannot write such a turn again
            if (text := self.template.text([PROBE, turn, *messages], tools)).startswith(begun):
                kept, ids = np.concatenate([start, sampled]), self._encode(text[at:])
                if np.array_equal(kept, ids[: kept.size]):
                    return ids[kept.size :], False
        calls = turn.tool_calls if messages[0].role == "tool" else ()  # results are of these
        return self._cut(self._encode(self._behind(messages, calls, tools)), int(sampled[-1])), True

    def _beginning(self, tools: str) -> tuple[str, int, np.ndarray]:
        """A conversation up to a turn: its text, and where in it the last marker is, at which every tokenizer splits,
        with the ids from there on."""
        text = self.template.text([PROBE], tools)
        at = max((found.start() for found in self.template.pattern.finditer(text)), default=0)
        return text, at, self._encode(text[at:])

    def forgets(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """The messages (their indices) whose reasoning the template leaves out of this conversation."""
        shape = tuple((message.role, len(message.tool_calls), bool(message.reasoning)) for message in messages)
        return self._forgets(shape, tools)

    def _forgotten(self, shape: Sequence[tuple[str, int, bool]], tools: str) -> list[int]:
        """The same, of (role, calls, has reasoning) of each message: nothing else decides it."""
        marked, open_calls = [], list[str]()
        for at, (role, n_calls, reasons) in enumerate(shape):
            calls = tuple(ToolCall("look", id=f"call{at:03}{number:02}") for number in range(n_calls))
            result = open_calls.pop(0) if role == "tool" and open_calls else ""
            open_calls += [call.id for call in calls]
            thought = f"{_MARK}-{at}." if reasons else ""
            marked.append(Message(role, "" if calls else "a", calls, result, "look" if result else "", thought))
        text = self.template.text(marked, tools)
        return [at for at, message in enumerate(marked) if message.reasoning and message.reasoning not in text]

    def read(self, ids: np.ndarray, prompt_ids: np.ndarray, tools: str = "") -> Message:
        """A sampled turn: content, reasoning and calls (without ids). prompt_ids: what it was sampled behind.

        Calls are read only with `tools`; a malformed one stays in the content.
        """
        inner = ids[:-1] if ids.size and int(ids[-1]) in self.stop_token_ids else ids
        return self.reader.read(self._decode(inner), self._decode(prompt_ids[-_TAIL_TOKENS:]), tools)

    def cut(
        self, messages: Sequence[Message], limit: int, render: Callable[[Sequence[Message]], np.ndarray]
    ) -> tuple[Message, ...] | None:
        """The messages with as much of their text, from its beginning, as an observation of `limit` tokens holds.

        The longest text loses its end until what `render` makes of them fits. None when that is longer even without any
        text.
        """
        found = list(messages)
        texts = [self.encode(message.content) for message in found]
        while (excess := render(found).size - limit) > 0:
            at = max(range(len(texts)), key=lambda index: texts[index].size)
            if not texts[at].size:
                return None
            texts[at] = texts[at][: max(0, texts[at].size - excess)]
            found[at] = replace(found[at], content=self.decode(texts[at]).rstrip("\ufffd"))  # half of a character
        return tuple(found)

    def encode(self, text: str) -> np.ndarray:
        """int32[n]: the text of a message, alone."""
        return self._encode(self.template.harmless(text))

    def same_tokens(self, other: "Renderer") -> bool:
        """Whether both tokenizers give every token the same id."""
        return bool(self._tokenizer.get_vocab() == other._tokenizer.get_vocab())

    def token_names(self, ids: Iterable[int]) -> list[str]:
        """The tokens as the tokenizer writes them."""
        return list(self._tokenizer.convert_ids_to_tokens([int(index) for index in ids]))

    def token_texts(self, ids: np.ndarray) -> list[str]:
        """The text of each token alone; half of a character is U+FFFD."""
        return [self._decode([token]) for token in ids.tolist()]

    def visible(self, ids: Sequence[int]) -> str:
        """The text of sampled ids with markers that begin reasoning or calls, even those that are special tokens."""
        return self._decode(ids)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of sampled ids, without special tokens: what an environment gets to see."""
        return self._decode(ids, skip_special_tokens=True)

    def _decode(self, ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        known = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if max(known, default=0) >= self.vocab_size:
            known = [index for index in known if index < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def _behind(
        self,
        messages: Sequence[Message],
        calls: Sequence[ToolCall] = (),
        tools: str = "",
        before: Sequence[Message] = (),
    ) -> str:
        """The text that the template puts behind a turn, from its end on; `before`: what stands before the turn."""
        rest = self._rest(messages, calls, tools, before)
        names = self.template.pattern.finditer(rest)
        end = next((found for found in names if not calls or self.template.marks[found[0]] in self._ends), None)
        if end is None:
            what = "a call" if calls else "an assistant turn"
            text = f"{what} is followed by {rest[:40]!r}; expected a special token that ends the turn"
            raise EnvironmentFailure("bad_messages", text)
        return rest[end.start() :]

    def _rest(
        self, messages: Sequence[Message], calls: Sequence[ToolCall], tools: str, before: Sequence[Message] = ()
    ) -> str:
        """All that the template puts behind what stands for a turn, or for the arguments of its last call."""
        stand_in = Message("assistant", _MARK)
        if calls:
            arguments = json.dumps({"a": _MARK})
            stand_in = Message("assistant", "", tuple(ToolCall(call.name, arguments, call.id) for call in calls))
        _, found, rest = self.template.text([PROBE, *before, stand_in, *messages], tools).rpartition(_MARK)
        if not found:
            text = "the chat template leaves out " + ("a turn's calls" if calls else "an assistant turn")
            raise EnvironmentFailure("bad_messages", text)
        return rest

    def _check(self, ends: set[int]) -> None:
        """Finds how the template ends turns; `ends`: what the model folder says. Raises `ConfigError`."""
        template, marks = self.template, self.template.marks
        self._ends, self._marks = set(ends), frozenset(marks.values())
        behind = self._settle_content()
        first = template.pattern.match(behind)
        assert first is not None
        if self._behind(_THEN, before=_BEFORE) != behind:
            raise ConfigError("turns are rendered differently depending on their place; expected the same every time")
        whole = template.text([PROBE, Message("assistant", "b"), *_THEN])
        parts = [self._encode(whole.removesuffix(behind)), self._encode(behind)]
        if parts[1][0] != marks[first[0]] or not np.array_equal(self._encode(whole), np.concatenate(parts)):
            raise ConfigError("parts of a conversation have other token ids than the whole of it")
        last = template.text([PROBE, Message("assistant", _MARK)], prompt=False).rpartition(_MARK)[2]
        end = template.pattern.search(last)
        self._open_ended = end is None or self._opens_roles(first[0])
        name = (end or first)[0]
        if not self._is_within(name) or not ends:
            ends.add(marks[name])
        self._ends |= {marks[first[0]], *ends}
        self.renders_tools = self._settle_calls(ends)
        stops = sorted(ends, key=lambda index: (index != marks[name], index))
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        self.reader = Reader(self._tokenizer, template, [one for one, index in marks.items() if index in self._ends])

    def _settle_content(self) -> str:
        """The text behind a turn, with content as text, else as a list of parts."""
        try:
            return self._behind(_THEN)
        except EnvironmentFailure as error:
            self.template.parts = True
            try:
                return self._behind(_THEN)
            except EnvironmentFailure as again:
                if str(again) == str(error):
                    raise
                raise ConfigError(f"content as text: {error.detail}; as a list of text parts: {again.detail}") from None

    def _is_within(self, name: str) -> bool:
        """Whether the template also writes a marker inside of a turn, between reasoning and answer."""
        try:
            text = self.template.text([PROBE, Message("assistant", _MARK, reasoning=THOUGHT)], prompt=False)
        except EnvironmentFailure:
            return False
        before, found, between = text.partition(_MARK)[0].rpartition(THOUGHT)
        return bool(before and found) and name in between

    def _opens_roles(self, name: str) -> bool:
        """Whether the marker of the next role is what ends a turn: another one stands there before another role."""
        try:
            rest = self._rest([Message("tool", _RESULT)], (), "")
        except EnvironmentFailure:
            return False
        found = self.template.pattern.search(rest.partition(_RESULT)[0])
        return found is not None and found[0] != name

    def _settle_calls(self, stops: set[int]) -> bool:
        """Whether results of calls can be rendered; what ends a call is added to `stops`."""
        call, result = ToolCall("look", id="call00000"), Message("tool", _RESULT, (), "call00000", "look")
        marks, find = self.template.marks, self.template.pattern.findall
        for self.template.json_arguments in (False, True):
            try:
                behind, found, _ = self._rest([result], [call], PROBE_TOOLS).partition(_RESULT)
                if not found:
                    continue
                names = find(behind)
                if not any(marks[name] in self._ends for name in names):
                    names = names[len(self._closers(call, names)) :]
                    self._ends |= {marks[name] for name in names[:1]}
                    stops |= {marks[name] for name in names[:1]}
                if self._behind([result], [call], PROBE_TOOLS) == self._behind([result], [call], PROBE_TOOLS, _BEFORE):
                    return True
            except EnvironmentFailure:
                continue
        return False

    def _closers(self, call: ToolCall, names: list[str]) -> list[str]:
        """Of the markers behind a call, those that also stand between two calls of a turn: they end no turn."""
        arguments = json.dumps({"a": _MARK})
        turn = Message("assistant", "", tuple(ToolCall(call.name, arguments, one) for one in (call.id, "call00001")))
        try:
            parts = self.template.text([PROBE, turn], PROBE_TOOLS).split(_MARK)
        except EnvironmentFailure:
            parts = []
        if len(parts) < 3:  # a template that allows, or shows, one call
            return []
        pairs = zip(names, self.template.pattern.findall(parts[1]), strict=False)
        return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _encode(self, text: str) -> np.ndarray:
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids = np.asarray(found.ids, dtype=np.int32)
        ids.flags.writeable = False
        return ids


def _generation_ends(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, where there is one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    return [int(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
