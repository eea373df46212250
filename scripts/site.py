"""Hooks of `mkdocs.yml`: the navigation, what pages link to outside of `docs/`, and that no network is needed.

A link to a file of the repository becomes one to a copy of it in the site, so that the site is whole on a disk; other
Markdown files become pages. A link to a folder becomes its text.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SECTIONS = ("tutorial", "how-to", "explanation", "reference", "results", "decisions")  # of the navigation
ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md")  # pages of the navigation that lie outside of docs/
README = "overview.md"  # in the site, where a README would be the index of its folder
SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
WORKER = ROOT / "scripts" / "site_worker.js"
LOADED = re.compile(
    r"""<(?:script|img|iframe|link rel="?(?:stylesheet|pre\w+))[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'> ]+"""
)


def _uri(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    base = DOCS if path.is_relative_to(DOCS) else ROOT
    return README if path == ROOT / "README.md" else path.relative_to(base).as_posix()


def _links(page: Path) -> Iterator[Path]:
    """What a page links to in the repository."""
    for _, _, target, _ in LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            yield Path(os.path.normpath(page.parent / target))


def on_config(config: Any) -> Any:
    """Pages in the order in which the table of `docs/index.md` names them, under the folders that they are in."""
    named = [path for path in _links(DOCS / "index.md") if path.suffix == ".md"]
    order = {path: place for place, path in reversed(list(enumerate(named)))}
    config.nav = ["index.md", {"Overview": README}]
    for section in SECTIONS:
        pages = sorted((DOCS / section).rglob("*.md"), key=lambda page: (order.get(page, len(named)), page.name))
        config.nav.append({section.capitalize(): [_uri(page) for page in pages]})
    config.nav += ELSEWHERE
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds what pages link to and is not in `docs/`, also what that links to."""
    waiting = [ROOT / name for name in ("README.md", *ELSEWHERE)]
    waiting += [path for page in DOCS.rglob("*.md") for path in _links(page)]
    while waiting:
        path = waiting.pop()
        if path.is_file() and path.is_relative_to(ROOT) and files.get_file_from_path(_uri(path)) is None:
            files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
            waiting += _links(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository become links as they are in the site."""
    here = Path(page.file.abs_src_path)

    def replaced(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups(default="")
        path = Path(os.path.normpath(here.parent / target))
        if re.match(r"[a-z]+:", target) or not path.is_relative_to(ROOT):
            return match[0]
        if path.is_dir():
            return text
        return f"{image}[{text}]({os.path.relpath(_uri(path), Path(_uri(here)).parent)}{anchor})"

    return LINK.sub(replaced, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The search of the theme works from a disk with a script that it loads from the network; here it has its own."""
    return output.replace(SHIM, f"<script>{WORKER.read_text()}</script>")


on_post_template = on_post_page  # of 404.html


def on_post_build(config: Any) -> None:
    """Raises if a page loads anything from the network."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(page.read_text()):
            raise PluginError(f"{page}: loads from the network: {found[0]}")
