"""The pages that say where things are name files that exist, and the way of a trajectory is as short as they say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "docs" / "explanation" / "house.md"
PACKAGE, CORE = ROOT / "python" / "sao", ROOT / "rust" / "core" / "src"
MOST_FILES = 14


def section(name: str) -> str:
    return re.split(r"^## ", HOUSE.read_text(), flags=re.M)[[s.splitlines()[0] for s in parts()].index(name)]


def parts() -> list[str]:
    return re.split(r"^## ", HOUSE.read_text(), flags=re.M)


def test_every_file_that_is_named_exists():
    for page in (HOUSE, ROOT / "docs" / "decisions" / "one-house.md"):
        for name in re.findall(r"`([a-z_/]+\.(?:py|rs))`", page.read_text()):
            places = [PACKAGE / name, PACKAGE / "broker" / name, ROOT / name, CORE / name]
            assert any(place.is_file() for place in places), f"{page.name}: {name}"


def test_every_folder_has_its_idea():
    rows = [row for row in section("The tree").splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+)/`", row.split("|")[1])}
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == named


def test_every_module_of_the_core_has_its_idea():
    rows = [row for row in section("The tree").partition("rust/core/src/")[2].splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+)`", row.split("|")[1])}
    plain = {"error", "lib", "sync"}  # the error, the list of modules, and the switch between std and loom
    assert {path.stem for path in CORE.glob("*.rs")} - plain == named


def test_the_way_of_a_trajectory_visits_no_file_twice():
    files = re.findall(r"^\| \d+ \| `([a-z_/]+\.py)`", section("The way of a trajectory"), flags=re.M)
    assert 8 <= len(files) == len(set(files)) <= MOST_FILES
    assert all((PACKAGE / name).is_file() for name in files)
