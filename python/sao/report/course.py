"""The course of a run for its page: what happened to it step by step, from the records of its `metrics.jsonl`."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sao import config as configuration
from sao.errors import ConfigError
from sao.report.findings import counts, findings, rate
from sao.telemetry import sinks
from sao.telemetry.metrics import watched

_EVENTS = 1000  # the newest ones that a page shows
_POINTS = 2000  # of a curve; more steps are taken together
_DIGITS = 5
_CAUSES = "time/"  # seconds of the learner's step, by cause
_NOT_CAUSES = ("time/step_s", "time/idle_share")
_BUSY = "broker/busy_share/"


def read(run_folder: Path) -> dict[str, Any]:
    """The run, ready for JSON. Steps that a resumed run has made again are left out.

    `steps`: columns of numbers, None where a step has none. `evals`: (step, rate, low, high). `shares`: by process,
    the columns of what its time went to. Raises `ConfigError` for a folder without a run.
    """
    try:
        values = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))
        return _course(run_folder, values, sinks.read(run_folder / "metrics.jsonl"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_folder}: holds no run: {error}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_folder}: holds what no run writes: {type(error).__name__}: {error}") from None


def _course(run_folder: Path, values: Mapping[str, Any], records: Sequence[sinks.Record]) -> dict[str, Any]:
    every = sinks.surviving(records)
    steps = [record for record in every if record["kind"] == "step"]
    evals = [record for record in every if record["kind"] == "eval" and record.get("success") is not None]
    began = records[0]["time_s"] if records else 0.0
    last = steps[-1] if steps else {}
    ended = records[-1] if records and records[-1]["kind"] == "end" else None
    config = dict(_flat(values))
    return {
        "name": str(values.get("run", {}).get("name", run_folder.name)),
        "folder": str(run_folder),
        "ended": None if ended is None else str(ended["reason"]),
        "seconds": records[-1]["time_s"] - began if records else 0.0,
        "config": config,
        "defaults": {key: value for key, value in _flat(_defaults(values)) if config.get(key) != value},
        "steps": _thinned(_columns(steps, began, config)),
        "evals": [[record["step"], *_rate(record["success"], record["n"])] for record in evals],
        "shares": {process: _thinned(columns) for process, columns in _shares(steps).items()},
        "lag": _total(steps, "broker/lag_count/"),
        "survival": [last.get(f"broker/survival_decile/{tenth}") for tenth in range(10)],
        "dropped": counts(last, "broker/rollouts_dropped/"),
        "events": [_event(record, began) for record in records if record["kind"] in ("event", "resume", "end")][
            -_EVENTS:
        ],
        "findings": list(findings(steps, evals, ended)),
    }


def _defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's settings would be if its file named nothing but its model and its environment."""
    named = {section: {key: values.get(section, {}).get(key)} for section, key in (("model", "path"), ("env", "name"))}
    try:
        return configuration.parse(named).model_dump(mode="json")
    except ConfigError:  # of another version
        return {}


def _columns(steps: Sequence[sinks.Record], began: float, config: Mapping[str, Any]) -> dict[str, list[float | None]]:
    rows, n = [watched(record) for record in steps], config.get("learner.batch_trajectories")
    columns = {name: [_short(row[name]) for row in rows] for name in (rows[0] if rows else ())}
    columns["tokens"] = [_short(record.get("broker/tokens_sampled")) for record in steps]
    columns["minutes"] = [_short((record["time_s"] - began) / 60) for record in steps]
    if n:
        ranges = [_rate(record.get("reward/success"), n) for record in steps]
        columns["success_low"], columns["success_high"] = ([row[at] for row in ranges] for at in (1, 2))
    # What each side could do if it never waited for the other, tokens a second.
    columns["learner_bound"] = [_short(_over(row["trained_per_s"], 1 - row["learner_idle"])) for row in rows]
    columns["generator_bound"] = [_short(_over(row["sampled_per_s"], 1 - row["generator_idle"])) for row in rows]
    return columns


def _thinned(columns: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Columns of at most `_POINTS` rows: means of steps that lie side by side."""
    size = -(-max(map(len, columns.values()), default=0) // _POINTS)
    return {name: _means(column, size) if size > 1 else column for name, column in columns.items()}


def _means(column: Sequence[float | None], size: int) -> list[float | None]:
    parts = (
        [value for value in column[start : start + size] if value is not None] for start in range(0, len(column), size)
    )
    return [_short(sum(part) / len(part)) if part else None for part in parts]


def _shares(steps: Sequence[sinks.Record]) -> dict[str, dict[str, list[float | None]]]:
    names = sorted({name for record in steps for name in record if name.startswith(_CAUSES)} - {*_NOT_CAUSES})
    learner: dict[str, list[float | None]] = {}
    for name in names:
        cause = name.removeprefix(_CAUSES).removesuffix("_s")
        learner[cause] = [_short(_over(record.get(name), record.get("time/step_s"))) for record in steps]
    shares = {"learner": learner}
    for name in sorted({name for record in steps for name in record if name.startswith(_BUSY)}):
        shares[name.removeprefix(_BUSY)] = {"computing": [_short(record.get(name)) for record in steps]}
    return shares


def _event(record: sinks.Record, began: float) -> list[Any]:
    """(minutes, level, text)."""
    if record["kind"] == "resume":
        text = f"goes on after step {record['step']}, {record.get('lost_steps', 0)} steps are made again"
    else:
        text = str(record.get("text") or record.get("reason") or "")
    level = record.get("level") or ("error" if record.get("exit_code") else "info")
    return [_short((record["time_s"] - began) / 60), str(level), text]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rate(success: float | None, n: int) -> list[float | None]:
    return [_short(value) for value in rate(success, n)]


def _total(steps: Iterable[sinks.Record], prefix: str) -> dict[str, int]:
    found = Counter[str]()
    for record in steps:
        found.update(counts(record, prefix))
    return dict(sorted(found.items(), key=lambda item: int(item[0]) if item[0].isdecimal() else -1))


def _over(value: float | None, by: float | None) -> float:
    return value / by if isinstance(value, int | float) and by else math.nan


def _short(value: float | None) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, int | float) and math.isfinite(value) else None
