"""A ratchet of names: ``python tools/names.py`` counts what a reader stumbles over; the counts may only fall.

Bound names that are no nouns (pronouns, adjectives, participles), functions that return a tuple whose positions have no
names, and class names with several meanings. Exits 1 where a count is above its limit, or a limit is too high.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LIMITS", "counts", "main"]

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tritoncomm", "kernels/tritoncomm_kernels")
NO_NOUNS = frozenset((
    "each", "own", "found", "taken", "words", "at", "which", "more", "what", "held", "known", "given", "mine", "every",
    "least", "most", "one", "other", "place", "asked",
))  # fmt: skip
LIMITS = {"names that are no nouns": 770, "anonymous tuples": 148, "class names of several meanings": 14}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the product."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def counts() -> dict[str, int]:
    """Return the counts of the tree, in the order of ``LIMITS``."""
    names: Counter[str] = Counter()
    classes: dict[str, set[Path]] = defaultdict(set)
    tuples = 0
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
            elif isinstance(node, ast.arg):
                names[node.arg] += 1
            elif isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
            elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                returned = ast.unparse(node.returns)
                tuples += returned.startswith("tuple[") and "," in returned and "..." not in returned
    stumbles = sum(names[name] for name in NO_NOUNS)
    return dict(zip(LIMITS, (stumbles, tuples, sum(len(paths) > 1 for paths in classes.values())), strict=True))


def main() -> int:
    """Compare the counts of the tree with their limits."""
    status = 0
    for what, count in counts().items():
        limit = LIMITS[what]
        if count != limit:
            status = 1
            advice = "name them, or return a NamedTuple" if count > limit else "lower the limit in tools/names.py"
            print(f"{what}: {count}, the limit is {limit}: {advice}")
    return status


if __name__ == "__main__":
    sys.exit(main())
