"""The documentation site: whole on a disk, nothing from the network, and no build with a link that leads nowhere."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sao

ROOT = Path(__file__).parents[1]
PARTS = ("docs", "python", "scripts", "examples", "bench")  # what the site is made of
FILES = ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(root / "mkdocs.yml"), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        uri = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / uri).is_file() and f'href="{uri}"' in index, uri


def test_every_local_link_of_every_page_leads_to_a_file(site: Path) -> None:
    for page in site.rglob("*.html"):
        for target in re.findall(r"""(?:href|src)=["']?([^"'> #]+)""", page.read_text()):
            if page.name != "404.html" and not re.match(r"[a-z]+:", target):
                assert (page.parent / target.partition("?")[0]).exists(), f"{page.relative_to(site)}: {target}"


def test_files_of_the_repository_come_with_it(site: Path) -> None:
    assert (site / "bench/results/kills.json").read_bytes() == (ROOT / "bench/results/kills.json").read_bytes()


def test_every_name_that_the_package_exports_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    for name in set(sao.__all__) - {"__version__", "Error"}:
        assert re.search(rf'id="?sao\.[\w.]*\b{name}\b', page), name


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_the_search_works_from_a_disk_without_a_network(site: Path) -> None:
    page = f"file://{site}/index.html?q=windowed"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = ["chromium", *options, "--virtual-time-budget=20000", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert re.search(r"\d matching documents", done.stdout), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("page", "faults"),
    [
        ("how-to/resume.md", ("../reference/gone.md", "../../bench/gone.json", "../reference/config.md#gone")),
        ("reference/api.md", ("sao.trajectory.Gone",)),
    ],
)
def test_a_build_fails_and_names_every_link_that_leads_nowhere(
    page: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    for name in PARTS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    text = "".join(f"\n\n::: {fault}\n" if fault.startswith("sao") else f"\n[here]({fault})\n" for fault in faults)
    changed = tmp_path / "docs" / page
    changed.write_text(changed.read_text() + text)
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for fault in faults:
        assert fault.rpartition("/")[2] in done.stderr, fault


def test_a_page_that_loads_from_the_network_fails(tmp_path: Path) -> None:
    hooks = runpy.run_path(str(ROOT / "scripts" / "site.py"))
    (tmp_path / "page.html").write_text('<a href="https://example.org">a link is none</a>')
    hooks["on_post_build"](SimpleNamespace(site_dir=tmp_path))
    (tmp_path / "page.html").write_text('<link rel="stylesheet" href="https://example.org/x.css">')
    with pytest.raises(Exception, match=r"example\.org"):
        hooks["on_post_build"](SimpleNamespace(site_dir=tmp_path))
