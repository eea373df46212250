"""`sao inspect`: what it shows of a recorded step, with and without colours, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from learner.rollouts import make_config, make_segment, make_trajectory
from rich.console import Console
from typer.testing import CliRunner

from sao.cli import app
from sao.config import save
from sao.errors import ConfigError, ValidationError
from sao.learner.batch import flatten
from sao.telemetry import inspection
from sao.telemetry.recording import step_path, write_step
from sao.trajectory import Trajectory, encode


def rollouts() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    segments = [
        make_segment(rng, [(3, 2), (2, 2)], versions=(4, 5)),
        make_segment(rng, [(6, 3)], kind="summary", versions=(5,)),
        make_segment(rng, [(4, 2)], versions=(6,)),
    ]
    facts = {"metadata": {"compactions": 1, "compaction_request": "summary_v1"}}
    compacted = make_trajectory(rng, segments, reward=1.0, ordinal=12, **facts)
    return [make_trajectory(rng, [make_segment(rng, [(2, 3)], versions=(6,))], kind="truncated"), compacted]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run folder with two recorded steps; in the second the first segment is half outside the band."""
    folder = tmp_path / "r"
    folder.mkdir()
    save(make_config(tiny_model), folder / "config.json")
    record(folder, 3)
    record(folder, 4)
    return folder


def record(folder: Path, step: int, summaries: bool = True) -> None:
    batch = rollouts()
    flat = flatten(batch, 6, summaries=summaries)
    mask, logprobs = flat.action_mask, flat.logprobs.copy()
    actions = np.flatnonzero(mask)
    logprobs[actions[3]] += 2.0  # ratio 7.4, outside (0.7, 6)
    logprobs[actions[4]] = np.nan  # too old
    advantages = np.where(mask, np.where(np.arange(mask.size) % 2, 0.25, -1.0), 0.0).astype(np.float32)
    arrays = {
        "advantages": advantages,
        "logprobs": logprobs,
        "rollout_logprobs": flat.logprobs,
        "segment_offsets": flat.segment_offsets,
        "trajectory_offsets": flat.trajectory_offsets,
    }
    meta = {
        "version": 6,
        "algorithm": {"eps_low": 0.3, "eps_high": 5.0},
        "compaction": {"train_summaries": summaries},
    }
    write_step(folder / "trajectories", step, [f for t in batch for f in encode(t)], arrays, meta)


def shown(path: Path, *, colours: bool = False, width: int = 200, **options: object) -> str:
    out = io.StringIO()
    system = "truecolor" if colours else None
    inspection.show(path, Console(file=out, width=width, color_system=system, force_terminal=colours), **options)
    return out.getvalue()


def test_all_trajectories_of_the_newest_step_fit_a_terminal(run: Path) -> None:
    text = shown(run, width=80)
    assert "step 4, policy version 6, 2 trajectories" in text
    id = rollouts()[1].id.hex()[:8]
    (row,) = [line for line in text.splitlines() if id in line]
    assert row.split()[:9] == ["1", id, "12", "finished", "1", "2+1", "24", "9", "4..6"]
    assert "…" not in text
    assert "step 3" in shown(run, step=3)
    assert shown(step_path(run / "trajectories", 4), width=80) == text


def test_a_trajectory_is_shown_segment_by_segment(run: Path) -> None:
    text = shown(run, trajectory="1")
    for line in (
        "segment 0 of 3: execution, 9 tokens, 4 sampled by version 4, 5",
        "segment 1 of 3: summary, 9 tokens, 3 sampled by version 5",
        "segment 2 of 3: execution, 6 tokens, 2 sampled by version 6",
        "compactions 1  compaction_request summary_v1",
    ):
        assert line in text
    assert shown(run, trajectory=rollouts()[1].id.hex()[:10]) == text


def test_without_colours_sampled_tokens_are_in_brackets(run: Path) -> None:
    """The texts are the tokenizer's, the brackets are the mask's."""
    from tiny_model import SPECIAL, WORDS

    text, segment = shown(run, trajectory="1"), rollouts()[1].segments[1]
    names = [(SPECIAL + WORDS)[token] for token in segment.token_ids.tolist()]
    wanted = " ".join(names[:6]) + " ⟦" + " ".join(names[6:]) + " ⟧"
    assert wanted.replace("\n ", "\n") in text


