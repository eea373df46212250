"""Checkpoint folders: complete or ignored, whatever kills or fills the disk of their writer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.errors import CheckpointError, ConfigError, LedgerError
from sao.storage import checkpoints
from sao.storage import failpoints as faults
from sao.storage.checkpoints import Draft, Ordinals, newest, read, set_aside, tidy, verify
from sao.storage.failpoints import FAIL, KILL, POINTS, failpoint

# Writes checkpoints of the given steps, several files each, as slowly as is asked for; says when it begins each.
WRITER = """
import sys, time
from pathlib import Path
from sao.storage.checkpoints import Draft
folder, pause_s, kept = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
for step in map(int, sys.argv[4:]):
    print(step, flush=True)
    draft = Draft(folder, step)
    (draft.folder / "state").mkdir()
    for number in range(4):
        with (draft.folder / "state" / f"{number}.bin").open("wb") as file:
            for _ in range(4):
                file.write(bytes([step, number]) * 500)
                file.flush()
                time.sleep(pause_s)
    draft.commit({"version": step - 1, "mark": step}, kept)
print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def uncounted():
    """Points that earlier tests have come to do not count."""
    faults._reached.clear()


def write(folder: Path, *steps: int, pause_s: float = 0.0, kept: int = 9, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(pause_s), str(kept), *map(str, steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)


def saved(folder: Path, step: int, content: bytes = b"x", kept: int = 9) -> Path:
    draft = Draft(folder, step)
    (draft.folder / "a.bin").write_bytes(content)
    return draft.commit({"version": step}, kept)


def test_what_is_written_is_read_and_retention_keeps_the_newest(tmp_path):
    for step in (1, 2, 10):
        saved(tmp_path, step, kept=2)
    assert list(checkpoints.steps(tmp_path)) == [10, 2]
    found, ignored = newest(tmp_path)
    assert (found.step, found.version, ignored) == (10, 10, []) and found.state == tmp_path / "step-10" / "state"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]
    assert newest(tmp_path / "none") == (None, [])


def test_any_difference_from_the_manifest_is_found_and_the_one_before_is_taken(tmp_path):
    saved(tmp_path, 1)

    def grown(path):
        (path / "a.bin").write_bytes(b"xy")

    def changed(path):
        (path / "a.bin").write_bytes(b"y")

    def missing(path):
        (path / "a.bin").unlink()

    def mixed(path):
        (path / "b.bin").write_bytes(b"of another save")

    def no_manifest(path):
        (path / "manifest.json").unlink()

    def edited(path):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "version": 7}))

    def foreign(path):
        (path / "manifest.json").write_text('{"format": "other"}')

    def renamed(path):
        path.rename(path.with_name("step-3"))

    cases = {
        grown: "2 bytes, expected 1",
        changed: "checksum differs",
        missing: "listed in the manifest, not there",
        mixed: "not listed in the manifest",
        no_manifest: "no manifest.json: it is no complete checkpoint",
        edited: "its own checksum is wrong",
        foreign: "not a manifest of format",
        renamed: "holds step 2",
    }
    for damage, text in cases.items():
        damage(saved(tmp_path, 2))
        found, ignored = newest(tmp_path)
        assert found.step == 1 and len(ignored) == 1 and text in ignored[0][1], damage
        set_aside(ignored[0][0])
        assert newest(tmp_path) == (found, [])
    with pytest.raises(CheckpointError, match="no manifest"):
        verify(tmp_path / "step-9")
    assert read(tmp_path / "step-1").manifest["files"]["a.bin"]["bytes"] == 1


def test_a_reader_may_refuse_a_complete_one(tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path, 2)

    def accept(found):
        if found.step == 2:
            raise CheckpointError("step-2: of another run")

    assert newest(tmp_path, accept)[1] == [(tmp_path / "step-2", "step-2: of another run")]


@pytest.mark.parametrize("place", ["save.manifest", "save.visible"])
def test_a_kill_at_the_end_of_a_save_leaves_one_that_is_whole(tmp_path, place):
    assert write(tmp_path, 1).wait(60) == 0
    assert write(tmp_path, 2, **{KILL: place}).wait(60) == -9
    found, ignored = newest(tmp_path)
    assert not ignored and found.step == (2 if place == "save.visible" else 1)
    texts = tidy(tmp_path)
    assert len(texts) == (place == "save.manifest") and all("its save was cut off" in text for text in texts)
    assert write(tmp_path, 2).wait(60) == 0
    assert newest(tmp_path)[0].step == 2 and {p.name for p in tmp_path.iterdir()} == {"step-1", "step-2"}


@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_the_newest_complete_one(tmp_path, kills):
    """Of a writer that saves step after step, slowly; also of one that writes a step again."""
    rng = random.Random(kills)
    for number in range(kills):
        folder = tmp_path / str(number)
        assert write(folder, 5).wait(60) == 0
        again = number % 2 == 1
        writer = write(folder, *((5,) if again else (6, 7, 8)), pause_s=0.004, kept=2)
        assert writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.1 if again else 0.3))
        writer.kill()
        output = writer.communicate()[0]
        begun = [5 if again else 6, *map(int, output.replace("done", "").split())]
        texts = tidy(folder)
        found, ignored = newest(folder)
        assert found is not None and not ignored
        if again:
            assert found.step == 5
        else:
            assert begun[-1] - 1 <= found.step <= begun[-1], f"kill {number}: {found.step} of {begun}"
        assert found.manifest["mark"] == found.step and verify(found.path) == found
        assert len(texts) <= 1 and not [p for p in folder.iterdir() if p.name.startswith(".")]
        assert write(folder, begun[-1]).wait(60) == 0, "the same step can be saved again"


