"""Kills: runs that are killed again and again, resumed each time, and must end as if nothing had happened.

200 by default: 134 with a learner that holds nothing but the list of what it was trained on (so that a start takes
little), 66 with the real one. `python bench/kills.py [--kills N] [--real N] [--first-seed N]`; every seed is printed,
and one alone is repeated with `--seed SEED LEARNER KILLS`. `--table` shows the last result by learner and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402
from tests.e2e.kills import Story  # noqa: E402

NAMES = {"torch": "real learner", "plain": "stand-in"}
PER_STORY = {"plain": 13, "torch": 10}
STEPS = {"plain": 60, "torch": 40}
SLOWEST_S = {"plain": 3.0, "torch": 8.0}  # of a kill at a random time after the start


def tell(folder: Path, model: Path, learner: str, seed: int, kills: int) -> Story:
    """One run from its first start to its end; prints what happened. Raises `AssertionError` with the seed."""
    began = time.monotonic()
    order = "window" if seed % 2 else "completion"
    story = Story(folder / f"{learner}-{seed}", model, learner, seed, steps=STEPS[learner], order=order)
    story.play(kills, SLOWEST_S[learner])
    story.check()
    seconds, total = time.monotonic() - began, story.kills.total()
    print(f"seed {seed}: {learner}, {order}: {total} kills {dict(story.kills)} in {seconds:.0f} s", flush=True)
    return story


def made(folder: Path) -> Path:
    """A model folder."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    (folder / "model").mkdir()
    return make_folder(folder / "model")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of both learners together")
    parser.add_argument("--real", type=int, metavar="N", default=66, help="of these, in runs with the real learner")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument(
        "--seed", nargs=3, metavar=("SEED", "LEARNER", "KILLS"), help="one run; LEARNER: plain or torch"
    )
    parser.add_argument("--table", action="store_true", help="of the last result, by learner")
    found = parser.parse_args()
    if not 0 <= found.real <= found.kills:
        parser.error(f"--real {found.real}: expected 0 to --kills = {found.kills}")
    return found


def main() -> None:
    given = arguments()
    if given.table:
        print(table(json.loads((RESULTS / "kills.json").read_text())["stories"]))
        return
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        model = made(folder)
        if given.seed:
            seed, learner, kills = given.seed
            tell(folder, model, learner, int(seed), int(kills))
            return
        began, stories = time.monotonic(), []
        workers = max(1, min(2, os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            for learner, count in (("torch", given.real), ("plain", given.kills - given.real)):
                seed = given.first_seed + (500 if learner == "torch" else 0)
                done = 0
                while done < count:
                    batch = [min(PER_STORY[learner], count - done - PER_STORY[learner] * i) for i in range(workers)]
                    jobs = [
                        pool.submit(tell, folder, model, learner, seed + i, n) for i, n in enumerate(batch) if n > 0
                    ]
                    seed += len(jobs)
                    finished = [job.result() for job in jobs]
                    done += sum(story.kills.total() for story in finished)
                    stories += finished
        save(stories, time.monotonic() - began)


def by_learner(stories: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was done to runs with each learner, from the stories of a result."""
    found: dict[str, dict[str, Any]] = {}
    for story in stories:
        mine = found.setdefault(NAMES[story["learner"]], {"runs": 0, "starts": 0, "kills": Counter(), "points": set()})
        mine["runs"] += 1
        mine["starts"] += len(story["starts"])
        for life in story["starts"]:
            mine["kills"].update(life["killed"])
            if life["killed"] and " " not in life["wish"]:
                mine["points"].add(life["wish"].partition(":")[0])
    return {
        name: {"runs": mine["runs"], "starts": mine["starts"], "kills": mine["kills"].total()}
        | {"by_process": dict(mine["kills"].most_common()), "points": sorted(mine["points"])}
        for name, mine in found.items()
    }


def table(stories: list[dict[str, Any]]) -> str:
    """The same as a table for a page: one column a learner."""
    found = by_learner(stories)
    rows = [("", *found), ("---", *("---:" for _ in found))]
    rows += [(name, *(str(one[name]) for one in found.values())) for name in ("runs", "starts", "kills")]
    for role in sorted({role for one in found.values() for role in one["by_process"]}):
        rows.append((f"of them {role}", *(str(one["by_process"].get(role, 0)) for one in found.values())))
    rows.append(("named points that were hit", *(str(len(one["points"])) for one in found.values())))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def save(stories: list[Story], seconds: float) -> None:
    """Writes results/kills.json and prints the totals, and a table by learner."""
    roles: Counter[str] = Counter()
    points: Counter[str] = Counter()
    for story in stories:
        roles += story.kills
        for life in story.lives:
            what = str(life["wish"])
            killed = sum(life["killed"].values())  # type: ignore[attr-defined]
            points["random time" if " " in what else what.partition(":")[0]] += killed
    told = [
        {
            "seed": story.seed,
            "learner": story.learner,
            "order": story.order,
            "steps": story.steps,
            "kills": story.kills.total(),
            "starts": story.lives,
        }
        for story in stories
    ]
    result = {
        "machine": machine(),
        "seconds": round(seconds),
        "kills": roles.total(),
        "by_process": dict(roles.most_common()),
        "by_point": dict((+points).most_common()),
        "starts": sum(len(story.lives) for story in stories),
        "lost_tasks": 0,  # `Story.check` has raised otherwise
        "tasks_trained_twice": 0,
        "by_learner": by_learner(told),
        "stories": told,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "stories"}, indent=1))
    print(table(told))


if __name__ == "__main__":
    main()
