"""Checkpoint folders: written as a transaction, and complete or ignored.

`docs/reference/checkpoint.md` says what is in one. All of it is written under a temporary name, the manifest last,
everything is brought to the disk, and one rename makes it visible. What a kill or a full disk leaves is a temporary
folder, which nobody reads; a folder that is not exactly what its manifest says is ignored, and reported.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from sao.errors import CheckpointError, LedgerError
from sao.storage.failpoints import failpoint

FORMAT = "sao-checkpoint-1"
MANIFEST = "manifest.json"
STATE = "state"
_NAME = re.compile(r"step-(\d+)")
_REST = re.compile(r"\.step-\d+\.(part|old|gone)")


class Ordinals:
    """The tasks that were trained, as sorted runs of their ordinals: as large as it has gaps, however many there are.

    Dropped tasks are gaps, which `close` fills where every task has ended: none of those is ever trained (again).
    """

    def __init__(self, runs: Iterable[Sequence[int]] = ()) -> None:
        """`runs`: disjoint, in order, (first, one past the last) each. Raises `CheckpointError` for anything else."""
        self.runs = [list(run) for run in runs]
        flat = [number for run in self.runs for number in run]
        plain = all(type(number) is int for number in flat) and all(len(run) == 2 for run in self.runs)
        if not plain or any(a >= b for a, b in pairwise(flat)) or min(flat, default=0) < 0:
            raise CheckpointError(f"trained: {self.runs!r} are no runs of ordinals")

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __contains__(self, ordinal: int) -> bool:
        return any(start <= ordinal < stop for start, stop in self.runs)

    def add(self, ordinals: Iterable[int]) -> None:
        """Adds tasks that were just trained. Raises `LedgerError` if one of them was trained before."""
        runs: list[list[int]] = []  # `runs` as they were stay whole: a checkpoint may still be writing them
        for start, stop in heapq.merge(self.runs, ([ordinal, ordinal + 1] for ordinal in sorted(ordinals))):
            if runs and start < runs[-1][1]:
                raise LedgerError(f"task {start} was trained before; no task may be trained twice")
            if runs and start == runs[-1][1]:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        self.runs = runs

    def close(self, ended: int) -> None:
        """Every task below `ended` was trained or dropped."""
        later = [run for run in self.runs if run[1] > ended]
        if ended:
            first = later.pop(0)[1] if later and later[0][0] <= ended else ended
            later.insert(0, [0, first])
        self.runs = later


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `manifest` holds what its writer gave to `Draft.commit`, and `files`."""

    path: Path
    step: int
    version: int
    manifest: dict[str, Any]

    @property
    def state(self) -> Path:
        """The folder of the sharded tensors."""
        return self.path / STATE


def being_written(checkpoints: Path) -> int | None:
    """Bytes so far of checkpoints that are being written there, or None while there is none."""
    drafts = list(checkpoints.glob(".step-*.part"))
    written = 0
    for draft in drafts:
        with suppress(FileNotFoundError):  # it has just got its final name, or a file in it
            written += sum(path.stat().st_size for path in draft.rglob("*"))
    return written if drafts else None


