"""Installs a wheel where there is nothing else and runs what the pages promise of it: `try_wheel.py WHEEL [--train]`.

Without `--train`: an empty virtual environment, no Rust in PATH, no torch. With it: the extra, and the quickstart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_CORE_BYTES = 10 * 2**20
QUICKSTART = ROOT / "examples" / "quickstart"


def programs() -> list[str]:
    """The Python programs of the README and of the page on embedding, as they stand there."""
    pages = (ROOT / "README.md", ROOT / "docs" / "how-to" / "embed.md")
    return [code for page in pages for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)]


def needs_torch(program: str) -> bool:
    """Whether a program imports torch itself."""
    return bool(re.search(r"^import torch$", program, re.M))


class Place:
    """An empty virtual environment in `folder` with a wheel in it; PATH has its programs and the system's."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        kept = {name: value for name, value in os.environ.items() if re.match(r"HOME$|LANG|LC_|TMPDIR$|PIP_", name)}
        self.environment = kept | {"PATH": f"{self.bin}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.run("pip", "install", "--quiet", f"{wheel.resolve()}{extra and f'[{extra}]'}", timeout_s=1800)

    def run(self, *command: str | Path, code: int = 0, timeout_s: float = 120) -> str:
        """Runs a program of the environment; its output. Raises `RuntimeError` if it ends with another exit code."""
        program = [self.bin / command[0], *command[1:]]
        done = subprocess.run(
            program, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        said = done.stdout + done.stderr
        if done.returncode != code:
            raise RuntimeError(f"{command}: exit code {done.returncode}, expected {code}\n{said}")
        return said

    def program(self, code: str) -> None:
        """Runs a program of a page."""
        file = self.folder / "program.py"
        file.write_text(code)
        self.run("python", file)


def core_bytes(wheel: Path) -> int:
    """The size of the compiled core, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.getinfo("sao/_core.abi3.so").file_size


def parts(place: Place) -> None:
    """What works without torch, and what is said of the rest."""
    place.run("python", "-c", "import sao; assert 'site-packages' in sao.__file__, sao.__file__")
    for package in ("torch", "transformers", "vllm"):
        place.run("python", "-c", f"import {package}", code=1)
    for code in programs():
        if not needs_torch(code):
            place.program(code)
    assert "buffer" in place.run("sao", "bench", "buffer", "--quick")
    assert "sao[train]" in place.run("python", "-c", "from sao import dis_loss", code=1)
    assert "sao[train]" in place.run("sao", "doctor", code=1)
    for engine, extra in (("torch", "train"), ("vllm", "vllm")):
        command = ("train", QUICKSTART / "run.toml", "--dry-run", f"generator.engine={engine}")
        assert f"sao[{extra}]" in place.run("sao", *command, f"model.path={place.folder}", code=2)


def training(place: Place) -> None:
    """What the extra `train` adds: the remaining programs, and a run that learns."""
    for code in programs():
        place.program(code)
    model, run_file = place.folder / "runs" / "quickstart-model", QUICKSTART / "run.toml"
    place.run("python", QUICKSTART / "make_model.py", model, timeout_s=300)
    place.run("sao", "train", run_file, timeout_s=900)
    lines = (place.folder / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    *_, last = (record for line in lines if (record := json.loads(line))["kind"] == "eval")
    assert last["success"] >= 0.95, f"it did not learn: {last}"


def main() -> None:
    """Raises what went wrong."""
    parser = argparse.ArgumentParser(description="Tries a wheel in an empty environment.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--train", action="store_true", help="with the extra train; downloads torch")
    arguments = parser.parse_args()
    assert core_bytes(arguments.wheel) < MOST_CORE_BYTES, f"the core has {core_bytes(arguments.wheel):,} bytes"
    with tempfile.TemporaryDirectory(prefix="sao-wheel-") as folder:
        if arguments.train:
            training(Place(Path(folder), arguments.wheel, "train"))
        else:
            parts(Place(Path(folder), arguments.wheel))
    print(f"{arguments.wheel.name}: {'trains' if arguments.train else 'its parts work'} in an empty environment")


if __name__ == "__main__":
    main()
