"""A soak: 100,000 rollouts through the real broker, agents of which a seventh misbehave, in 24 ways, and nothing grows.

`python bench/soak.py [ROLLOUTS]`; what is done and what must hold: `tests/e2e/soak.py`, `tests/e2e/soaking.py`. From
100,000 on it writes results/soak.json, docs/results/soak.md and its picture.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from common import RESULTS, machine  # noqa: E402
from tests.e2e import soak  # noqa: E402
from tests.e2e.soaking import BATCH, ROLES, Soaking  # noqa: E402

WHOLE = 100_000
LIMIT_S = 4 * 3600.0
PAGE = ROOT / "docs" / "results" / "soak.md"
WATCHED = ("supervisor", *ROLES)


def main() -> None:
    rollouts = int(sys.argv[1]) if len(sys.argv) > 1 else WHOLE
    share = sum(kind.share for _, kind, _ in soak.KINDS if kind.reason == soak.TRAINED) / 10_000
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        steps = -int(-rollouts * share // BATCH)
        run = Soaking(folder / "run", make_folder(folder / "model"), steps)
        try:
            run.play(LIMIT_S)
            found = run.check()
        except BaseException:
            kept = Path(tempfile.mkdtemp(prefix="soak-kept-"))
            (folder / "run").rename(kept / "run")
            print(f"kept: {kept}")
            raise
    result = {"machine": machine(), **found, "growth": growth(run.samples), "samples": thinned(run.samples)}
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1))
    if found["rollouts"] >= WHOLE:
        (RESULTS / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
        picture(run.samples, PAGE.with_suffix(".png"))
        PAGE.write_text(page(result))


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each number of each process: the median of the second tenth of the run, that of the last, and the largest."""
    tenth = max(1, len(samples) // 10)
    early, late, found = samples[tenth : 2 * tenth] or samples, samples[-tenth:], {}
    for key in samples[-1]:
        if key != "at_s":
            found[key] = {
                "second_tenth": median(row[key] for row in early),
                "last_tenth": median(row[key] for row in late),
                "largest": max(row[key] for row in samples),
            }
    return found


def thinned(samples: list[dict[str, float]], most: int = 200) -> list[dict[str, float]]:
    """So many of them, evenly."""
    return samples[:: -(-len(samples) // most)]


def picture(samples: list[dict[str, float]], path: Path) -> None:
    """Memory and descriptors over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    FigureCanvasAgg(figure)
    minutes = [row["at_s"] / 60 for row in samples]
    for axis, (unit, title) in zip(
        figure.subplots(1, 2), (("MiB", "memory, MiB"), ("descriptors", "open descriptors")), strict=True
    ):
        for role in WATCHED:
            axis.plot(minutes, [row[f"{role}/{unit}"] for row in samples], lw=1, label=role)
        axis.set(title=title, xlabel="minutes", ylim=(0, None))
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def page(result: dict[str, Any]) -> str:
    """The page with the figures."""
    host, dropped, minutes = result["machine"], result["dropped_by_reason"], result["seconds"] / 60
    lines = [
        "# Soak: agents that misbehave",
        "",
        "Written by `bench/soak.py`, raw numbers in [soak.json](../../bench/results/soak.json); what is done and what",
        "must hold stands in `tests/e2e/soak.py` and `tests/e2e/soaking.py`. A shorter form runs with every change.",
        "",
        f"One `sao train`: {result['rollouts']:,} rollouts through the real broker over real sockets, with the",
        f"scripted engine and a learner without torch, in {minutes:.0f} minutes on {host['cores']} shared cores",
        f"({host['cpu']}).",
        "Every rollout is played by an agent that calls the generator's endpoint over HTTP. A process each costs too",
        f"much for all: {result['programs']:,} of them are real programs, the others play inside the generator's",
        "process, over the same endpoint. How an agent behaves follows from the seed of its task, so what must come of",
        "each is known before.",
        "",
        "| rollouts | |",
        "| --- | ---: |",
        f"| trained, each exactly once | {result['trained']:,} |",
        *(f"| dropped: `{reason}` | {count:,} |" for reason, count in dropped.items()),
        f"| unfinished when the last step was made | {result['open_at_the_end']:,} |",
        "| trained although it had to be dropped, dropped under another reason, lost | 0, 0, 0 |",
        "",
        "Books: "
        + ", ".join(f"{count:,} tokens {name}" for name, count in result["tokens"].items())
        + f", {sum(result['tokens_dropped'].values()):,} dropped.",
        "",
        "Each number in the second tenth of the run, in the last tenth, and the largest:",
        "",
        "| process | memory, MiB | open descriptors | threads |",
        "| --- | ---: | ---: | ---: |",
    ]
    for role in WATCHED:
        cells = []
        for unit in ("MiB", "descriptors", "threads"):
            numbers = result["growth"][f"{role}/{unit}"]
            cells.append(", ".join(f"{numbers[name]:.0f}" for name in ("second_tenth", "last_tenth", "largest")))
        lines.append(f"| {role} | {' | '.join(cells)} |")
    others = result["growth"]["others"]
    lines += [
        "",
        "The learner of this run is the stand-in of the tests, which holds a list of all that it was trained on, and",
        "so grows. Further processes at a time (agents and what they start), again:",
        f"{others['second_tenth']:.0f}, {others['last_tenth']:.0f}, {others['largest']:.0f}; none was left at the end.",
        "",
        "![Memory and descriptors over time](soak.png)",
        "",
        "| how the agent behaves | rollouts | what must come of it |",
        "| --- | ---: | --- |",
    ]
    for name, kind, _ in soak.KINDS:
        lines.append(
            f"| {name} | {result['by_way'].get(name, 0):,} | {f'`{kind.reason}`' if kind.reason else 'trained'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