class Draft:
    """A checkpoint in the making: fill `folder`, then `commit` or `abandon`."""

    def __init__(self, checkpoints: Path, step: int) -> None:
        """Makes the temporary folder, in place of what an earlier attempt left."""
        self.target = checkpoints / f"step-{step}"
        self.folder = checkpoints / f".step-{step}.part"
        self.step = step
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def commit(self, metadata: dict[str, Any], kept: int) -> Path:
        """Writes checksums and manifest, makes the checkpoint visible, and removes all but the newest `kept`.

        `metadata`: what JSON can hold, `version` (the policy's) among it. A checkpoint of the same step is replaced:
        until the new one has its name, the old one is either under its own or found again by `tidy`. Raises `OSError`;
        the caller then abandons the draft.
        """
        manifest = {"format": FORMAT, "step": self.step, **metadata, "files": _files(self.folder)}
        manifest["digest"] = _manifest_digest(manifest)
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in [*self.folder.rglob("*"), self.folder]:
            _sync(path)
        failpoint("save.manifest")
        old = self.target.with_name(f".{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        _sync(self.target.parent)
        failpoint("save.visible")
        shutil.rmtree(old, ignore_errors=True)
        for step, path in list(steps(self.target.parent).items())[kept:]:
            if step != self.step:
                hidden = path.with_name(f".{path.name}.gone")  # its name goes first: half of it is never seen
                _discard(hidden)
                path.rename(hidden)
                _discard(hidden)
        return self.target

    def abandon(self) -> None:
        """Removes the temporary folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint's manifest; its files are not looked at. Raises `CheckpointError` naming the fault."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {MANIFEST}: it is no complete checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not a manifest of format {FORMAT}")
    if manifest.pop("digest", None) != _manifest_digest(manifest):
        raise CheckpointError(f"{file}: its own checksum is wrong")
    step, version, files = (manifest.get(name) for name in ("step", "version", "files"))
    if type(step) is not int or type(version) is not int or not isinstance(files, dict):
        raise CheckpointError(f"{file}: step {step!r}, version {version!r} or files: not what {FORMAT} has")
    return Checkpoint(path, step, version, manifest)


def verify(path: Path) -> Checkpoint:
    """`read`, and checks that the folder is exactly what the manifest says. Raises `CheckpointError`."""
    checkpoint = read(path)
    found, listed = _files(path), checkpoint.manifest["files"]
    for name in sorted(found.keys() | listed.keys()):
        if name not in found:
            raise CheckpointError(f"{path / name}: listed in the manifest, not there")
        if name not in listed:
            raise CheckpointError(f"{path / name}: not listed in the manifest")
        if found[name]["bytes"] != listed[name]["bytes"]:
            raise CheckpointError(f"{path / name}: {found[name]['bytes']} bytes, expected {listed[name]['bytes']}")
        if found[name] != listed[name]:
            raise CheckpointError(f"{path / name}: its checksum differs from the manifest's")
    return checkpoint


def damaged(path: Path, *patterns: str) -> list[str]:
    """What of the files that match is not as the manifest says, a line each; nothing where there is no manifest."""
    if not (path / MANIFEST).is_file():
        return []
    try:
        listed = read(path).manifest["files"]
    except CheckpointError as error:
        return [str(error)]
    names = [name for name in sorted(listed) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    found = _files(path, [path / name for name in names if (path / name).is_file()])
    faults = {name: "its checksum differs from the manifest's" for name in names if found.get(name) != listed[name]}
    faults |= {name: "listed in the manifest, not there" for name in names if name not in found}
    return [f"{path / name}: {fault}" for name, fault in faults.items()]


def newest(
    checkpoints: Path, accept: Callable[[Checkpoint], None] | None = None
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint, and the newer ones that are ignored, each with the reason. Changes nothing.

    `accept` may refuse a complete one by raising `CheckpointError`.
    """
    ignored: list[tuple[Path, str]] = []
    for step, path in steps(checkpoints).items():
        try:
            checkpoint = verify(path)
            if checkpoint.step != step:
                raise CheckpointError(f"{path}: holds step {checkpoint.step}")
            if accept is not None:
                accept(checkpoint)
            return checkpoint, ignored
        except (CheckpointError, OSError, KeyError, TypeError) as error:
            ignored.append((path, str(error) if isinstance(error, CheckpointError) else f"{path}: {error!r}"))
    return None, ignored


def tidy(checkpoints: Path) -> list[str]:
    """Ends what a killed writer began; returns what was found, as text. For the run's only writer.

    A save that was cut off is removed; a checkpoint that was about to be replaced gets its name back.
    """
    found = []
    for path in sorted(checkpoints.glob(".*")):
        match = _REST.fullmatch(path.name)
        if match is None:
            continue
        name = path.name.removeprefix(".").rpartition(".")[0]
        if match[1] == "old" and not (checkpoints / name).exists():
            path.rename(checkpoints / name)
            found.append(f"{checkpoints / name}: its replacement was cut off; the earlier one is kept")
        else:
            _discard(path)
            if match[1] == "part":
                found.append(f"{checkpoints / name}: its save was cut off; what there was of it is removed")
    return found


def set_aside(path: Path) -> Path:
    """Renames a checkpoint that is ignored, so that its step can be saved again; returns the new path."""
    aside = path.with_name(f"ignored-{path.name}")
    _discard(aside)
    path.rename(aside)
    return aside


def steps(checkpoints: Path) -> dict[int, Path]:
    """Steps of which there is a folder, complete or not, newest first."""
    found = {int(match[1]): path for path in checkpoints.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def _discard(path: Path) -> None:
    """Removes a folder; of a link to one that was moved to another disk, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path, paths: Sequence[Path] | None = None) -> dict[str, dict[str, Any]]:
    """Size and checksum of these files, or every file but the manifest, by the path in the folder."""
    if paths is None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)

    def describe(path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return {"bytes": path.stat().st_size, "blake2b": digest}

    with ThreadPoolExecutor(8) as pool:
        found = pool.map(describe, paths)
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, found, strict=True)}


def _manifest_digest(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    """Brings a file or the entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
