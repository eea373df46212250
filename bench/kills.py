"""200 kills: runs that are killed again and again, resumed each time, and must end as if nothing had happened.

170 with a learner that holds nothing but the list of what it was trained on (so that a start takes little), 30 with the
real one. `python bench/kills.py [KILLS [TORCH_KILLS [FIRST_SEED]]]`; every seed is printed, and one alone is repeated
with `python bench/kills.py --seed SEED LEARNER KILLS`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402
from tests.e2e.kills import Story  # noqa: E402

PER_STORY = {"plain": 13, "torch": 10}
STEPS = {"plain": 60, "torch": 40}
SLOWEST_S = {"plain": 3.0, "torch": 8.0}  # of a kill at a random time after the start


def tell(folder: Path, model: Path, learner: str, seed: int, kills: int) -> Story:
    """One run from its first start to its end; prints what happened. Raises `AssertionError` with the seed."""
    began = time.monotonic()
    discipline = "window" if seed % 2 else "completion"
    story = Story(folder / f"{learner}-{seed}", model, learner, seed, steps=STEPS[learner], discipline=discipline)
    story.play(kills, SLOWEST_S[learner])
    story.check()
    seconds, total = time.monotonic() - began, story.kills.total()
    print(f"seed {seed}: {learner}, {discipline}: {total} kills {dict(story.kills)} in {seconds:.0f} s", flush=True)
    return story


def made(folder: Path) -> Path:
    """A model folder."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    (folder / "model").mkdir()
    return make_folder(folder / "model")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        model = made(folder)
        if sys.argv[1:2] == ["--seed"]:
            seed, learner, kills = sys.argv[2:5]
            tell(folder, model, learner, int(seed), int(kills))
            return
        given = [int(word) for word in sys.argv[1:]]
        wanted, torch_kills, first = given + [200, 30, 1000][len(given) :]
        began, stories = time.monotonic(), []
        workers = max(1, min(2, os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            for learner, count in (("torch", torch_kills), ("plain", wanted - torch_kills)):
                seed = first if learner == "plain" else first + 500
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


def save(stories: list[Story], seconds: float) -> None:
    """Writes results/kills.json and prints the totals."""
    roles: Counter[str] = Counter()
    points: Counter[str] = Counter()
    for story in stories:
        roles += story.kills
        for life in story.lives:
            what = str(life["wish"])
            killed = sum(life["killed"].values())  # type: ignore[attr-defined]
            points["random time" if " " in what else what.partition(":")[0]] += killed
    result = {
        "machine": machine(),
        "seconds": round(seconds),
        "kills": roles.total(),
        "by_process": dict(roles.most_common()),
        "by_point": dict((+points).most_common()),
        "starts": sum(len(story.lives) for story in stories),
        "lost_tasks": 0,  # `Story.check` has raised otherwise
        "tasks_trained_twice": 0,
        "stories": [
            {
                "seed": story.seed,
                "learner": story.learner,
                "discipline": story.discipline,
                "steps": story.steps,
                "kills": story.kills.total(),
                "starts": story.lives,
            }
            for story in stories
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "stories"}, indent=1))


if __name__ == "__main__":
    main()
