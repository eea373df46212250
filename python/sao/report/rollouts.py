"""The recorded rollouts of a run for its page: a row of a table for each, and its conversation in a piece of its own.

A piece is JSON, compressed (zlib) and as base64, which a browser unpacks when its rollout is opened. There is room for
`room_bytes` of pieces; the newest steps get theirs first, and every step may use an equal share of what is left.
"""

import base64
import json
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sao.errors import ValidationError, WireError
from sao.report.conversation import blocks
from sao.telemetry.recording import Numbers, Recorded, read_step, recorded_steps, step_path, versions
from sao.telemetry.texts import Texts
from sao.trajectory import Segment

_MOST = 5000  # rollouts of a page
_DIGITS = 4  # significant ones of a number that is shown for a token
COLUMNS = (  # of the table, in order: name, and what it is
    ("step", "optimizer step that trained on it"),
    ("task", "number of the task"),
    ("reward", "of the whole rollout"),
    ("end", "finished, or why it was cut"),
    ("tokens", "of all segments, context included"),
    ("sampled", "action tokens"),
    ("turns", "of the policy, in all segments"),
    ("segments", "context windows; summaries apart"),
    ("summaries", "that the policy wrote"),
    ("lag", "largest number of versions behind"),
    ("advantage", "mean over trained tokens"),
    ("ratio", "mean probability ratio, current to rollout"),
    ("gap", "largest difference of log-probs, learner to engine, in nats"),
    ("drift", "calls after a turn whose text gives other ids than those sampled"),
    ("seconds", "from reset to reward"),
)


class Rollouts(NamedTuple):
    """rows: of `COLUMNS`, None where not known. pieces: by row, None where there was no room. notes: for the reader.

    seconds: what a rollout's time goes to, by cause, as a mean.
    """

    rows: list[list[Any]]
    pieces: list[str | None]
    notes: list[str]
    seconds: dict[str, float]


def read(run_folder: Path, room_bytes: int) -> Rollouts:
    """The recorded steps of a run, newest first; what cannot be read, or is too much, is noted and left out."""
    folder, texts = run_folder / "trajectories", Texts.of(run_folder)
    found, seconds = Rollouts([], [], [], {}), Counter[str]()
    steps = recorded_steps(folder)
    for left, step in zip(range(len(steps), 0, -1), reversed(steps), strict=True):
        if len(found.rows) >= _MOST:
            found.notes.append(f"the {left} recorded steps up to step {step} are left out")
            break
        share = room_bytes // left
        try:
            recorded = read_step(step_path(folder, step))
            for item in recorded.rollouts():
                row, piece = _row(step, item), _piece(item, texts) if share > 0 else None
                if piece is not None and len(piece) <= share:
                    share, room_bytes = share - len(piece), room_bytes - len(piece)
                elif piece is not None:
                    piece, share = None, 0
                found.rows.append(row)
                found.pieces.append(piece)
                seconds.update(item.trajectory.timings_s)
        except (WireError, ValidationError) as error:
            found.notes.append(f"step {step} ends after {len(found.rows)} rollouts of the table: {error}")
    found.seconds.update({name: _short(total / len(found.rows)) for name, total in seconds.items()})
    if without := sum(piece is None for piece in found.pieces):
        found.notes.append(
            f"{without} of {len(found.rows)} rollouts are in the table alone: there was no room for more"
        )
    return found


def _row(step: int, item: Recorded) -> list[Any]:
    it = item.trajectory
    summaries = sum(segment.kind == "summary" for segment in it.segments)
    turns = sum(int(np.count_nonzero(np.diff(segment.action_mask.astype(np.int8)) == 1)) for segment in it.segments)
    lag, gap = item.finite("lag"), np.abs(item.finite("gap"))
    advantage, ratio = item.finite("advantage"), item.finite("ratio")
    return [
        step,
        it.task_ordinal,
        it.reward,
        it.termination.reason or it.termination.kind,
        it.n_tokens,
        it.n_actions,
        turns,
        len(it.segments) - summaries,
        summaries,
        int(lag.max()) if lag.size else None,
        _short(advantage.mean()) if advantage.size else None,
        _short(ratio.mean()) if ratio.size else None,
        _short(gap.max()) if gap.size else None,
        it.metadata.get("drift"),
        _short(sum(it.timings_s.values())),
    ]


def _piece(item: Recorded, texts: Texts) -> str:
    it = item.trajectory
    shown = {
        "id": it.id.hex(),
        "task": it.task_ordinal,
        "attempt": it.attempt,
        "env": it.env,
        "reward": it.reward,
        "end": [it.termination.kind, it.termination.reason],
        "temperature": it.temperature,
        "turn_rewards": [list(one) for one in it.turn_rewards],
        "seconds": {name: _short(value) for name, value in it.timings_s.items()},
        "metadata": it.metadata,
        "segments": [_segment(*parts, texts) for parts in zip(it.segments, item.numbers, strict=True)],
    }
    packed = zlib.compress(json.dumps(shown, separators=(",", ":")).encode())
    return base64.b64encode(packed).decode()


def _segment(segment: Segment, numbers: Numbers | None, texts: Texts) -> dict[str, Any]:
    pieces, mask = texts.pieces(segment.token_ids), segment.action_mask
    before = np.concatenate([[0], np.cumsum(mask)])  # sampled tokens before each
    return {
        "kind": segment.kind,
        "tokens": segment.n_tokens,
        "trained": numbers is not None,
        "blocks": [
            {
                "role": block.role,
                "part": block.part,
                "tokens": block.stop - block.start,
                **(
                    {"pieces": pieces[block.start : block.stop], "at": int(before[block.start])}
                    if block.sampled
                    else {"text": "".join(pieces[block.start : block.stop])}
                ),
            }
            for block in blocks(segment, texts, pieces)
        ],
        "numbers": {
            "id": segment.token_ids[mask].tolist(),
            "version": versions(segment)[mask].tolist(),
            **(
                {name: _shortened(values[mask]) for name, values in numbers._asdict().items() if name != "gap"}
                if numbers is not None
                else {}
            ),
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _shortened(values: NDArray[np.float64]) -> list[float | None]:
    return [_short(value) if math.isfinite(value) else None for value in values.tolist()]
