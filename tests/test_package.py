"""What is shipped: versions agree, generated pages are up to date, the README's code runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import sao
from sao.errors import EXTRAS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md")) + [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
]


def test_versions_agree():
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert sao.__version__ == cargo
    assert f"[{cargo}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_configuration_page_is_up_to_date():
    script = ROOT / "scripts" / "config_reference.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_source_archive_holds_what_a_build_needs_and_nothing_else(tmp_path):
    """Built from a folder with residue in it: caches, modules of other versions, an empty package."""
    source = tmp_path / "source"
    for name in ("python", "rust"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("target", "__pycache__", "*.so"))
    for name in ("pyproject.toml", "Cargo.toml", "Cargo.lock", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    package = source / "python" / "sao"
    wanted = {
        f"{part}/{path.relative_to(source / part).as_posix()}"
        for part in ("python", "rust")
        for path in (source / part).rglob("*")
        if path.is_file()
    }
    (package / "ghost" / "__pycache__").mkdir(parents=True)
    for residue in ("ghost/__pycache__/old.cpython-311.pyc", "_core.abi3.so", "_core.cpython-39-x86_64-linux-gnu.so"):
        (package / residue).write_bytes(b"residue")
    command = [sys.executable, "-m", "maturin", "sdist", "-o", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path / "unpacked", filter="data")
    optional = {name for name in wanted if re.search(r"^rust/(fuzz/|\w+/(tests|benches|examples)/)", name)}
    assert wanted - optional <= names
    assert names - wanted == {"PKG-INFO", "pyproject.toml", "Cargo.toml", "Cargo.lock", "README.md", "LICENSE"}
    assert {"python/sao/py.typed", "python/sao/_core.pyi"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    metadata = ["cargo", "metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"]
    subprocess.run(metadata, cwd=unpacked, check=True, capture_output=True, timeout=60)


def python_blocks() -> list[object]:
    found = []
    for page in DOCS:
        if page.parent.name == "agents":  # its code needs packages of its own: tests/agents/test_real_agents.py
            continue
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        found += [pytest.param(code, id=f"{page.relative_to(ROOT)}-{index}") for index, code in enumerate(blocks)]
    return found


@pytest.mark.parametrize("code", python_blocks())
def test_the_code_in_the_pages_runs(code, tmp_path):
    run = tmp_path / "runs" / "quickstart"  # what a page may read
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"kind": "step", "time_s": 1.0, "step": 1, "lag/max": 2.0}\n')
    program = tmp_path / "program.py"  # a file: what it spawns imports it again
    program.write_text(code)
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, check=True, timeout=100)


def test_the_readme_has_code_to_run():
    assert "```python\n" in README


def test_the_errors_shown_in_the_tutorial_are_those_that_come(tmp_path):
    page = (ROOT / "docs" / "tutorial" / "quickstart.md").read_text()
    command, *expected = re.findall(r"```console\n\$ \.venv/bin/sao (.*?)```", page, re.DOTALL)[0].splitlines()
    result = subprocess.run(
        [sys.executable, "-m", "sao.cli", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and result.stderr.splitlines() == expected


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_make_targets_named_in_pages_exist(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
    for name in re.findall(r"`((?:scripts|examples|docs|bench|tests|python|rust)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"


def test_every_marker_of_an_optional_package_names_an_extra_that_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "python").rglob("*.py"):
        for extra in re.findall(r"pip install 'sao\[(\w+)\]'", path.read_text()):
            assert extra in extras, f"{path}: {extra}"


def test_every_package_of_an_extra_is_known_by_the_extra_that_installs_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for line in extras[extra]), (package, extra)
    named = {line.partition(">")[0].replace("-", "_") for extra in extras.keys() - {"dev"} for line in extras[extra]}
    assert {name for name in named if not name.startswith("sao[")} == EXTRAS.keys()


def test_the_native_core_is_small() -> None:
    from sao import _core

    assert _core.__file__ is not None
    size = Path(_core.__file__).stat().st_size
    assert size < 10 * 2**20, f"{size} bytes; the wheel that holds it compressed must stay below 10 MiB"
