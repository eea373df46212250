"""What a page says of a run first: the questions of who looks at it for the first time, answered from its records."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sao.telemetry.metrics import watched, wilson
from sao.telemetry.sinks import Record

Finding = tuple[str, str, str]  # question, answer, and "good", "fair", "bad" or ""


def findings(steps: Sequence[Record], evals: Sequence[Record], ended: Record | None) -> Iterator[Finding]:
    """The questions that the records answer, with answers and what these mean for the run."""
    if ended is None:
        yield "How did it end?", "it goes on, or it was killed", ""
    else:
        yield "How did it end?", str(ended["reason"]), "bad" if ended.get("exit_code") else "good"
    if not steps:
        yield "Did it train?", "no step yet", "bad"
        return
    if evals:
        yield _policy(evals[0], evals[-1])
    tenth = max(1, len(steps) // 10)
    begin, end = (_mean(part, "critic/explained_variance") for part in (steps[:tenth], steps[-tenth:]))
    if math.isfinite(end):
        text = f"in the last steps it explains {end:.2f} of the variance of the returns"
        text += f", in the first {begin:.2f}" if math.isfinite(begin) else ""
        yield "Does the critic learn?", f"{text}; 0 is a constant's", _grade(-end, -0.2, 0)
    else:
        yield "Does the critic learn?", "there is none, or all rollouts of a batch ended alike", ""
    cut, timed_out = (_mean(steps[-tenth:], f"rollout/{name}") for name in ("truncated", "timed_out"))
    if cut > 0:
        clock = f", {timed_out:.1%} by the wall clock" if timed_out > 0 else ""
        text = f"in the last steps {cut:.1%} were cut short{clock}: see `end` in the table of rollouts"
        yield "Do rollouts come to their end?", text, _grade(cut, 0.05, 0.3)
    actions, masked = (sum(record.get(f"tokens/{name}") or 0 for record in steps) for name in ("action", "masked"))
    share = masked / max(1, actions)
    text = f"{share:.1%} of the action tokens have no policy gradient"
    yield "How much is not trained on?", text, _grade(share, 0.1, 0.5)
    dropped = counts(steps[-1], "broker/rollouts_dropped/")
    if lost := sum(dropped.values()):
        share = lost / max(1, lost + (steps[-1].get("broker/trained") or 0))
        reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.most_common())
        yield "What was dropped?", f"{lost} rollouts ({share:.1%}): {reasons}", _grade(share, 0.05, 0.3)
    rows = [watched(record) for record in steps]
    learner, generators = (_mean(rows, name) for name in ("learner_idle", "generator_idle"))
    if math.isfinite(learner) and math.isfinite(generators):
        advice = "neither side waits for the other"
        if abs(learner - generators) > 0.1:
            waits = learner > generators
            advice = "more generators would help" if waits else "a faster learner would help"
        yield "What limits it?", f"the learner idles {learner:.0%}, the generators {generators:.0%}: {advice}", ""


def _policy(first: Record, last: Record) -> Finding:
    begin, begin_low, begin_high = rate(first["success"], first["n"])
    end, low, high = rate(last["success"], last["n"])
    text = f"held-out success {begin:.3f} at step {first['step']}, "
    text += f"{end:.3f} ({low:.3f} to {high:.3f}) at step {last['step']}"
    if low > begin_high:
        return "Does the policy learn?", text, "good"
    if high < begin_low:
        return "Does the policy learn?", f"{text}: it became worse", "bad"
    return "Does the policy learn?", f"{text}: the intervals overlap", "fair"


def rate(success: float | None, n: int) -> tuple[float, float, float]:
    """A success rate with its interval (95 %); NaN where there is none."""
    return (math.nan,) * 3 if success is None else (success, *wilson(round(success * n), n))


def counts(record: Record, prefix: str) -> Counter[str]:
    """The counts of a record whose names begin so, by the rest of the name."""
    return Counter({name.removeprefix(prefix): n for name, n in record.items() if name.startswith(prefix) and n})


def _grade(value: float, good: float, fair: float) -> str:
    return "good" if value < good else "fair" if value < fair else "bad"


def _mean(records: Iterable[Mapping[str, Any]], name: str) -> float:
    values = [
        value for record in records if isinstance(value := record.get(name), int | float) and math.isfinite(value)
    ]
    return sum(values) / len(values) if values else math.nan
