"""Docstrings for a blind reading: the functions of four packages, and a draw of twenty from each.

A reader sees the drawn docstrings alone and writes what each function does; a second one compares that with the code.

    python tools/reading.py             # prints the drawn docstrings, numbered
    python tools/reading.py --names     # prints the functions they are of
    python tools/reading.py --list      # writes tools/reading.json from the tree
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PACKAGES", "draw", "functions"]

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
PACKAGES = ("reshard", "debug", "p2p", "core")
SEED, DRAWN = 17, 20


def functions(package: str) -> dict[str, str]:
    """Docstrings of the functions, methods and properties of a package, by ``file:qualified name``, in sorted order."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tritoncomm" / package).glob("*.py")):
        found |= {f"{path.name}:{name}": text for name, text in _documented(ast.parse(path.read_text()), "")}
    return dict(sorted(found.items()))


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef) and (text := ast.get_docstring(child)):
                yield name, text
            yield from _documented(child, f"{name}.")


def draw() -> dict[str, list[str]]:
    """Names of the drawn functions by package, from the list in the tree."""
    listed = json.loads(LIST.read_text())
    return {package: random.Random(SEED).sample(listed[package], DRAWN) for package in PACKAGES}


def main() -> None:
    """Write the list, or print the draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="write the list of all functions")
    parser.add_argument("--names", action="store_true", help="print names instead of docstrings")
    options = parser.parse_args()
    if options.list:
        LIST.write_text(json.dumps({package: list(functions(package)) for package in PACKAGES}, indent=1) + "\n")
        return
    for package, names in draw().items():
        known = functions(package)
        for number, name in enumerate(names, 1):
            text = known.get(name, "gone")
            print(f"[{package} {number}] {name if options.names else text}\n")


if __name__ == "__main__":
    main()
