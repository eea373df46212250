"""`sao report` on a run with 2,000 recorded rollouts, twenty of them of 32k tokens: its size, and how fast it opens.

The browser is Chromium without a window, and loads the file from disk; the seconds are those until its `load` event,
when the curves are drawn, and from a click on a row until the tokens of the rollout are there.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import report

sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))
from report import runs
from report.browser import Browser

from sao.report import page

STEPS, EACH, LONG_TOKENS, ROUNDS = 20, 100, 32_000, 5
NOTE = "one run, medians of five loads"


def make(folder: Path) -> Path:
    """The run: 100 rollouts in each of 20 steps, one of them long, a tenth of whose tokens were sampled."""
    run = runs.make(folder, "many", STEPS)
    short = [(runs.SYSTEM + runs.TURN, runs.CALL), (runs.RESULT + runs.TURN, "It costs 3 crowns.<|im_end|>")]
    turn = ("y" * 2700 + runs.RESULT + runs.TURN, "I will look at the next one of them now. " * 7)
    batch = [runs.rollout(number, short) for number in range(EACH - 1)]
    batch += [runs.rollout(EACH - 1, [turn] * (LONG_TOKENS // 3000))]
    for step in range(1, STEPS + 1):
        runs.write_rollouts(run, step, batch)
    return run


def main() -> None:
    """Measures and writes."""
    with tempfile.TemporaryDirectory() as made:
        run, target = make(Path(made)), Path(made) / "report.html"
        began = time.perf_counter()
        page.write([run], target)
        write_s = time.perf_counter() - began
        loads, tables, rollouts = [], [], []
        with Browser(Path(made) / "browser") as browser:
            for _ in range(ROUNDS):
                loads.append(browser.open(target))
                began = time.perf_counter()
                browser.click("[data-tab=rollouts]")
                assert "2000 of 2000" in browser.run("document.getElementById('count').textContent")
                tables.append(time.perf_counter() - began)
                browser.run("order = {column: NAMES.indexOf('tokens'), down: true}; drawTable()")
                began = time.perf_counter()
                browser.click("#table td")
                browser.until("document.querySelectorAll('.token').length > 2000")
                rollouts.append(time.perf_counter() - began)
            assert browser.errors == []
        row = [2000, target.stat().st_size / 1e6, write_s, *map(statistics.median, (loads, tables, rollouts))]
    names = ["rollouts", "file_mb", "write_s", "load_s", "table_s", "rollout_32k_s"]
    report("report_page", names, [[round(value, 3) for value in row]], NOTE)


if __name__ == "__main__":
    main()
