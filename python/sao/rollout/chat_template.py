"""The chat template of a model: messages to text, in which nothing that a message says can become markup.

What a template may want in different forms (content as text or as a list of parts, arguments of calls as an object or
as JSON) is found by trying. Its clock stands still: `strftime_now` always shows the midnight that begins `date`.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sao.envs.protocol import Message, is_unicode
from sao.errors import ConfigError, EnvironmentFailure
from sao.rollout.kept import Kept

GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"}
    | {f"{kind}_token" for kind in ("bos", "eos", "pad", "unk")}
)
"""Variables that every template gets, so that no variable of a run may have its name."""


def source(folder: Path, file: str | None = None) -> str | dict[str, str] | None:
    """The text of a template: of the file, else of the model folder (several by name, if it has several); None when
    there is none. Raises `ConfigError` when it cannot be read.
    """
    try:
        if file is not None:
            return Path(file).read_text(encoding="utf-8")
        if (path := folder / "chat_template.jinja").is_file():
            return path.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (path := folder / name).is_file():
                found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
                if found:
                    return {one["name"]: one["template"] for one in found} if isinstance(found, list) else found
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        field = f"model.path: {folder}" if file is None else f"model.chat_template: {file}"
        raise ConfigError(f"{field}: no readable chat template: {error}") from None
    return None


def variables(text: str) -> frozenset[str]:
    """The variables that a template reads. Raises `ConfigError` when its syntax is wrong."""
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)  # a tag of transformers' own
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"line {error.lineno}: {error.message}") from None


class ChatTemplate:
    """A template with its variables, for one tokenizer.

    template: its text; None: the tokenizer's own. marks: names of tokens that text must not become, and their ids: all
    special tokens, and those others that the template or `names` (text that holds names) has.
    parts: content is a list of parts. json_arguments: those of calls are JSON text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        values: Mapping[str, Any],
        date: datetime.date | None,
        names: str,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        midnight = datetime.datetime.combine(date or datetime.date.today(), datetime.time())
        self._values = {**values, "strftime_now": midnight.strftime}
        own = template or tokenizer.chat_template
        names += own if isinstance(own, str) else "".join(own.values())
        added = tokenizer.added_tokens_decoder.items()
        self.marks = {
            token.content: index
            for index, token in added
            if (token.special or token.content in names) and token.content.strip()
        }
        longest_first = sorted(self.marks, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        normalizer = tokenizer.backend_tokenizer.normalizer
        self._normalize = str if normalizer is None else normalizer.normalize_str
        self._schemas = Kept(lambda tools: self.harmless(json.loads(tools)) if tools else None)
        self.parts = self.json_arguments = False

    def text(self, messages: Sequence[Message], tools: str = "", prompt: bool = True) -> str:
        """A conversation, with `prompt` up to the start of the assistant turn. tools: a JSON list of schemas.

        Raises `EnvironmentFailure("bad_messages")` when the template refuses it.
        """
        try:
            plain = [self._plain(message) for message in messages]
            text = self._tokenizer.apply_chat_template(
                plain,
                tools=self._schemas(tools),
                chat_template=self._template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._values,
            )
        except Exception as error:  # a template raises what it likes
            roles = ", ".join(message.role for message in messages)
            raise EnvironmentFailure("bad_messages", f"the chat template refuses the roles {roles}: {error}") from error
        if not is_unicode(text := str(text)):  # written as an escape in the arguments of a call
            raise EnvironmentFailure("bad_messages", "the arguments of a call hold half of a surrogate pair")
        return text

    def harmless(self, value: Any) -> Any:
        """The same text, or JSON value, but the name of a marker inside of text is broken by a blank."""
        if isinstance(value, str):
            value = self.pattern.sub(_broken, value)
            if not value.isascii() and self.pattern.search(normal := self._normalize(value)):
                value = self.pattern.sub(_broken, normal)
            return value
        if isinstance(value, dict):
            return {self.harmless(key): self.harmless(inner) for key, inner in value.items()}
        return [self.harmless(inner) for inner in value] if isinstance(value, list) else value

    def _plain(self, message: Message) -> dict[str, Any]:
        plain: dict[str, Any] = self.harmless(message.as_dict())
        if self.parts:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        if self.json_arguments:
            for call in plain.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return plain


def _broken(name: re.Match[str]) -> str:
    return f"{name[0][:1]} {name[0][1:]}"
