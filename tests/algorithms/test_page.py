"""The page of algorithms says what the code does: switches, defaults, tests and the worked example."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from sao.config import Config, parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "algorithms.md"
TEXT = PAGE.read_text(encoding="utf-8")
TRICKS = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]


def test_the_worked_example_is_what_the_loss_does() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 9 and result.failed == 0


def test_tricks_are_numbered_and_each_has_a_switch_and_a_test() -> None:
    assert [int(trick.split(".")[0]) for trick in TRICKS] == list(range(1, len(TRICKS) + 1)) and len(TRICKS) >= 30
    for trick in TRICKS:
        assert "- switch: " in trick and "- test: `tests/" in trick, trick.splitlines()[0]


def test_the_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT))
    assert len(named) > 40
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not re.search(rf"^ *def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_switches_exist_and_have_these_defaults() -> None:
    config = parse({"model": {"path": "m"}, "env": {"name": "e"}})
    stated = re.findall(r"`(\w+)\.(\w+)` = `([^`]+)`", TEXT)
    assert len(stated) > 40
    for section, key, text in stated:
        value = getattr(getattr(config, section), key)
        quoted = f'"{value}"' if isinstance(value, str) else str(value).lower()
        assert quoted == text, f"{section}.{key}"


@pytest.mark.parametrize("section", ["algorithm", "value_pretraining", "staleness"])
def test_every_switch_of_the_algorithm_is_on_the_page(section: str) -> None:
    keys = Config.model_fields[section].annotation.model_fields
    assert [key for key in keys if not re.search(rf"`{section}\.{key}`", TEXT)] == []
