"""Paths in a run file are what people mean by them."""

from pathlib import Path

import pytest

from sao.config import parse
from sao.errors import ConfigError

KEYS = ("run.dir", "model.path", "learner.critic_path", "compaction.summariser", "transport.keys")
TEXTS = ("compaction.prompt_file", "compaction.resume_file")


@pytest.mark.parametrize("key", [*KEYS, *TEXTS])
def test_a_tilde_is_the_home_folder(key, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, name = key.split(".")
    made = parse({"model": {"path": "m"}, "env": {"name": "lookup"}}, [f"{key}='~/a b'"])
    assert Path(getattr(getattr(made, section), name)) == tmp_path / "a b"


def test_a_home_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match=r"model\.path: the home folder of ~nobody-of-this-name is not known"):
        parse({"model": {"path": "~nobody-of-this-name/m"}, "env": {"name": "lookup"}})


def test_a_tilde_inside_a_name_stays():
    assert parse({"model": {"path": "a~b"}, "env": {"name": "lookup"}}).model.path == "a~b"


def test_variables_are_expanded_where_they_are_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("NOWHERE", raising=False)
    data = {"env": {"name": "lookup"}, "model": {"path": "${PLACE}/m"}}
    assert parse(data, ['run.dir="$PLACE/runs"']).run.dir == f"{tmp_path}/runs"
    assert parse(data).model.path == f"{tmp_path}/m"
    with pytest.raises(ConfigError, match=r"run\.dir: the variable \$NOWHERE is not set"):
        parse(data, ['run.dir="$NOWHERE/runs"'])
    (tmp_path / "$5").mkdir()
    assert parse(data, [f'run.dir="{tmp_path}/$5"']).run.dir == f"{tmp_path}/$5"


def test_a_path_holds_no_nul():
    with pytest.raises(ConfigError, match=r"run\.dir: a path holds no NUL"):
        parse({"env": {"name": "lookup"}, "model": {"path": "m"}}, ['run.dir="a\\u0000b"'])