def codes(run: Path, colour: str) -> list[str]:
    """The colour of each of the nine sampled tokens, by the order in which they are printed."""
    text = shown(run, colours=True, trajectory="1", colour=colour)
    body = re.sub(r"\x1b\[1m.*?\x1b\[0m", "", "".join(text.split("── segment")[1:]), flags=re.S)
    found = re.findall(r"\x1b\[([0-9;]+)m([^\x1b]+)", body)
    return [code for code, part in found if code not in ("90", "1", "0")]


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ("mask", {"32", "33", "35"}),  # green, yellow (outside the band, too old), magenta
        ("ratio", {"32", "33"}),
        ("advantage", {"32"}),
        ("version", {"34", "31", "36"}),
    ],
)
def test_tokens_are_coloured_by_what_is_asked(run: Path, colour: str, expected: set[str]) -> None:
    assert expected <= set(codes(run, colour))


def test_styles_of_the_tokens(run: Path) -> None:
    recorded = inspection.read_step(step_path(run / "trajectories", 4))
    _, item = recorded.rollouts()
    segment, numbers, start = item.trajectory.segments[0], item.numbers[0], 5  # after another trajectory's tokens
    at = np.flatnonzero(segment.action_mask)

    def styles(colour: str) -> list[str]:
        found = inspection._styles(segment, numbers, colour, 1.0, recorded.meta["algorithm"])
        assert all(found[k] == inspection.CONTEXT_STYLE for k in range(len(found)) if k not in at)
        return [found[k] for k in at]

    assert styles("mask") == ["yellow", "yellow", "green", "green"]
    assert styles("ratio") == ["bold red", "yellow", "green", "green"]
    assert styles("version") == [inspection.VERSIONS[v % 6] for v in (4, 4, 5, 5)]
    assert styles("advantage") == ["bold red" if (start + k) % 2 == 0 else "green" for k in at]


def test_summaries_that_were_left_out_are_shown_as_such(run: Path) -> None:
    record(run, 5, summaries=False)
    text = shown(run, trajectory="1")
    assert "segment 1 of 3: summary, 9 tokens, 3 sampled by version 5, left out of training" in text
    assert "segment 2 of 3: execution" in text


def test_without_a_tokenizer_ids_are_shown(run: Path, tmp_path: Path) -> None:
    (run / "config.json").unlink()
    ids = rollouts()[1].segments[2].token_ids.tolist()
    assert " ".join(map(str, ids[:4])) + " ⟦" in shown(run, trajectory="1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 9}, "--step 9: .* has the steps 3 to 4"),
        ({"trajectory": "zz"}, "--trajectory zz: no trajectories of this step; expected an id or 0..1"),
        ({"trajectory": ""}, "2 trajectories"),
        ({"colour": "blue"}, "--colour blue: expected one of mask, advantage, ratio, version"),
    ],
)
def test_what_is_not_there_is_named(run: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shown(run, **options)


def test_arrays_of_another_batch_are_refused(run: Path) -> None:
    batch = rollouts()
    arrays = {"segment_offsets": np.array([0, 5], np.int64), "trajectory_offsets": np.array([0, 1, 1], np.int64)}
    write_step(run / "trajectories", 6, [f for t in batch for f in encode(t)], arrays, {})
    with pytest.raises(ValidationError, match="trajectory 1: 3 segments"):
        shown(run)


def test_the_command(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(run), "--trajectory", "1", "--colour", "ratio"])
    assert result.exit_code == 0 and "segment 2 of 3" in result.output
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "empty")])
    assert result.exit_code == 2 and "telemetry.keep_trajectories" in result.output
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "absent")])
    assert result.exit_code == 2 and "absent: does not exist" in result.output
    damaged = tmp_path / "step-000001.safetensors"
    damaged.write_bytes(json.dumps({}).encode())
    assert CliRunner().invoke(app, ["inspect", str(damaged)]).exit_code == 1
