"""The view of `sao inspect`: recorded trajectories by segment, token by token, coloured by what happened to each.

Reads what a run with `telemetry.keep_trajectories` left (`sao.telemetry.recording`). Token texts: see
`sao.telemetry.texts`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.errors import ConfigError
from sao.telemetry.recording import (
    Numbers,
    Recorded,
    RecordedStep,
    finite,
    read_step,
    recorded_steps,
    step_path,
    versions,
)
from sao.telemetry.texts import Texts
from sao.trajectory import Segment

COLUMNS = ("#", "id", "task", "end", "reward", "rows", "tokens", "sampled", "version", "adv", "ratio")
CONTEXT_STYLE = "bright_black"
OPEN, CLOSE = "⟦", "⟧"  # around sampled tokens where there are no colours
VERSIONS = ("cyan", "magenta", "yellow", "green", "blue", "red")
COLOURS = {  # what a token can be coloured by -> what the colours mean
    "mask": "green: sampled and trained; magenta: the same, in a summary; yellow: no policy gradient; grey: given",
    "advantage": "green: above 0; red: below 0; brighter: larger; grey: given",
    "ratio": "green: inside the band; red: outside, weight 0; yellow: too old or not scored; grey: given",
    "version": "one colour a policy version, in turn; grey: given",
}


def find_step(path: Path, step: int | None = None) -> Path:
    """The recorded step that is meant: a file, or the newest (or number `step`) of a run. Raises `ConfigError`."""
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    folder = path / "trajectories" if (path / "trajectories").is_dir() else path
    steps = recorded_steps(folder)
    if not steps:
        raise ConfigError(f"{path}: no recorded step; train with telemetry.keep_trajectories = N")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {folder} has the steps {steps[0]} to {steps[-1]}")
    return step_path(folder, steps[-1] if step is None else step)


def show(
    path: Path, console: Console, *, step: int | None = None, trajectory: str | None = None, colour: str = "mask"
) -> None:
    """Prints a table of the step's trajectories, or the one whose id begins with `trajectory` (or of that number).

    Raises `ConfigError` when there is no such step or trajectory, `WireError` when the file is damaged.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--colour {colour}: expected one of {', '.join(COLOURS)}")
    file = find_step(path, step)
    recorded = read_step(file)
    shown = list(recorded.rollouts())
    if trajectory is None:
        console.print(_overview(recorded, shown))
        return
    chosen = _choose(shown, trajectory)
    for part in _segments(recorded, chosen, colour, Texts.of(file.parent.parent), bool(console.color_system)):
        console.print(part, soft_wrap=False, highlight=False)


def _choose(shown: list[Recorded], wanted: str) -> Recorded:
    found = [item for item in shown if item.trajectory.id.hex().startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    if wanted.isdecimal() and int(wanted) < len(shown):
        return shown[int(wanted)]
    expected = f"expected an id or 0..{len(shown) - 1}"
    raise ConfigError(f"--trajectory {wanted}: {len(found) or 'no'} trajectories of this step; {expected}")


def _overview(recorded: RecordedStep, shown: list[Recorded]) -> Table:
    meta = recorded.meta
    title = f"step {recorded.step}, policy version {meta.get('version')}, {len(shown)} trajectories"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("id", "end") else "right", no_wrap=True)
    for item in shown:
        it = item.trajectory
        summaries = sum(segment.kind == "summary" for segment in it.segments)
        kinds = f"{len(it.segments) - summaries}+{summaries}"
        end = it.termination.reason or it.termination.kind
        means = [f"{values.mean():.3f}" if values.size else "-" for values in map(item.finite, ("advantage", "ratio"))]
        span = f"{it.min_version}..{it.max_version}"
        reward = "-" if it.reward is None else f"{it.reward:g}"
        cells = (item.number, it.id.hex()[:8], it.task_ordinal, end, reward, kinds, it.n_tokens, it.n_actions, span)
        table.add_row(*map(str, cells), *means)
    return table


def _segments(
    recorded: RecordedStep, item: Recorded, colour: str, texts: Texts, colours: bool
) -> Iterator[Text | Table]:
    it = item.trajectory
    head = Text(f"trajectory {it.id.hex()}  task {it.task_ordinal}  attempt {it.attempt}  {it.env}\n", "bold")
    reason = f" ({it.termination.reason})" if it.termination.reason else ""
    head.append(f"{it.termination.kind}{reason}, reward {it.reward}, temperature {it.temperature:g}\n")
    head.append("".join(f"{key} {value}  " for key, value in it.metadata.items()) + "\n", "dim")
    head.append(COLOURS[colour] if colours else f"{OPEN}sampled by the policy{CLOSE}", "dim italic")
    yield head
    largest = float(np.abs(item.finite("advantage")).max(initial=0.0))
    for number, (segment, numbers) in enumerate(zip(it.segments, item.numbers, strict=True)):
        yield _title(segment, numbers, f"segment {number} of {len(it.segments)}")
        styles = _styles(segment, numbers, colour, largest, recorded.meta.get("algorithm", {}))
        yield _tokens(segment, styles, texts, colours)


def _title(segment: Segment, numbers: Numbers | None, name: str) -> Text:
    title = Text(f"\n── {name}: {segment.kind}, {segment.n_tokens} tokens, ", "bold")
    by = sorted({int(v) for v in segment.version_spans[:, 2]})
    title.append(f"{segment.n_actions} sampled by version {', '.join(map(str, by))}")
    if numbers is None:
        return title.append(", left out of training", "yellow")
    for what in ("advantage", "ratio"):
        values = finite(getattr(numbers, what), segment)
        if values.size:
            title.append(f", {what} {values.mean():.3f} [{values.min():.3f}, {values.max():.3f}]")
    return title


def _styles(
    segment: Segment, numbers: Numbers | None, colour: str, largest: float, rules: Mapping[str, Any]
) -> list[str]:
    """A rich style for each token. largest: advantage of the trajectory; rules: of the algorithm, with its band."""
    unknown = np.full(segment.n_tokens, np.nan)
    advantages, ratios = (numbers.advantage, numbers.ratio) if numbers else (unknown, unknown)
    inside = (1 - rules.get("eps_low", 1.0) < ratios) & (ratios < 1 + rules.get("eps_high", np.inf))
    if colour == "version":
        styles = np.array(VERSIONS)[versions(segment) % len(VERSIONS)]
    elif colour == "ratio":
        styles = np.select([np.isnan(ratios), inside], ["yellow", "green"], "bold red")
    elif colour == "advantage" and numbers is not None:
        weights = np.where(np.abs(advantages) > largest / 2, "bold ", "")
        styles = np.char.add(weights, np.select([advantages > 0, advantages < 0], ["green", "red"], "white"))
    else:
        styles = np.where(inside, "magenta" if segment.kind == "summary" else "green", "yellow")
    found: list[str] = np.where(segment.action_mask, styles, CONTEXT_STYLE).tolist()
    return found


def _tokens(segment: Segment, styles: list[str], texts: Texts, colours: bool) -> Text:
    body, turns = Text(), np.diff(segment.action_mask, append=False)  # true: the next token is of the other kind
    shown = texts.pieces(segment.token_ids)
    for token, style, sampled, turn in zip(shown, styles, segment.action_mask, turns, strict=True):
        body.append(token, style)
        if turn and not colours:
            body.append(CLOSE if sampled else OPEN)
    return body
