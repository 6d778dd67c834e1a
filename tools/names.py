"""A ratchet of names: ``python tools/names.py`` counts what a reader stumbles over; the counts may only fall.

Bound names that are no nouns (pronouns, adjectives, participles), functions that return a tuple whose positions have no
names, class names with several meanings, and the most names that a function binds: readers understood functions of 11
names at once, and looked twice at those of 18. Exits 1 where a count is above its limit, or a limit is too high.
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
    "least", "most", "one", "other", "place", "asked", "received", "sent", "started", "kept", "made", "arriving",
    "arrived", "gathered", "added", "moved", "counted", "handed", "staying", "leaving", "theirs", "ours", "others",
    "rest", "same", "before", "after", "both",
))  # fmt: skip
LIMITS = {
    "names that are no nouns": 1032, "anonymous tuples": 144, "class names of several meanings": 8,
    "most names bound by a function": 38, "most names bound by a kernel": 63,
}  # fmt: skip


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the product."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def counts() -> dict[str, int]:
    """Return the counts of the tree, in the order of ``LIMITS``."""
    names: Counter[str] = Counter()
    classes: dict[str, set[Path]] = defaultdict(set)
    largest = {True: 0, False: 0}  # by whether the function is a kernel, whose pointers and sizes are arguments
    tuples = 0
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
            elif isinstance(node, ast.arg):
                names[node.arg] += 1
            elif isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
            elif isinstance(node, ast.FunctionDef):
                returned = "" if node.returns is None else ast.unparse(node.returns)
                tuples += returned.startswith("tuple[") and "," in returned and "..." not in returned
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                largest[is_kernel] = max(largest[is_kernel], len(_bound(node)))
    stumbles, homonyms = sum(names[name] for name in NO_NOUNS), sum(len(paths) > 1 for paths in classes.values())
    return dict(zip(LIMITS, (stumbles, tuples, homonyms, largest[False], largest[True]), strict=True))


def _bound(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function binds, its arguments and functions inside included."""
    nodes = list(ast.walk(function))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


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
