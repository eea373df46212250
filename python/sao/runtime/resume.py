"""The resume of a run: from its newest complete checkpoint that its ledger knows.

The ledger says which tasks were trained in which step, the checkpoint which tasks its weights have seen. Both must
agree; steps after the checkpoint are lost and their tasks are played again (the broker takes them back in the ledger).
"""

import contextlib
import datetime
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sao._core import ledger_history
from sao.config import Config
from sao.errors import CheckpointError, ConfigError, LedgerError
from sao.storage import checkpoints, durable, ownership
from sao.storage.checkpoints import Checkpoint, Ordinals
from sao.storage.model_folder import identity
from sao.telemetry import sinks

STARTS = "starts"  # how often the run was resumed; generators derive their random numbers from it
# What may differ from the run's first start: limits, resources, what is watched. All else decides what is trained.
MAY_CHANGE = {
    "run": {"name", "dir", "steps", "max_failures_in_a_row", "target_success", "restart_killed", "disk_patience_s"},
    "model": {"activation_checkpointing", "attention"},
    "env": {"step_timeout_s", "episode_timeout_s", "concurrency"},
    "learner": {
        *("ranks", "threads", "row_tokens", "rows_per_micro_batch", "logprob_chunk_tokens", "offload_optimizer"),
        *("deterministic", "save_every_steps", "checkpoints_kept", "max_skipped_in_a_row"),
    },
}
MODELS = ("model.path", "learner.critic_path", "compaction.summariser")  # compared by their content
IDENTITIES = "models.json"
ALL_MAY_CHANGE = {"generator", "staleness", "buffer", "eval", "transport", "telemetry", "value_pretraining"}


class Resume(NamedTuple):
    """The point from which a run goes on."""

    start: int  # starts of this run before this one
    step: int
    version: int
    checkpoint: Path | None  # None when none was saved: from the start policy, at step 0
    lost_steps: int
    ignored: list[tuple[Path, str]]
    finished: str  # why there is nothing left to do; empty when there is
    tidied: tuple[str, ...] = ()  # what a killed writer had begun and was ended, as text

    @property
    def record(self) -> dict[str, int]:
        """Its lines in `metrics.jsonl`."""
        return {"step": self.step, "version": self.version, "lost_steps": self.lost_steps}


def dated(config: Config, *, resume: bool) -> Config:
    """The configuration with `model.date`: today, or that of the run that is resumed. Touches nothing."""
    if config.model.date is not None:
        return config
    date: str | None = datetime.date.today().isoformat()
    if resume:
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            date = json.loads((config.folder / "config.json").read_text(encoding="utf-8"))["model"].get("date")
    return config.model_copy(update={"model": config.model.model_copy(update={"date": date})})


def faults(config: Config) -> list[str]:
    """The reasons why the run in the configuration's folder cannot be resumed with it. Touches nothing."""
    folder = config.folder
    try:
        before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [f"run.name: {folder} holds no run (no readable config.json): there is nothing to resume"]
    if pid := ownership.owner(folder):
        return [f"run.name: {folder} is in use by process {pid}"]
    models: dict[str, str] = {}
    with suppress(OSError, ValueError):
        models = json.loads((folder / IDENTITIES).read_text(encoding="utf-8"))
    found = []
    for section, values in config.model_dump(mode="json", exclude=ALL_MAY_CHANGE).items():
        for key, value in values.items():
            old = before.get(section, {}).get(key, value)
            if f"{section}.{key}" in MODELS and value and models.get(f"{section}.{key}") == identity(Path(value)):
                continue
            if old != value and key not in MAY_CHANGE.get(section, ()):
                found.append(f"{section}.{key}: {value!r} contradicts the run that is resumed, which has {old!r}")
    return found


def remember_models(config: Config, run_folder: Path) -> None:
    """Writes down which models the run has, so that it may go on with a copy that lies elsewhere."""
    paths = {"model.path": config.model.path, "learner.critic_path": config.learner.critic_path}
    paths["compaction.summariser"] = config.compaction.summariser
    models = {key: identity(Path(path)) for key, path in paths.items() if path and Path(path).is_dir()}
    durable.write_text(run_folder / IDENTITIES, json.dumps(models, indent=2) + "\n")


