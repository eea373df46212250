"""The scripts that the Makefile and CI call say no when they should."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from tests.telemetry.records import evaluation, step

from sao.telemetry.sinks import record

SCRIPTS = Path(__file__).parents[1] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requirements_follow_extras_of_the_package_itself():
    lines = script("requirements").requirements(["vllm", "train"])
    assert len(lines) == len(set(lines))
    names = [line.split(">")[0] for line in lines]
    assert {"numpy", "torch", "transformers", "vllm"} <= set(names) and "sao[train]" not in names
    with pytest.raises(KeyError):
        script("requirements").requirements(["nonsense"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "curves.png", "journal"):
        (tmp_path / name).write_text("x")
    return tmp_path


def sound() -> list[dict]:
    records = [step(number) for number in range(1, 41)]
    return [*records, evaluation(40, 0.8), record("end", {"exit_code": 0, "reason": "all steps done"})]


def test_a_sound_run_passes(folder):
    assert script("check_run").faults(sound(), folder, 0.6, 0.6) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows[:-1], "expected one end record"),
        (lambda rows: [*rows[:-1], record("end", {"exit_code": 1, "reason": "x"})], "expected one end record"),
        (lambda rows: rows[30:], "steps are not 1, 2"),
        (lambda rows: rows[:5], "5 step records"),
        (lambda rows: [{**row, "lag/max": 0} for row in rows], "never above 0"),
        (lambda rows: [row for row in rows if row["kind"] != "eval"], "no held-out evaluation"),
        (lambda rows: [{**row, "reward/success": 0.3} for row in rows], "expected a rise"),
    ],
)
def test_what_is_wrong_with_a_run_is_found(folder, change, expected):
    found = script("check_run").faults(change(sound()), folder, 0.6, 0.6)
    assert any(expected in fault for fault in found), found


def test_missing_files_are_found(folder):
    (folder / "curves.png").unlink()
    assert script("check_run").faults(sound(), folder, 0.6, 0.6) == ["curves.png: missing"]


def test_size_counts_what_a_direct_count_counts(capsys):
    size = script("size")
    for part, (bases, endings) in size.PARTS.items():
        paths = [path for base in bases for path in (size.ROOT / base).rglob("*") if path.suffix in endings]
        total = sum(len(path.read_text().splitlines()) for path in paths)
        assert size.folders(part).total() == total > 1000
    totals = {part: size.folders(part).total() for part in size.PARTS}
    bars = {part: str(total) for part, total in totals.items()}
    assert size.main(["--rust", bars["rust"], "--python", bars["python"]]) == 0
    assert size.main(["--rust", bars["rust"], "--python", str(totals["python"] - 1)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert f"{totals['python']:,}" in printed[-2] and all(len(line) < 80 for line in printed)
