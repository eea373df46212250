"""Actors by hand, before anything is started: what is refused, and what the command line makes of keys."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import tiny_model
from typer.testing import CliRunner

from sao import cli, config
from sao.errors import ConfigError
from sao.runtime import hosts, preflight

BASE = '[model]\npath = "m"\n[env]\nname = "lookup"\n'


def run_file(folder: Path, text: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(BASE + text)
    return path


def test_keys_are_made_and_kept_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    first = CliRunner().invoke(cli.app, ["keys", str(folder), "--name", "g7"])
    assert first.exit_code == 0 and str(folder / "g7.key_secret") in first.output
    assert not (folder / "generator.key").exists()  # with names there is no key that all share
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert str(folder / "g7.key") not in CliRunner().invoke(cli.app, ["keys", str(folder), "--name", "g7"]).output
    folder.chmod(0o755)
    refused = CliRunner().invoke(cli.app, ["keys", str(folder)])
    assert refused.exit_code == 2 and "must belong to this user with mode 0700, has 0755" in refused.output


def test_a_broker_that_only_this_host_reaches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transport\.bind: 'ipc' reaches this host only"):
        hosts.broker(run_file(tmp_path))
    with pytest.raises(ConfigError, match=r"--overwrite: the run of .* goes on"):
        hosts.broker(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        hosts.broker(tmp_path)


@pytest.mark.parametrize("command", [["learner"], ["generator", "--name", "g0"], ["doctor"]])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:7000", "tcp://127.0.0.1", "http://h:1", ""])
def test_what_is_no_endpoint_is_a_fault_of_usage(command: list[str], endpoint: str) -> None:
    refused = CliRunner().invoke(cli.app, [*command, "--connect", endpoint])
    assert refused.exit_code == 2, refused.output
    assert f"error: --connect: endpoint {endpoint!r}: expected" in refused.output


@pytest.mark.parametrize("section", ["run.seed=1", "algorithm.gamma=0.5", "env.name='x'", "transport.bind='ipc'"])
def test_what_belongs_to_the_run_is_not_changed_on_another_host(section: str) -> None:
    with pytest.raises(ConfigError, match="belongs to the run, set it where the broker is started"):
        hosts.generator(hosts.Host("tcp://127.0.0.1:1", overrides=[section]), "g0")


def test_missing_and_open_keys_are_found_before_a_run(tmp_path: Path) -> None:
    model = tiny_model.make_folder(tmp_path / "model")
    text = f"[transport]\nbind = 'tcp://127.0.0.1:5000'\nkeys = '{tmp_path}/k'\n[run]\ndir = '{tmp_path}'\n"
    resolved = config.load(run_file(tmp_path, text), [f"model.path='{model}'"])
    with pytest.raises(ConfigError, match=r"transport\.keys: .*/k: No such file"):
        preflight.check(resolved)
    (tmp_path / "k").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"transport\.keys: .*/k must belong to this user"):
        preflight.check(resolved, role="broker")


def test_a_broker_alone_needs_no_model(tmp_path: Path) -> None:
    text = f"[transport]\nbind = 'tcp://127.0.0.1:5000'\n[run]\ndir = '{tmp_path}'\n"
    resolved = config.load(run_file(tmp_path, text))
    preflight.check(resolved, role="broker")
    with pytest.raises(ConfigError, match=r"model\.path: m is not a folder"):
        preflight.check(resolved)


def test_a_clock_that_is_put_back_gives_no_number_twice(tmp_path):
    file = tmp_path / "hosts" / "g0.incarnation"
    file.parent.mkdir()
    assert hosts._after(file, 1000) == 1000
    assert hosts._after(file, 500) == 1001 and hosts._after(file, 500) == 1002
    file.write_text("torn \0")
    assert hosts._after(file, 2000) == 2000 and file.read_text() == "2000"


def test_a_name_that_is_no_file_name_is_refused_before_anything_is_asked():
    for name in ("../x", "a/b", "a\nb", "", "[x]", "x" * 65):
        with pytest.raises(ConfigError, match="--name: "):
            hosts.generator(hosts.Host("tcp://127.0.0.1:1", wait_s=0.1), name)


def test_an_address_to_listen_at_is_none_to_connect_to():
    with pytest.raises(ConfigError, match=r"--connect: tcp://\*:5555 is where a broker listens"):
        hosts.generator(hosts.Host("tcp://*:5555", wait_s=0.1), "g0")
