"""What the learner does with each causal architecture of transformers, on tiny random models.

Of each: the layout of rows that is found; the largest distance of float32 log-probs from `model(input_ids)` on each
segment alone; of float64 gradients from the same; of losses and norms of gradients in three whole learner steps (of
critic and policy) from a plain float64 reference that scores one segment at a time. Contexts are beyond windows,
chunks, sparse selection and position scaling. Also writes `docs/results/architectures.md`.
`python bench/architectures.py`
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from common import RESULTS, report

TESTS = Path(__file__).parents[1] / "tests"
PAGE = """# Architectures

One tiny random model of each of %d causal architectures of transformers, on ragged batches with segments beyond window,
chunk, sparse selection (8 positions) and position scaling (24); how rows are chosen is told in
[layouts](../explanation/layouts.md). Log-probs: float32, largest distance from `model(input_ids)` on each segment
alone. Gradients: float64, largest distance from the same, relative to the largest. Three steps: losses and norms of
gradients of policy and critic, float64, against a plain reference, relative (`python bench/architectures.py`; the tests
do the first two for all and the third for some).

Some numbers are those of float32: these models compute scaling, routers or states in float32 whatever the type. Where a
router's scores nearly tie, rounding may choose another expert: then the three steps are made with another batch.

%s
"""


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.path[0] = str(TESTS)  # instead of this folder, which has a `learner` of its own
    from learner.architectures import TINY, check, three_steps

    torch.set_num_threads(1)
    rows = []
    for kind in TINY:
        layout, logprobs, gradients = check(kind)
        for first in (0, 10):
            with tempfile.TemporaryDirectory() as folder:
                losses = three_steps(kind, Path(folder), first)["losses"]
            if losses < 1e-5:
                break
        rows.append([kind, layout.rows, f"{logprobs:.0e}", f"{gradients:.0e}", f"{losses:.0e}"])
    columns = ["architecture", "rows", "log-probs", "gradients", "three steps"]
    report("architectures", columns, rows, f"{len(rows)} architectures")
    lines = ["| " + " | ".join(columns) + " |", "| --- | --- | ---: | ---: | ---: |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    page = RESULTS.parents[1] / "docs" / "results" / "architectures.md"
    page.write_text(PAGE % (len(rows), "\n".join(lines)))


if __name__ == "__main__":
    main()