def find(config: Config, run_folder: Path, *, tidy: bool = False) -> Resume:
    """The point from which the run goes on. Changes nothing; or with `tidy`, for whoever holds the folder, ends first
    what a killed writer began: a checkpoint that was about to be replaced is found under its own name then.

    Raises `CheckpointError` when there are checkpoints but none of them is usable, `LedgerError` when the ledger is
    damaged, or no longer knows the steps before a checkpoint that is not there any more.
    """
    ledger, folder = run_folder / "journal", run_folder / "checkpoints"
    tidied = tuple(checkpoints.tidy(folder)) if tidy else ()
    checkpoint, ignored = checkpoints.newest(folder, lambda found: _agree(ledger, found))
    if checkpoint is None and ignored:
        reasons = [reason for _, reason in ignored]
        text = f"none of the checkpoints in {folder} can be resumed; remove them to begin at step 0"
        raise CheckpointError("\n".join([text, *reasons]))
    step, version, path = (checkpoint.step, checkpoint.version, checkpoint.path) if checkpoint else (0, 0, None)
    lost = _lost(ledger, step) if ledger.exists() else 0
    return Resume(_starts(run_folder), step, version, path, lost, ignored, _finished(config, run_folder, step), tidied)


def begin(resume: Resume, run_folder: Path) -> list[str]:
    """Prepares the run folder; returns what a user should know. For whoever holds the folder (`folders.hold`)."""
    for left in run_folder.glob(f"{ownership.PREFIX}*"):  # weights of a start without shared memory
        shutil.rmtree(left, ignore_errors=True)
    durable.write_text(run_folder / STARTS, f"{resume.start + 1}\n")
    return settle(resume, run_folder)


def settle(resume: Resume, run_folder: Path) -> list[str]:
    """Puts the checkpoints in order while no learner runs; returns what a user should know."""
    texts = [*resume.tidied, *checkpoints.tidy(run_folder / "checkpoints")]
    for path, reason in resume.ignored:
        texts.append(f"ignored checkpoint: {reason}; it is now {checkpoints.set_aside(path)}")
    origin = f"from {resume.checkpoint}" if resume.checkpoint else "with the start policy: no checkpoint was saved"
    lost = f"; {resume.lost_steps} later steps are lost and trained again" if resume.lost_steps else ""
    return [*texts, f"resumed after step {resume.step}, policy version {resume.version}, {origin}{lost}"]


def _agree(ledger: Path, checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` unless the ledger says that exactly the checkpoint's tasks were trained, of those that
    may be trained at all: below `ended` all were, or dropped.
    """
    saved: dict[str, Any] = checkpoint.manifest["ledger"]
    runs, steps = ledger_history(ledger, checkpoint.step - 1)
    step = next((step for step in steps if step["step"] == checkpoint.step), None)
    if step is None:
        raise CheckpointError(f"{checkpoint.path}: {ledger.name} knows no step {checkpoint.step}")
    if (step["lease"], [list(task) for task in step["tasks"]]) != (saved["lease"], saved["tasks"]):
        text = f"step {checkpoint.step} contradicts {ledger.name}, which was rewound since"
        raise CheckpointError(f"{checkpoint.path}: {text}")
    trained = Ordinals(runs)
    trained.add(ordinal for ordinal, _ in step["tasks"])
    trained.close(saved.get("ended", 0))
    if trained.runs != saved["trained"]:
        raise CheckpointError(f"{checkpoint.path}: other tasks were trained than {ledger.name} says")


def _lost(ledger: Path, step: int) -> int:
    try:
        return len(ledger_history(ledger, step)[1])
    except LedgerError as error:
        if step:
            raise
        raise LedgerError(f"no checkpoint is left to resume from, and from the start it is too late: {error}") from None


def _finished(config: Config, run_folder: Path, step: int) -> str:
    if step >= config.run.steps:
        return f"the run is complete: step {step} of {config.run.steps} is saved; raise run.steps to train on"
    target, metrics = config.run.target_success, run_folder / "metrics.jsonl"
    if target is not None and metrics.exists():
        records = sinks.surviving(sinks.read(metrics))
        last = next((record for record in reversed(records) if record["kind"] == "eval"), {})
        # an evaluation goes on beside the learner: by the time it ends the run, a later step may be saved
        if 0 < last.get("step", 0) <= step and (last.get("success") or 0.0) >= target:
            reached = f"run.target_success = {target:g} was reached at step {last['step']}"
            return f"the run is complete: {reached}; raise it to train on"
    return ""


def _starts(run_folder: Path) -> int:
    try:
        text = (run_folder / STARTS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    if not text.strip().isdecimal():
        raise ConfigError(f"{run_folder / STARTS}: {text!r} is no number")
    return int(text)
