"""Whole runs on a disk that fails; `bench/faults.py` tries every combination of the table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.faults import harness
from tests.faults.table import TABLE

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the faulty disk is a C file"),
]
CHOSEN = (
    "journal: write ENOSPC once from call 30",
    "journal: write EIO once (--resume)",
    "journal: open EROFS for ever",
    "checkpoint: write EIO once",
    "weights: write ENOSPC once from call 2",
    "metrics: write,truncate EIO for ever from call 4",
    "lock: flock ENOLCK for ever",
)
SLOW = (
    "journal: write ENOSPC for ever from call 30",
    "journal: write short for ever",
    "journal: fsync EIO once from call 4",
    "TensorBoard: write ENOSPC for ever",
    "curves: open EROFS for ever",
    "config.json: write ENOSPC for ever",
    "log: open EROFS for ever",
    "sockets: mkdir EDQUOT for ever",
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.library(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", [*CHOSEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_on_a_faulty_disk_loses_nothing_and_says_why(name, tmp_path, tiny_model, library):
    (fault,) = [fault for fault in TABLE if str(fault) == name]
    outcome = harness.Trial(tmp_path / "trial", tiny_model, library, fault).play()
    assert not outcome.wrong, harness.show(outcome)


def test_every_combination_has_a_name_of_its_own():
    names = [str(fault) for fault in TABLE]
    assert sorted(set(names)) == sorted(names)
