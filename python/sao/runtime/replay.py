"""`sao replay RUN STEP`: a recorded step alone, from the checkpoint before it, and whether it gives the same bits."""

import json
import queue
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from sao._core import ledger_history
from sao.config import Config, parse, save
from sao.errors import ConfigError, LearnerError
from sao.runtime import launch
from sao.runtime.processes import Child, Family
from sao.storage import checkpoints, ownership
from sao.storage.checkpoints import Checkpoint
from sao.telemetry.recording import read_step, recorded_steps, step_path

LIMIT_S = 3600.0
_DECIDE = ("model", "algorithm", "compaction", "learner", "lora", "staleness")
_DECIDE_NOTHING = ("save_every_steps", "checkpoints_kept", "max_skipped_in_a_row", "stale", "order")


def replay(run_folder: Path, step: int) -> tuple[str, bool]:
    """The comparison as text, and whether everything was the same to the bit.

    Raises `ConfigError` that says what is missing, `CheckpointError` for a damaged checkpoint, `LearnerError` when the
    step itself fails.
    """
    checkpoint, first = _origin(run_folder, step)
    paths = [step_path(run_folder / "trajectories", number) for number in range(first, step + 1)]
    metas = [read_step(path).meta for path in paths]
    _check_records(run_folder, first, metas)
    _check_settings(first, metas)
    config = parse(metas[-1]["config"], source=str(paths[-1]))
    if not Path(config.model.path).is_dir():
        raise ConfigError(f"model.path: {config.model.path} is not here; run this where the run was started")
    found = _run(config, paths, checkpoint)
    return _describe(found, config, checkpoint), not any(one["different"] for one in found)


def _origin(run_folder: Path, step: int) -> tuple[Checkpoint | None, int]:
    """The checkpoint to start from (None: the start policy) and the first step to replay."""
    recorded = set(recorded_steps(run_folder / "trajectories"))
    if not (run_folder / "config.json").is_file():
        raise ConfigError(f"{run_folder}: holds no run (no config.json)")
    if step not in recorded:
        have = f"recorded are {_steps(recorded)}" if recorded else "none is recorded: set telemetry.keep_trajectories"
        raise ConfigError(f"step {step} is not recorded in {run_folder}; {have}")
    first = next(number for number in range(step, -1, -1) if number - 1 not in recorded)
    saved = checkpoints.steps(run_folder / "checkpoints")
    for number, folder in saved.items():
        if first - 1 <= number < step:
            return checkpoints.verify(folder), number + 1
    if first == 1:
        return None, 1
    raise ConfigError(
        f"step {step} needs the state before it: a checkpoint of step {step - 1}, or an earlier one and the records of"
        f" all steps from there; checkpoints are {_steps(set(saved)) or 'none'}, records {_steps(recorded)}"
        " (learner.checkpoints_kept, learner.save_every_steps, telemetry.keep_trajectories)"
    )


def _check_records(run_folder: Path, first: int, metas: list[dict[str, Any]]) -> None:
    """A record that a resume has left behind is not of the run as it went."""
    _, history = ledger_history(run_folder / "journal", first - 1)
    trained = {step["step"]: [list(task) for task in step["tasks"]] for step in history}
    for step, meta in enumerate(metas, first):
        if trained.get(step) != meta.get("tasks"):
            raise ConfigError(f"the record of step {step} is of steps that a resume lost; it was not made again")


def _check_settings(first: int, metas: list[dict[str, Any]]) -> None:
    """Steps before a resume with other settings cannot be made again together with those after it."""
    wanted = _settings(metas[-1]["config"])
    for step, meta in reversed(list(enumerate(metas, first))):
        settings = _settings(meta["config"])
        if other := sorted(name for name in wanted.keys() | settings.keys() if wanted.get(name) != settings.get(name)):
            name = other[0]
            raise ConfigError(
                f"step {first + len(metas) - 1} needs a checkpoint after step {step}: steps up to there were made with"
                f" {name} = {settings.get(name)!r}, it with {wanted.get(name)!r}"
            )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide the bits of a step."""
    linear = config["learner"]["lr_decay"] == "linear"
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        for key, value in values.items()
        if (section in _DECIDE and key not in _DECIDE_NOTHING) or (linear and (section, key) == ("run", "steps"))
    }


def _run(config: Config, paths: list[Path], checkpoint: Checkpoint | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="sao-replay-") as name, Family() as family:
        folder = Path(name)
        ownership.own(folder)  # so that it goes with the next start when this process is killed
        save(config, folder / "config.json")
        report, ended = folder / "report.json", queue.SimpleQueue[Child]()
        places = launch.Places(folder, folder, folder / "ranks", "", checkpoint=checkpoint.path if checkpoint else None)
        for rank in range(config.learner.ranks):
            command = launch.learner(config, places, rank)
            argv = (*command.argv, "--replay", *map(str, paths), "--report", str(report))
            family.start(replace(command, argv=argv), folder / f"{command.name}.log", ended.put)
        try:
            for _ in range(config.learner.ranks):
                if (child := ended.get(timeout=LIMIT_S)).returncode != 0:
                    raise LearnerError(f"the replay failed ({child.how_it_ended}): {child.last_lines(1)}")
        except queue.Empty:
            raise LearnerError(f"the replay was not done within {LIMIT_S:g} s and was ended") from None
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _describe(found: list[dict[str, Any]], config: Config, checkpoint: Checkpoint | None) -> str:
    last = found[-1]
    origin = f"the checkpoint of step {checkpoint.step}" if checkpoint else "the start policy"
    lines = [f"step {last['step']} from {origin}, {len(found)} steps on {config.learner.ranks} ranks"]
    lines += [f"{name} {value!r}" for name, value in last["losses"].items()]
    for one in found:
        for name, (recorded, again) in one["different"].items():
            lines.append(f"step {one['step']}: {name}: recorded {recorded!r}, now {again!r}")
    if not any(one["different"] for one in found):
        what = f"{last['metrics']} metrics, {last['arrays']} arrays" + (", the weights" if last["weights"] else "")
        lines.append(f"the same to the bit: {what}")
    elif not config.learner.deterministic:
        lines.append("learner.deterministic was off in this run: the last bits may differ from time to time")
    return "\n".join(lines)


def _steps(numbers: set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
