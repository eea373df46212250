"""The files for several hosts: they parse, their commands are the command line's, and their ports agree."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sao import cli
from sao.config import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi-host"
COMMANDS = typer.main.get_command(cli.app)


def commands(text: str) -> list[list[str]]:
    """Every `sao ...` in a text, as words without what a shell does with them."""
    found = re.findall(r"(?<![\w./-])sao ((?:broker|learner|generator|keys|doctor|train)\b[^\n&|;`]*)", text)
    return [shlex.split(words, comments=True) for words in found]


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text()))


def containers() -> dict[str, dict[str, Any]]:
    jobs = [manifest for manifest in manifests() if "template" in manifest["spec"]]
    return {container["name"]: container for job in jobs for container in job["spec"]["template"]["spec"]["containers"]}


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes.yaml", "run.toml", "../../docs/how-to/multi-host.md"])
def test_every_command_is_one_of_the_command_line(name: str) -> None:
    text = (EXAMPLE / name).read_text()
    if name.endswith(".md"):
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    found = commands(text)
    assert len(found) >= 3
    for command, *arguments in found:
        parser = COMMANDS.get_command(COMMANDS.make_context("sao", [command]), command)  # type: ignore[attr-defined]
        parser.make_context(command, list(arguments))  # raises what a user would be told


def test_the_run_file_loads_and_its_ports_are_those_of_the_manifests() -> None:
    transport = load(EXAMPLE / "run.toml").transport
    assert transport.keys == "keys" and not transport.allow_remote
    (service,) = [manifest for manifest in manifests() if manifest["kind"] == "Service"]
    ports = [str(port["port"]) for port in service["spec"]["ports"]]
    assert [transport.bind.rpartition(":")[2], str(transport.weights_bind).rpartition(":")[2]] == ports
    name = service["metadata"]["name"]
    assert f"--connect tcp://{name}:{ports[0]}" in containers()["generator"]["args"][0]
    assert service["spec"]["selector"] == {"app": "sao-head"}


def test_shell_texts_are_shell() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    texts = [container["args"][0] for container in containers().values()]
    for text in [*texts, (EXAMPLE / "slurm.sbatch").read_text()]:
        checked = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_mounted_volumes_exist_and_keys_are_made_private() -> None:
    for manifest in manifests():
        spec = manifest["spec"].get("template", {}).get("spec", {})
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for container in spec.get("containers", []):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert "install -d -m 700 /run/keys && install -m 600 /secret/* /run/keys/" in container["args"][0]
