"""Makes the virtual environments of agents of others: `agent_venvs.py [NAME ...]`; each is made once.

They go into the folder that SAO_AGENT_VENVS names, else into ~/.cache/sao/agents.

Their packages exclude one another, and the product's own, so each library has an environment of its own.
"""

import os
import shutil
import subprocess
import sys
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
    "verifiers": ["verifiers==0.4.0", "uv"],  # which starts programs with uv
    "verifiers-0.1": ["verifiers==0.1.14"],  # the last one whose environments play in process
}
NEWER = {"harbor"}  # need Python 3.12
ROOT = Path(os.environ.get("SAO_AGENT_VENVS") or Path.home() / ".cache" / "sao" / "agents")


def python_of(name: str) -> Path | None:
    """The interpreter of an environment; None where it is missing, or was made of other packages."""
    done = ROOT / name / ".complete"
    complete = done.is_file() and done.read_text() == "\n".join(PACKAGES[name])
    return ROOT / name / "bin" / "python" if complete else None


def maker(name: str) -> str | None:
    """The Python that makes an environment: this one, or a newer one where it has to be; None when there is none."""
    places = [str(place) for place in (Path.home() / ".pyenv" / "versions").glob("3.1[2-9]*/bin/python")]
    for found in (sys.executable, "python3.12", "python3.13", *places) if name in NEWER else (sys.executable,):
        new = "import sys; sys.exit(sys.version_info < (3, 12))" if name in NEWER else ""
        if shutil.which(found) and not subprocess.run([found, "-c", new], stderr=subprocess.DEVNULL).returncode:
            return found
    return None


def main() -> None:
    for name in sys.argv[1:] or PACKAGES:
        if python_of(name):
            continue
        folder, python = ROOT / name, maker(name)
        if python is None:
            print(f"{name}: needs Python 3.12, none in PATH or ~/.pyenv", file=sys.stderr)
            continue
        print(f"making {folder}: {', '.join(PACKAGES[name])}", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
        if subprocess.run(command).returncode:
            print(f"{name}: could not be installed", file=sys.stderr)
            continue
        (folder / ".complete").write_text("\n".join(PACKAGES[name]))


if __name__ == "__main__":
    main()
