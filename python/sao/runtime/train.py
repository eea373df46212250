"""One training run on this machine, from the checked configuration to the plot: what `sao train` does."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from sao import __version__
from sao import config as configuration
from sao.config import Config
from sao.runtime import folders, launch, preflight
from sao.runtime.supervisor import EXIT_DONE, EXIT_INTERRUPTED, Supervisor
from sao.telemetry import plot, sinks
from sao.telemetry.monitor import Monitor


def describe(config: Config, *, overwrite: bool = False) -> str:
    """The resolved configuration as JSON and the commands that would be run. Creates nothing; raises `ConfigError`."""
    warnings = preflight.check(config, overwrite=overwrite)
    places = launch.Places.of(config, folders.SOCKETS / "sao-XXXXXXXX", folders.SHARED_MEMORY / "sao-XXXXXXXX")
    lines = [json.dumps(config.model_dump(mode="json"), indent=2), ""]
    for command in launch.everything(config, places):
        changed = " ".join(f"{name}={value}" for name, value in command.environment.items())
        lines.append(f"# {command.name}\n{changed} {shlex.join(command.argv)}")
    return "\n".join([*lines, *(f"# warning: {warning}" for warning in warnings), "# dry run: nothing was started"])


def train(config: Config, *, overwrite: bool = False) -> int:
    """Runs a training run to its end; returns the exit code. Raises `ConfigError` before any side effect."""
    warnings = preflight.check(config, overwrite=overwrite)
    console = Console(stderr=False, highlight=False)
    for folder in folders.remove_stale():
        console.print(f"removed {folder}, left by a run that was killed", style="dim")
    run_folder = config.folder.resolve()
    folders.make_run_folder(run_folder, overwrite=overwrite)
    private = folders.make_private(run_folder)
    try:
        configuration.save(config, run_folder / "config.json")
        places = launch.Places.of(config, private.sockets, private.weights)
        with Monitor(config, run_folder, console) as monitor:
            monitor.report("run", {**_environment(), "config": config.model_dump(mode="json")})
            for warning in warnings:
                monitor.report("event", {"level": "warning", "text": warning})
            supervisor = Supervisor(config, places, run_folder / "logs", monitor.report, monitor.tick)
            outcome = supervisor.run()
            monitor.report("end", {"exit_code": outcome.exit_code, "reason": outcome.reason})
    finally:
        private.remove()
        folders.disown(run_folder)
    _summary(run_folder, config, console)
    style = {EXIT_DONE: "bold green", EXIT_INTERRUPTED: "bold yellow"}.get(outcome.exit_code, "bold red")
    console.print(outcome.reason, style=style, markup=False, soft_wrap=True)
    console.print(f"run folder: {config.folder}", style="dim", markup=False, soft_wrap=True)
    return outcome.exit_code


def _summary(run_folder: Path, config: Config, console: Console) -> None:
    """What came of it: held-out success first and last, the model, the curves."""
    records = sinks.read(run_folder / "metrics.jsonl")
    held_out = [record for record in records if record["kind"] == "eval" and record["success"] is not None]
    if held_out:
        points = [held_out[0], held_out[-1]] if len(held_out) > 1 else held_out
        text = ", then ".join(f"{record['success']:.3f} at step {record['step']}" for record in points)
        console.print(f"held-out success: {text} (n = {points[-1]['n']})", style="bold")
    if (critic := run_folder / "critic").is_dir():
        facts = json.loads((critic / "pretraining.json").read_text(encoding="utf-8"))
        explained = facts["explained_variance"]
        measured = "not measured" if explained is None else f"{explained:.3f}"
        console.print(f"explained variance of batches before they were trained on: {measured}", style="bold")
        console.print(f'for the run file: learner.critic_path = "{config.folder / "critic"}"', soft_wrap=True)
    models = sorted((run_folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)
    if models:
        console.print(f"model: {config.folder / 'checkpoints' / models[-1].name}", soft_wrap=True)
    if config.telemetry.plot and any(record["kind"] == "step" for record in records):
        try:
            plot.curves(records, run_folder / "curves.png")
        except ImportError:
            return  # matplotlib is not installed; the check before the run has said so
        console.print(f"curves: {config.folder / 'curves.png'}", soft_wrap=True)


def _environment() -> dict[str, Any]:
    return {
        "sao": __version__,
        "python": sys.version.split()[0],
        "cpus": launch.available_cpus(),
    }
