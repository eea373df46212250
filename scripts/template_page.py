"""Writes `docs/reference/chat-templates.md`: what the renderer finds in each chat template that `trl` ships.

`template_page.py [--check]`: with `--check` nothing is written and the exit code is 1 if the page is not what the code
says. Needs `pip install --no-deps trl`, of which only the files are read.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rollout.families import folder, templates  # noqa: E402

from sao.envs.protocol import Message  # noqa: E402
from sao.errors import ConfigError  # noqa: E402
from sao.rollout.chat import Renderer  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "chat-templates.md"
HEAD = """# Chat templates

How a template is used: sampled ids stay as they are, and what follows a turn is what the template puts behind a
stand-in of it. So a template may write earlier turns as it likes (without their reasoning, say); what it puts behind
them must begin with a special token and must not depend on the place in the conversation. Every template below is
held to that, to the id, by `tests/rollout/test_templates.py`: user messages behind a turn, results behind one and two
calls, each token that ends turns, in both modes of thinking, with texts that contain all markers.

A template that is not here is examined in the same way when a generator starts, and refused with the reason. Its
variables are set by `model.chat_template_kwargs`, another template by `model.chat_template`, what becomes of earlier
reasoning by `model.reasoning`.

- *ends*: what ends a turn; the first is the template's own, the others those behind a call and the model's.
- *calls*: the format in which calls are read, of [`reading.py`](../../python/sao/rollout/reading.py); `-`: the template
  has none, calls stay text. A folder with a `response_template` of its own is read by that.
- *reasoning*: the marker that opens it; `drops`: the template leaves out that of turns before the last user message.
- *content*: `parts` where the template takes a list of parts only.

This page is written by `scripts/template_page.py`.

| template of `trl` | ends | calls | reasoning | content |
| --- | --- | --- | --- | --- |
"""


def row(name: str, path: Path) -> str:
    """The line of a template."""
    try:
        renderer = Renderer(folder(path, name))
    except ConfigError as error:
        return f"| `{name}` | refused: {str(error).rpartition('chat template: ')[2]} | | | |"
    names = {index: text for text, index in renderer.template.marks.items()}
    ends = " ".join(f"`{names[index]}`".replace("|", "\\|") for index in renderer.stop_token_ids)
    turn, user = Message("assistant", "b", reasoning="c"), Message("user", "a")
    kept, drops = not renderer.forgets([user, turn]), bool(renderer.forgets([user, turn, user]))
    opens = {"harmony": "<|channel|>analysis", "atem": "to=self"}.get(renderer.reader.calls, renderer.reader.opens)
    known = kept or any(name in opens for name in names.values())
    marker = "`" + opens.strip().replace("|", "\\|") + "`" if known else "-"
    thinks = f"{marker}, drops" if marker != "-" and drops else marker
    calls = (renderer.reader.calls or "text") if renderer.renders_tools else "-"
    return f"| `{name}` | {ends} | {calls} | {thinks} | {'parts' if renderer.template.parts else 'text'} |"


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as made:
        rows = [row(name, Path(made) / name) for name in templates()]
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Writes or checks; returns the exit code."""
    if not templates():
        print("trl is not installed: pip install --no-deps trl")
        return 2
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
