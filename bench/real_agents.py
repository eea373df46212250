"""Agents of others, unchanged, at the endpoint: docs/results/agents.md.

    python bench/real_agents.py [NAME ...]

Makes the environments of their packages where they are missing (`scripts/agent_venvs.py`), and plays one episode in
each configuration of `tests/agents/real_agents.py`, with a scripted policy; names choose those that contain them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from agents.real_agents import AGENTS, Agent, check, play, venvs  # noqa: E402

FOUND, PAGE = RESULTS / "agents.json", ROOT / "docs" / "results" / "agents.md"


def measured(agent: Agent) -> dict[str, Any]:
    """What came of an episode; `error`: why it is not what it has to be."""
    row: dict[str, Any] = {"agent": agent.name, "dialect": agent.dialect}
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trajectory, engine = play(agent, Path(folder))
        row |= {"calls": len(engine.given), "reward": trajectory.reward, "segments": len(trajectory.segments)}
        row |= {key.removeprefix("agent_"): value for key, value in trajectory.metadata.items() if key in _COUNTS}
        row["sampled"] = sum(int(segment.action_mask.sum()) for segment in trajectory.segments)
        check(agent, trajectory, engine)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row | {"seconds": round(time.perf_counter() - began, 1)}


_COUNTS = ("agent_drift", "agent_rewritten", "agent_overruled", "agent_unforced", "agent_ignored")


def page(rows: list[dict[str, Any]]) -> str:
    """The table of the page."""
    names = (
        "agent",
        "dialect",
        "calls",
        "reward",
        "segments",
        "drift",
        "rewritten",
        "overruled",
        "unforced",
        "ignored",
    )
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(row.get(name, "-")) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Plays them, prints, and writes both files when all were played."""
    chosen = [agent for agent in AGENTS if not sys.argv[1:] or any(name in agent.name for name in sys.argv[1:])]
    for venv in sorted({agent.venv for agent in chosen}):
        subprocess.run([sys.executable, str(ROOT / "scripts" / "agent_venvs.py"), venv], check=True)
    rows = []
    for agent in chosen:
        rows.append(measured(agent))
        print(json.dumps(rows[-1]), flush=True)
    failed = [row["agent"] for row in rows if "error" in row]
    print(f"{len(rows) - len(failed)} of {len(rows)} configurations", *failed, sep="\n  ")
    if chosen == AGENTS:
        packages = {name: venvs.PACKAGES[name] for name in sorted({agent.venv for agent in AGENTS})}
        FOUND.write_text(json.dumps({"machine": machine(), "packages": packages, "rows": rows}, indent=1) + "\n")
        head, mark, tail = PAGE.read_text().split("<!-- table -->")[0], "<!-- table -->", "<!-- end of table -->"
        rest = PAGE.read_text().split(tail)[1]
        count = f"{len(rows) - len(failed)} of {len(rows)}"
        summary = f"{count} configurations finish an episode with a tool call and its reward."
        PAGE.write_text(f"{head}{mark}\n{summary}\n\n{page(rows)}\n{tail}{rest}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
