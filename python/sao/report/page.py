"""`report.html`: runs on one page that opens from disk, without a server or a network."""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from sao.errors import ConfigError, StorageError
from sao.report import course, rollouts
from sao.telemetry.plot import BLUE, GREEN, PANELS

ROOM_BYTES = 8 << 20  # of all rollouts of a page, compressed and as base64
_MAX_RUNS = 8  # lines of one panel that can still be told apart


def write(runs: Sequence[Path], target: Path, *, room_bytes: int = ROOM_BYTES) -> Path:
    """Writes the page of some runs, which may still be going on, and returns its path; it is complete or not there.

    Raises `ConfigError` for a folder without a run, `StorageError`, `ImportError` without the charting library.
    """
    runs = list(dict.fromkeys(runs))
    if not 1 <= len(runs) <= _MAX_RUNS:
        raise ConfigError(f"RUN: {len(runs)} runs, expected 1 to {_MAX_RUNS}")
    found, pieces = [], []
    for run in runs:
        of_run = rollouts.read(run, room_bytes // len(runs))
        found.append(
            course.read(run) | {"rows": of_run.rows, "notes": of_run.notes, "seconds_of_rollouts": of_run.seconds}
        )
        pieces.append(of_run.pieces)
    names = [each["name"] for each in found]
    for each in found:
        if names.count(each["name"]) > 1:
            each["name"] = each["folder"]
    data = {"runs": found, "panels": _panels(), "columns": rollouts.COLUMNS}
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(_document(data, pieces))
        unfinished.replace(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return target


def _panels() -> list[dict[str, Any]]:
    """The panels of `curves.png`, with what only this page shows: held-out success, and what bounds the speed."""
    found = [panel._asdict() | {"evals": panel.lines[0][0] == "success"} for panel in PANELS]
    for panel in found:
        if any(name == "trained_per_s" for name, *_ in panel["lines"]):
            panel["lines"] += (
                ("generator_bound", GREEN, "generators, if they never waited", True),
                ("learner_bound", BLUE, "learner, if it never waited", True),
            )
    return found


def _document(data: Mapping[str, Any], pieces: Sequence[Sequence[str | None]]) -> Iterable[str]:
    """The parts of the file. Only our two scripts may run: the page's policy names their digests and nothing else."""
    import dygraphs  # of the extra `tracking`; the file of its charts is all that is used

    ours = files("sao.report")
    scripts = [
        (files(dygraphs) / "assets" / "dygraph-combined.js").read_text(encoding="utf-8"),
        (ours / "page.js").read_text(encoding="utf-8"),
    ]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    head, body = (ours / "page.html").read_text(encoding="utf-8").split("<!-- data -->")
    yield head.replace("{{policy}}", policy).replace("{{style}}", (ours / "page.css").read_text(encoding="utf-8"))
    yield f'<script type="application/json" id="data">{_json(data)}</script>\n'
    for run, of_run in enumerate(pieces):
        for row, piece in enumerate(of_run):
            if piece is not None:
                yield f'<script type="text/plain" id="rollout-{run}-{row}">{piece}</script>\n'
    yield from (f"<script>{script}</script>\n" for script in scripts)
    yield body


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    except ValueError as error:  # a configuration or record of others
        raise ConfigError(f"RUN: {error}") from None
