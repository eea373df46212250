"""`report.html`: runs on one page that opens from disk, without a server or a network."""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sao import config as configuration
from sao.errors import ConfigError, StorageError
from sao.report import rollouts
from sao.telemetry import sinks
from sao.telemetry.metrics import watched, wilson
from sao.telemetry.plot import PANELS

ROOM_BYTES = 8 << 20  # of all rollouts of a page, compressed and as base64
_MAX_RUNS = 8  # lines of one panel that can still be told apart


def write(runs: Sequence[Path], target: Path, *, room_bytes: int = ROOM_BYTES) -> Path:
    """Writes the page of some runs, which may still be going on, and returns its path; it is complete or not there.

    Raises `ConfigError` for a folder without a run, `StorageError`, `ImportError` without the charting library.
    """
    if not 1 <= len(runs) <= _MAX_RUNS:
        raise ConfigError(f"RUN: {len(runs)} runs, expected 1 to {_MAX_RUNS}")
    found = [_run(run, room_bytes // len(runs)) for run in runs]
    names = [run["name"] for run in found]
    for index, run in enumerate(found):
        if names.count(run["name"]) > 1:
            run["name"] = str(runs[index])
    pieces = [run.pop("pieces") for run in found]
    panels = [panel._asdict() for panel in PANELS]
    data = {"runs": found, "panels": panels, "columns": rollouts.COLUMNS}
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="ascii") as file:
            file.writelines(_document(data, pieces))
        unfinished.replace(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target


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
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
