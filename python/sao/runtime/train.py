"""One training run on this machine, from the checked configuration to the plot: what `sao train` does."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from sao import __version__
from sao import config as configuration
from sao.config import Config
from sao.report import page
from sao.runtime import folders, launch, machine, preflight
from sao.runtime import resume as resuming
from sao.runtime.resume import Resume
from sao.runtime.supervisor import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Outcome, Supervisor
from sao.storage import ownership
from sao.telemetry import plot, sinks
from sao.telemetry.live import SteadyConsole
from sao.telemetry.monitor import Monitor


def describe(config: Config, *, overwrite: bool = False, resume: bool = False) -> str:
    """The resolved configuration as JSON and the commands that would be run. Creates nothing; raises `ConfigError`."""
    config = resuming.dated(config, resume=resume)
    warnings = preflight.check(config, overwrite=overwrite, resume=resume, thorough=True)
    found = resuming.find(config, config.folder.resolve()) if resume else None
    if found is not None:
        warnings += [reason for _, reason in found.ignored] + ([found.finished] if found.finished else [])
    places = _places(config, folders.SOCKETS / "sao-XXXXXXXX", folders.SHARED_MEMORY / "sao-XXXXXXXX", found)
    lines = [json.dumps(config.model_dump(mode="json"), indent=2), ""]
    for command in launch.everything(config, places):
        changed = " ".join(f"{name}={value}" for name, value in command.environment.items())
        lines.append(f"# {command.name}\n{changed} {shlex.join(command.argv)}")
    return "\n".join([*lines, *(f"# warning: {warning}" for warning in warnings), "# dry run: nothing was started"])


def train(config: Config, *, overwrite: bool = False, resume: bool = False, alone: bool = False) -> int:
    """Runs a training run to its end; returns the exit code. Raises `ConfigError` before any side effect.

    `resume`: go on with the run in the folder, from its newest complete checkpoint. `alone`: only the broker is started
    here, learner and generators join from elsewhere.
    """
    config = resuming.dated(config, resume=resume)
    warnings = preflight.check(config, role="broker" if alone else "run", overwrite=overwrite, resume=resume)
    console = SteadyConsole(stderr=False, highlight=False)
    tell = partial(console.print, markup=False, soft_wrap=True)
    for folder in folders.remove_stale():
        tell(f"removed {folder}, left by a run that was killed", style="dim")
    run_folder = config.folder.resolve()
    if not resume:
        folders.make_run_folder(run_folder, overwrite=overwrite)
    with ExitStack() as held:
        waiting = "waiting for processes of an earlier start to end"
        lock = folders.hold(run_folder, on_wait=lambda: tell(waiting), on_unlocked=warnings.append)
        held.callback(os.close, lock)
        found = resuming.find(config, run_folder, tidy=True) if resume else None
        if found is not None and found.finished:
            tell(found.finished, style="bold green")
            return EXIT_DONE
        held.enter_context(ownership.owned(run_folder))
        texts = [] if found is None else resuming.begin(found, run_folder)
        configuration.save(config, run_folder / "config.json")
        resuming.remember_models(config, run_folder)
        private = held.enter_context(folders.private(run_folder, 0 if alone else preflight.weights_bytes(config)))
        monitor = held.enter_context(Monitor(config, run_folder, console))
        here = {"sao": __version__, "python": sys.version.split()[0], "cpus": machine.cpus()}
        monitor.report("run", {**here, "config": config.model_dump(mode="json")})
        if found is not None:
            monitor.report("resume", found.record)
        for text in [*warnings, *monitor.warnings, *texts]:
            monitor.report("event", {"level": "warning", "text": text})
        places = _places(config, private.sockets, private.weights, found, lock=lock, alone=alone)
        supervisor = Supervisor(config, places, run_folder / "logs", monitor.report, monitor.tick)
        outcome = supervisor.run()
        if found is not None and outcome.exit_code == EXIT_DONE and not supervisor.last_step:
            text = f"resumed after step {found.step} of {config.run.steps}, and no step was made: {outcome.reason}"
            outcome = Outcome(EXIT_FAILED, text)
        monitor.report("end", {"exit_code": outcome.exit_code, "reason": outcome.reason})
    for text in _summary(run_folder, config):
        tell(text)
    style = {EXIT_DONE: "bold green", EXIT_INTERRUPTED: "bold yellow"}.get(outcome.exit_code, "bold red")
    tell(outcome.reason, style=style)
    tell(f"run folder: {config.folder}", style="dim")
    if outcome.exit_code == EXIT_INTERRUPTED and config.run.task == "train":
        again = f"`sao broker {config.folder}`, and the learner with" if alone else "the same `sao train` with"
        kept = max((int(path.name[5:]) for path in (run_folder / "checkpoints").glob("step-*")), default=0)
        if supervisor.last_step > kept:
            saved = f"the newest is of step {kept}" if kept else "there is none"
            lost = f"steps {kept + 1} to {supervisor.last_step} are lost"
            tell(f"the last checkpoint was not finished: {saved}; {lost}", style="bold yellow")
        tell(f"to go on: {again} --resume", style="dim")
    return outcome.exit_code


def value_pretraining(config: Config) -> Config:
    """The run that pretrains a critic for `config`: same model, environment, sampling, batch and frozen set.

    Its name is that of the run with `-critic` behind it, so it has a folder of its own. Targets are returns
    (`lambda_critic = 1`), the start policy does not change, there are no held-out evaluations. Raises `ConfigError` for
    an estimator without a critic.
    """
    data = config.model_dump(mode="json")
    steps = config.value_pretraining.steps
    run = {"task": "pretrain_value", "name": config.run.name + "-critic", "steps": steps, "target_success": None}
    data["run"] |= run
    data["algorithm"] |= {"lambda_critic": 1.0, "advantage_values": "before", "whiten_advantages": False}
    data["learner"] |= {"critic_warmup_steps": 0 if not config.algorithm.has_critic else steps, "save_every_steps": 0}
    data["eval"] |= {"every_steps": 0}
    return configuration.parse(data)


def _places(config: Config, sockets: Path, weights: Path, found: Resume | None, **more: Any) -> launch.Places:
    if found is not None:
        more |= {"start": found.start + 1, "resume_step": found.step, "checkpoint": found.checkpoint}
    return launch.Places.of(config, sockets, weights, **more)


def _summary(run_folder: Path, config: Config) -> list[str]:
    """The outcome of the run, in lines: held-out success first and last, the critic, the model, the curves."""
    lines = []
    try:
        records = sinks.surviving(sinks.read(run_folder / "metrics.jsonl"))
    except OSError as error:
        return [f"no summary: {error.filename}: {error.strerror}"]
    if held_out := [record for record in records if record["kind"] == "eval" and record["success"] is not None]:
        points = held_out[:1] + held_out[1:][-1:]
        text = ", then ".join(f"{record['success']:.3f} at step {record['step']}" for record in points)
        lines.append(f"held-out success: {text} (n = {points[-1]['n']})")
    if (critic := run_folder / "critic").is_dir():
        explained = json.loads((critic / "pretraining.json").read_text(encoding="utf-8"))["explained_variance"]
        measured = "not measured" if explained is None else f"{explained:.3f}"
        lines.append(f"explained variance of batches before they were trained on: {measured}")
        lines.append(f'for the run file: learner.critic_path = "{config.folder / "critic"}"')
    models = sorted((run_folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)
    if models:
        lines.append(f"model: {config.folder / 'checkpoints' / models[-1].name}")
    if config.telemetry.plot and any(record["kind"] == "step" for record in records):
        lines += _drawn("curves", config, "curves.png", lambda path: plot.curves(records, path))
        lines += _drawn("report", config, "report.html", lambda path: page.write([run_folder], path))
    return lines


def _drawn(what: str, config: Config, name: str, draw: Callable[[Path], object]) -> list[str]:
    """Draws a picture of the run into its folder, and says where it is or why there is none."""
    try:
        draw(config.folder.resolve() / name)
    except ImportError:
        return []  # a package is not installed; the check before the run has said so
    except Exception as error:  # whoever draws: the run is over, and well
        return [f"no {what}: {config.folder / name}: {error}"]
    return [f"{what}: {config.folder / name}"]
