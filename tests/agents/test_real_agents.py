"""Agents of others train unchanged: every configuration plays an episode with a tool at the real endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents.real_agents import AGENTS, EXAMPLES, Agent, check, play, venvs
from rollout.families import templates

pytest.importorskip("aiohttp", reason="needs the extra `agents`")


@pytest.mark.timeout(300)
@pytest.mark.skipif(not templates(), reason="trl is not installed: pip install --no-deps trl")
@pytest.mark.parametrize("agent", AGENTS, ids=[agent.name for agent in AGENTS])
def test_an_agent_plays_an_episode(tmp_path: Path, agent: Agent) -> None:
    if venvs.python_of(agent.venv) is None:
        pytest.skip("needs agents' packages: python scripts/agent_venvs.py")
    check(agent, *play(agent, tmp_path))


def test_every_example_is_played_and_stands_on_its_page() -> None:
    examples = {path for path in EXAMPLES.glob("*.py") if path.name != "task.py"}
    assert examples - {EXAMPLES / "prices.py"} <= {agent.program for agent in AGENTS}
    pages = [page.read_text() for page in (EXAMPLES.parents[1] / "docs" / "how-to" / "agents").glob("*.md")]
    for example in examples:
        assert any(f"```python\n{example.read_text()}```" in page for page in pages), example
