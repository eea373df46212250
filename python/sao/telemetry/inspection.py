"""The view of `sao inspect`: recorded trajectories by segment, token by token, coloured by what happened to each.

Reads what a run with `telemetry.keep_trajectories` left (`sao.telemetry.recording`). Token texts come from the
tokenizer of the run's model folder, where both are still there; else token ids are shown.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.errors import ConfigError, ValidationError
from sao.telemetry.recording import RecordedStep, read_step, recorded_steps, step_path
from sao.trajectory import Segment, Trajectory

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


class Numbers(NamedTuple):
    """Advantages and probability ratios of a segment's tokens, float64[n_tokens]; NaN where there is none."""

    advantage: NDArray[np.float64]
    ratio: NDArray[np.float64]


class Shown(NamedTuple):
    """One trajectory of a step, with the numbers of each segment (None: left out of training)."""

    number: int
    trajectory: Trajectory
    numbers: list[Numbers | None]

    def finite(self, name: str) -> NDArray[np.float64]:
        """The finite numbers of this name at sampled tokens of trained segments."""
        parts = zip(self.trajectory.segments, self.numbers, strict=True)
        found = [_finite(getattr(numbers, name), segment) for segment, numbers in parts if numbers is not None]
        return np.concatenate([np.zeros(0), *found])


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
    shown = list(_all(recorded))
    if trajectory is None:
        console.print(_overview(recorded, shown))
        return
    chosen = _choose(shown, trajectory)
    for part in _segments(recorded, chosen, colour, _texts(file), bool(console.color_system)):
        console.print(part, soft_wrap=False, highlight=False)


def _all(recorded: RecordedStep) -> Iterator[Shown]:
    offsets, firsts = recorded.arrays["segment_offsets"], recorded.arrays["trajectory_offsets"]
    summaries = bool(recorded.meta.get("compaction", {}).get("train_summaries", True))
    for index, trajectory in enumerate(recorded.trajectories()):
        starts = offsets[firsts[index] : firsts[index + 1]].tolist()
        trained = [summaries or segment.kind != "summary" for segment in trajectory.segments]
        if sum(trained) != len(starts):
            raise ValidationError(f"trajectory {index}: {sum(trained)} segments, the arrays have another number")
        sizes = zip(trajectory.segments, trained, strict=True)
        yield Shown(
            index,
            trajectory,
            [_numbers(recorded, starts.pop(0), segment.n_tokens) if kept else None for segment, kept in sizes],
        )


def _numbers(recorded: RecordedStep, start: int, size: int) -> Numbers:
    def part(name: str) -> NDArray[np.float64]:
        found = recorded.arrays.get(name)
        return np.full(size, np.nan) if found is None else found[start : start + size].astype(np.float64)

    log_ratio = part("logprobs") - part("rollout_logprobs")
    return Numbers(part("advantages"), np.exp(np.clip(log_ratio, -20, 20)))


def _finite(values: NDArray[np.float64], segment: Segment) -> NDArray[np.float64]:
    return values[segment.action_mask & np.isfinite(values)]


def _choose(shown: list[Shown], wanted: str) -> Shown:
    found = [item for item in shown if item.trajectory.id.hex().startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    if wanted.isdecimal() and int(wanted) < len(shown):
        return shown[int(wanted)]
    expected = f"expected an id or 0..{len(shown) - 1}"
    raise ConfigError(f"--trajectory {wanted}: {len(found) or 'no'} trajectories of this step; {expected}")


def _overview(recorded: RecordedStep, shown: list[Shown]) -> Table:
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
        means = [f"{values.mean():.3f}" if values.size else "-" for values in map(item.finite, Numbers._fields)]
        versions = f"{it.min_version}..{it.max_version}"
        reward = "-" if it.reward is None else f"{it.reward:g}"
        cells = (item.number, it.id.hex()[:8], it.task_ordinal, end, reward, kinds, it.n_tokens, it.n_actions, versions)
        table.add_row(*map(str, cells), *means)
    return table


def _segments(
    recorded: RecordedStep, item: Shown, colour: str, texts: Callable[[int], str] | None, colours: bool
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
        yield _tokens(segment, styles, texts or "{} ".format, colours)


def _title(segment: Segment, numbers: Numbers | None, name: str) -> Text:
    title = Text(f"\n── {name}: {segment.kind}, {segment.n_tokens} tokens, ", "bold")
    versions = sorted({int(v) for v in segment.version_spans[:, 2]})
    title.append(f"{segment.n_actions} sampled by version {', '.join(map(str, versions))}")
    if numbers is None:
        return title.append(", left out of training", "yellow")
    for what, found in numbers._asdict().items():
        values = _finite(found, segment)
        if values.size:
            title.append(f", {what} {values.mean():.3f} [{values.min():.3f}, {values.max():.3f}]")
    return title


def _styles(
    segment: Segment, numbers: Numbers | None, colour: str, largest: float, rules: Mapping[str, Any]
) -> list[str]:
    """A rich style for each token. largest: advantage of the trajectory; rules: of the algorithm, with its band."""
    unknown = np.full(segment.n_tokens, np.nan)
    advantages, ratios = numbers or Numbers(unknown, unknown)
    inside = (1 - rules.get("eps_low", 1.0) < ratios) & (ratios < 1 + rules.get("eps_high", np.inf))
    if colour == "version":
        versions = np.zeros(segment.n_tokens, np.int64)
        for first, stop, version in segment.version_spans.tolist():
            versions[first:stop] = version
        styles = np.array(VERSIONS)[versions % len(VERSIONS)]
    elif colour == "ratio":
        styles = np.select([np.isnan(ratios), inside], ["yellow", "green"], "bold red")
    elif colour == "advantage" and numbers is not None:
        weights = np.where(np.abs(advantages) > largest / 2, "bold ", "")
        styles = np.char.add(weights, np.select([advantages > 0, advantages < 0], ["green", "red"], "white"))
    else:
        styles = np.where(inside, "magenta" if segment.kind == "summary" else "green", "yellow")
    found: list[str] = np.where(segment.action_mask, styles, CONTEXT_STYLE).tolist()
    return found


def _tokens(segment: Segment, styles: list[str], text: Callable[[int], str], colours: bool) -> Text:
    body, turns = Text(), np.diff(segment.action_mask, append=False)  # true: the next token is of the other kind
    for token, style, sampled, turn in zip(segment.token_ids.tolist(), styles, segment.action_mask, turns, strict=True):
        body.append(text(token), style)
        if turn and not colours:
            body.append(CLOSE if sampled else OPEN)
    return body


def _texts(file: Path) -> Callable[[int], str] | None:
    """The map from token id to text, by the tokenizer of the run that recorded the file; None when it is gone."""
    try:
        config: dict[str, Any] = json.loads((file.parent.parent / "config.json").read_text(encoding="utf-8"))
        from tokenizers import Tokenizer  # of the extra `train`

        tokenizer = Tokenizer.from_file(str(Path(config["model"]["path"]) / "tokenizer.json"))
    except Exception:  # no run folder around the file, no model any more, no library: ids do as well
        return None
    gap = " " if tokenizer.decoder is None else ""  # of words that the tokenizer split at blanks

    def text(token: int) -> str:
        found = tokenizer.decode([token], skip_special_tokens=False)
        return found if found.isspace() else found + gap

    return text
