"""Environments by name, and what is said when a name or an argument is wrong."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from envs.doubles import Rewarding

from sao.envs import registry
from sao.envs.lookup import Lookup
from sao.errors import ConfigError


def test_built_in_names() -> None:
    assert {"lookup", "reasoning_gym"} <= set(registry.names())
    assert isinstance(registry.make("lookup"), Lookup)


def test_a_path_names_a_class_and_arguments_reach_it() -> None:
    assert isinstance(registry.make("sao.envs.lookup:Lookup", turns=2), Lookup)
    environment = registry.make("envs.doubles:Rewarding", reward=0.5)
    assert isinstance(environment, Rewarding)
    assert environment.reward == 0.5


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_run_file.py").write_text("from sao.envs.lookup import Lookup as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert isinstance(registry.make("beside_the_run_file:Mine"), Lookup)


def test_an_installed_package_adds_names_but_takes_over_none(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("extra", "envs.doubles:Rewarding", "g"), EntryPoint("lookup", "envs.doubles:Rewarding", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert isinstance(registry.make("extra"), Rewarding)
    assert isinstance(registry.make("lookup"), Lookup)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lokup", "'lokup' is unknown; expected one of .*lookup, reasoning_gym.*did you mean 'lookup'"),
        ("xyzzy", "'xyzzy' is unknown; expected one of"),
        ("", "'' is unknown"),
        ("no.such.module:Class", "module 'no.such.module' does not import"),
        ("sao.envs.lookup:Missing", "module 'sao.envs.lookup' has no attribute 'Missing'"),
        ("sao.envs.lookup:WORDS", "is a tuple, expected a class or a function"),
        ("sao.envs.lookup:", "expected 'package.module:Class'"),
        ("os; import x:y", "expected 'package.module:Class'"),
        ("envs.doubles:not_an_environment", "lacks reward_range, replayable, reset, step, close"),
        ("envs.doubles:Inverted", "expected low < high"),
    ],
)
def test_a_wrong_name_is_named_with_what_was_expected(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.make(name)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("lookup", {"distractor": 1}, "env.args: .*distractor.*takes: distractors, turns"),
        ("lookup", {"distractors": 8}, "env.args.distractors: 8, expected"),
        ("lookup", {"distractors": True}, "env.args.distractors: True, expected"),
        ("lookup", {"turns": 1}, "env.args.turns: 1, expected"),
        ("lookup", {"turns": "3"}, "env.args.turns: '3', expected"),
        ("reasoning_gym", {}, "env.args: missing a required argument: 'dataset'"),
    ],
)
def test_a_wrong_argument_is_named(name: str, args: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.make(name, **args)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'sao\[envs\]'"):
        registry.make("reasoning_gym", dataset="chain_sum")
