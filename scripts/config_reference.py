"""Writes `docs/reference/config.md` from `sao.config`: `config_reference.py [--check]`.

With `--check` nothing is written and the exit code is 1 if the page is not what the code says.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sao.config import Config
from sao.config.presets import PRESETS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
HEAD = """# Configuration

A run is one TOML file. Every key is checked before anything starts: an unknown key, a wrong type, a value out of range
or a combination that makes no sense ends `sao train` with exit code 2 and a list of all faults, and nothing is created.
On the command line `section.key=value` overrides the file; values are written as in TOML, bare words are strings.
`sao train RUN.toml --dry-run` prints the resolved configuration; a run keeps it in its folder as `config.json`.

*from* is the place in a paper where a default stands: SAO is arXiv 2607.07508, CompactionRL 2607.05378. Where it is
empty, the default is ours; so are all that grow with the model (context, response, rows), which are small here. The
settings of the papers as published are in [examples/paper](../../examples/paper).

This page is written by `scripts/config_reference.py` from `python/sao/config/sections.py`.
"""

PRESETS_HEAD = """
## Presets

`algorithm.preset` sets a whole method. A key beside it in the file wins, and so does one on the command line. Named on
the command line, a preset replaces the method that the file describes, and leaves its rates, batch and warm-up alone.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in Config.model_fields.items():
        model = section.annotation
        assert model is not None
        parts.append(f"\n## `[{name}]`\n\n{(model.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | from | range | meaning |\n| --- | --- | --- | --- | --- | --- |")
        for key, field in model.model_fields.items():
            cells = [
                f"`{key}`",
                _type(field.annotation),
                _default(field),
                _paper(field),
                _range(field.metadata),
                field.description or "",
            ]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts += [PRESETS_HEAD, "| preset | source | settings |\n| --- | --- | --- |"]
    for name, preset in PRESETS.items():
        settings = (f"`{key} = {_toml(value)}`" for key, value in (preset.algorithm | preset.learner).items())
        parts.append(f"| `{name}` | {preset.source} | {', '.join(settings)} |")
    return "\n".join(parts) + "\n"


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in args)
    if origin is list:
        return f"list of {_type(args[0])}s"
    if origin is tuple:
        return f"[{', '.join(_type(arg) for arg in args)}]"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "none" if value is None else f"`{_toml(value)}`"


def _paper(field: FieldInfo) -> str:
    return str(field.json_schema_extra["paper"]) if isinstance(field.json_schema_extra, dict) else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return "{}" if value == {} else str(value)


def _range(metadata: list[Any]) -> str:
    words = []
    for item in metadata:
        for kind, sign in ((annotated_types.Ge, ">="), (annotated_types.Gt, ">")):
            if isinstance(item, kind):
                words.append(f"{sign} {getattr(item, kind.__name__.lower())}")
        for kind, sign in ((annotated_types.Le, "<="), (annotated_types.Lt, "<")):
            if isinstance(item, kind):
                words.append(f"{sign} {getattr(item, kind.__name__.lower())}")
        if getattr(item, "pattern", None):
            words.append(f"`{item.pattern}`")
    return ", ".join(words)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == page() else f"{PAGE} is not up to date: run {sys.argv[0]}")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
