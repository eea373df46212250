"""Makes the virtual environments of agents of others: `agent_venvs.py FOLDER [NAME ...]`; each is made once.

Their packages exclude one another, and the product's own, so each library has an environment of its own.
"""

import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "openai-agents": ["openai-agents==0.24.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "pydantic-ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "langgraph": ["langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"],
    "mini-swe-agent": ["mini-swe-agent==2.4.6"],
    "harbor": ["harbor==0.25.0"],
    "anthropic": ["anthropic==2.14.0"],
    "openai": ["openai==3.57.0"],
    "verifiers": ["verifiers==0.4.0"],
}


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or list(PACKAGES)
    for name in names:
        folder = root / name
        done = folder / ".complete"
        wanted = "\n".join(PACKAGES[name])
        if done.exists() and done.read_text() == wanted:
            continue
        print(f"making {folder}: {', '.join(PACKAGES[name])}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
        if subprocess.run(command).returncode:
            print(f"{name}: could not be installed", file=sys.stderr)
            continue
        done.write_text(wanted)


if __name__ == "__main__":
    main()
