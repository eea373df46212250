"""Counts the lines of the product: `size.py [--rust LINES] [--python LINES]`; exit code 1 above one of the two bars.

A line is what `wc -l` counts, blank lines and docstrings included; tests and generated files are not product.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {  # folders below ROOT -> endings of the files that count
    "rust": (("rust/core/src", "rust/python/src"), (".rs",)),
    "python": (("python/sao",), (".py",)),
}


def folders(part: str) -> Counter[str]:
    """Lines of each folder of a part; files that lie directly in `python/sao` count as that folder."""
    bases, endings = PARTS[part]
    lines: Counter[str] = Counter()
    for base in bases:
        for path in (ROOT / base).rglob("*"):
            if path.suffix in endings:
                inner = path.relative_to(ROOT / base).parts[:-1]
                lines["/".join((base, *inner[:1]))] += path.read_bytes().count(b"\n")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Prints the table of folders with the total of each part beside its bar."""
    parser = argparse.ArgumentParser(description="Lines of the product, by folder.")
    parser.add_argument("--rust", type=int, default=10_500, help="most lines of rust/core/src and rust/python/src")
    parser.add_argument("--python", type=int, default=17_500, help="most lines of python/sao")
    bars = vars(parser.parse_args(argv))
    above = False
    for part, bar in bars.items():
        found = folders(part)
        for folder, lines in found.most_common():
            print(f"{folder:<32}{lines:>8,}")
        print(f"{part + f' (at most {bar:,})':<32}{found.total():>8,}\n")
        above |= found.total() > bar
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
