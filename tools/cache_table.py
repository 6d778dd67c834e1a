"""Table of the caches: ``python tools/cache_table.py [--write]`` reads the product, and writes ``docs/caches.md``.

A cache is a function under ``lru_cache`` or ``cache``, or a mapping whose keys are referred to weakly. Its row has the
names of its key, the most entries that it holds, and the owner with whom it goes.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "Cache", "caches", "main", "page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/caches.md"
FOLDERS = ("tritoncomm", "kernels/tritoncomm_kernels")
_WEAK = ("PerGroup", "WeakKeyDictionary")
_HEAD = """# Caches

Written by `python tools/cache_table.py --write`; a test compares it with the code. Every cache has a bound, and none
has a process group, a mesh, a tensor or a model in a key, which it would keep alive. Mappings refer to keys weakly.
[The design](design.md#calls-counters-and-the-observer) says what the caches of a call save.

| cache | key | entries | owner |
|---|---|---|---|
"""


class Cache(NamedTuple):
    """One cache.

    Attributes:
        name: module and function or variable.
        key: names and annotations of the key's parts.
        entries: the most entries; "one a key" where keys are referred to weakly.
        owner: with whom it goes.
    """

    name: str
    key: tuple[str, ...]
    entries: str
    owner: str


def caches() -> list[Cache]:
    """Return all caches of the product, by name."""
    found: list[Cache] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
            found += _Module(ast.parse(path.read_text()), module).caches()
    return sorted(found)


class _Module:
    """Functions and constants of a module, by name."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self.tree, self.name = tree, name
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        targets = [(node.targets[0], node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        self.values = {target.id: value for target, value in targets if isinstance(target, ast.Name)}

    def caches(self) -> Iterator[Cache]:
        """Yield the caches of this module."""
        for function in self.functions.values():
            for decorator in function.decorator_list:
                entries = self._entries(decorator)
                if entries is not None:
                    key = _key_of(function)
                    yield Cache(f"{self.name}.{function.name}", key, entries if key else "1", "process")
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                yield from self._of_assignment(node, node.value)

    def _of_assignment(self, node: ast.Assign | ast.AnnAssign, call: ast.Call) -> Iterator[Cache]:
        """Yield the cache that an assignment makes, if it makes one."""
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        owner = "its object" if isinstance(target, ast.Attribute) else "process"
        name = f"{self.name}.{ast.unparse(target)}"
        if ast.unparse(call.func).split(".")[-1] in _WEAK:
            text = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            kind = text.strip("'").partition("[")[2].split(",")[0].strip("]") if "Weak" in text else "ProcessGroup"
            yield Cache(name, (kind,), "one a key", "its key")
            return
        entries = self._entries(call.func)
        if entries is not None:
            wrapped = call.args[0]
            function = self.functions.get(ast.unparse(wrapped))
            key = (ast.unparse(wrapped),) if function is None else _key_of(function)
            yield Cache(name, key, entries, owner)

    def _entries(self, maker: ast.expr) -> str | None:
        """Return the bound of ``lru_cache`` or ``cache``, or of a name for one; None for another expression."""
        if isinstance(maker, ast.Name) and maker.id in self.values:
            maker = self.values[maker.id]
        if ast.unparse(maker) in ("cache", "functools.cache"):
            return "unbounded"
        if not isinstance(maker, ast.Call) or ast.unparse(maker.func) not in ("lru_cache", "functools.lru_cache"):
            return None
        bound = maker.args[0] if maker.args else maker.keywords[0].value
        return ast.unparse(self.values.get(ast.unparse(bound), bound))


def _key_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Return the parameters of a function with their annotations."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return tuple(
        [f"{x.arg}: {ast.unparse(x.annotation)}" if x.annotation else x.arg for x in parameters if x.arg != "self"]
    )


def page() -> str:
    """Return the page."""
    rows = []
    for cache in caches():
        key = ", ".join(part.split(":")[0] for part in cache.key) or "-"
        rows.append(f"| `{cache.name}` | {key} | {cache.entries} | {cache.owner} |\n")
    return _HEAD + "".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="Table of the caches.")
    parser.add_argument("--write", action="store_true", help="write docs/caches.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