def test_a_replacement_that_is_cut_off_leaves_the_earlier_one(tmp_path, monkeypatch):
    saved(tmp_path, 5, b"earlier")
    draft = Draft(tmp_path, 5)
    (draft.folder / "a.bin").write_bytes(b"later")
    before = Path.rename

    def killed(self, target):
        if self == draft.folder:
            raise KeyboardInterrupt  # as good as a kill: nothing more is done
        return before(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        draft.commit({"version": 5}, 2)
    monkeypatch.undo()
    assert newest(tmp_path) == (None, [])
    assert tidy(tmp_path)[0].endswith("its replacement was cut off; the earlier one is kept")
    assert (newest(tmp_path)[0].path / "a.bin").read_bytes() == b"earlier"
    saved(tmp_path, 5, b"later")
    assert (newest(tmp_path)[0].path / "a.bin").read_bytes() == b"later"


def test_a_full_disk_leaves_the_one_before_and_nothing_else(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setenv(FAIL, "save.manifest")
    draft = Draft(tmp_path, 2)
    (draft.folder / "a.bin").write_bytes(b"x")
    with pytest.raises(OSError, match="No space left on device"):
        draft.commit({"version": 2}, 2)
    draft.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"] and newest(tmp_path)[0].step == 1


def test_points_have_names_and_counts(monkeypatch):
    failpoint("save.begin")
    monkeypatch.setenv(FAIL, "save.state:2")
    failpoint("save.state")
    failpoint("save.model")
    with pytest.raises(OSError, match=r"at save\.state"):
        failpoint("save.state")
    failpoint("save.state")
    for wrong in ("save.stat", "save.state:x", "save.state:-1"):
        monkeypatch.setenv(KILL, wrong)
        with pytest.raises(ConfigError, match="is no point"):
            failpoint("save.begin")


def test_every_point_is_in_the_program_and_in_the_reference():
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for path in (root / "python" / "sao").rglob("*.py") if path.name != "faults.py")
    reference = (root / "docs" / "reference" / "testing.md").read_text()
    assert [name for name in POINTS if f'failpoint("{name}")' not in text] == []
    assert [name for name in POINTS if f"`{name}`" not in reference] == []


@given(st.lists(st.integers(0, 30), unique=True))
def test_ordinals_are_a_set_of_runs(numbers):
    trained = Ordinals()
    for number in numbers:
        trained.add([number])
    assert [n for n in range(32) if n in trained] == sorted(numbers) and len(trained) == len(numbers)
    runs = trained.runs
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs)), "runs do not touch"
    assert Ordinals(runs).runs == runs
    for number in numbers[:1]:
        with pytest.raises(LedgerError, match=f"task {number} was trained before"):
            trained.add([number])


@given(st.sets(st.integers(0, 30)), st.integers(0, 31))
def test_ordinals_are_closed_where_every_task_has_ended(numbers, ended):
    trained = Ordinals()
    trained.add(numbers)
    trained.close(ended)
    assert [n for n in range(32) if n in trained] == sorted(numbers | set(range(ended)))
    assert Ordinals(trained.runs).runs == trained.runs


def test_a_run_that_drops_tasks_keeps_a_short_list(tmp_path):
    """One of ten is dropped, and the oldest unfinished one is never far behind: the list does not grow."""
    trained = Ordinals()
    for first in range(0, 10_000, 10):
        trained.add(range(first, first + 9))
        trained.close(first)
        assert len(trained.runs) <= 2


def test_a_damaged_file_of_a_model_in_a_checkpoint_is_named(tmp_path):
    draft = checkpoints.Draft(tmp_path, 3)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (draft.folder / name).write_text(name)
    path = draft.commit({"version": 1}, 2)
    patterns = ("model*.safetensors", "tokenizer.json")
    assert checkpoints.damaged(path, *patterns) == []
    (path / "config.json").write_text("mended by hand")
    assert checkpoints.damaged(path, *patterns) == []
    (path / "model.safetensors").write_text("model.safetensorz")
    (path / "tokenizer.json").unlink()
    assert checkpoints.damaged(path, *patterns) == [
        f"{path / 'model.safetensors'}: its checksum differs from the manifest's",
        f"{path / 'tokenizer.json'}: listed in the manifest, not there",
    ]


@pytest.mark.parametrize("runs", [[[3, 3]], [[4, 2]], [[0, 2], [1, 3]], [[-1, 2]], [[0, 1, 2]], [["a", 2]], [[0, 2.5]]])
def test_other_runs_are_refused(runs):
    with pytest.raises(CheckpointError, match="no runs of ordinals"):
        Ordinals(runs)


def test_of_a_checkpoint_that_was_moved_and_linked_only_the_link_is_removed(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    saved(folder, 1).rename(elsewhere)
    (folder / "step-1").symlink_to(elsewhere)
    assert newest(folder)[0].step == 1
    saved(folder, 2, kept=1)
    assert [path.name for path in folder.iterdir()] == ["step-2"] and verify(elsewhere).step == 1
    (folder / ".step-3.part").symlink_to(elsewhere)
    assert len(tidy(folder)) == 1 and [path.name for path in folder.iterdir()] == ["step-2"]


@pytest.mark.parametrize("wrong", [{"files": None}, {"step": "1"}, {"version": None}])
def test_a_manifest_of_other_kinds_is_ignored(tmp_path, wrong):
    """Its own checksum is right: another program wrote it."""
    manifest = json.loads((saved(tmp_path, 1) / "manifest.json").read_text()) | wrong
    del manifest["digest"]
    manifest["digest"] = checkpoints._manifest_digest(manifest)
    (tmp_path / "step-1" / "manifest.json").write_text(json.dumps(manifest))
    found, ((_, reason),) = newest(tmp_path)
    assert found is None and "not what sao-checkpoint-1 has" in reason
