"""Prints the requirements of the package and of some of its extras, one a line: `requirements.py EXTRA...`.

An extra that names the package itself (`sao[train]`) is followed. The package is not in the list: it is built apart.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Requirements of the base and of `extras`, each once, in order. Raises `KeyError` for an unknown extra."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            found.update(dict.fromkeys(requirements(own[1].split(",")) if own else [line]))
    return list(found)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
