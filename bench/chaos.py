"""Chaos: 300 random kills, stops and cut links in one run, and nothing lost. `python bench/chaos.py [EVENTS [SEED]]`.

What is done and what must hold: `tests/e2e/chaos.py`. Writes results/chaos.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from common import RESULTS, machine  # noqa: E402
from tests.e2e.chaos import Chaos  # noqa: E402

LIMIT_S = 3600.0


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    events, seed = given + [300, 1][len(given) :]
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    from tiny_model import make_folder

    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        chaos = Chaos(folder / "run", make_folder(folder / "model"), seed, events, steps=6 * events)
        try:
            chaos.play(LIMIT_S)
            result = chaos.check()
        except BaseException:
            kept = Path(tempfile.mkdtemp(prefix="chaos-kept-"))
            (folder / "run").rename(kept / "run")
            print(f"kept: {kept}")
            raise
    print(json.dumps(result, indent=1))
    if events >= 300:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "chaos.json").write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
