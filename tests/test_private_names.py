"""Private names of torch and of other packages: docs/private_names.md lists each one that is used, with its reason."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [*sorted((ROOT / "tritoncomm").rglob("*.py")), *sorted((ROOT / "kernels/tritoncomm_kernels").rglob("*.py"))]
MODULES = {"torch", "dist", "c10d", "distributed_c10d", "profiler", "forward_ad", "tl"}  # as files import them
OF_PYTHON = {"_asdict", "_replace", "_fields", "_make", "_getframe", "_current_frames"}
PRIVATE_MODULES = {"_C", "_dynamo", "_functorch"}
FOREIGN = ("torch", "triton", "transformers", "accelerate", "deepspeed")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _package(path: Path) -> str:
    """Name of the package or top module of a file, as the list has it."""
    if "tritoncomm_kernels" in path.parts:
        return "kernels"
    return path.relative_to(ROOT / "tritoncomm").parts[0].removesuffix(".py")


def _own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every name that a file of the product defines or assigns."""
    names: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Assign) and "__slots__" in {getattr(each, "id", "") for each in node.targets}:
                names |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}  # type: ignore
    return names


def _dotted(node: ast.AST) -> list[str]:
    """The names of ``a.b.c``; none of another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    parts = _dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*parts, node.attr] if parts and isinstance(node, ast.Attribute) else []


def _names_of(node: ast.AST, own: set[str]) -> list[str]:
    """Private foreign names that one node uses."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
        of_private_module = any(map(_is_private, (node.module or "").split(".")))
        return [each.name for each in node.names if of_private_module or _is_private(each.name)]
    if isinstance(node, ast.Attribute):
        parts = _dotted(node)
        if parts and parts[0] in MODULES:
            return [node.attr] if _is_private(node.attr) or parts[-2] in PRIVATE_MODULES else []
        return [node.attr] if _is_private(node.attr) and node.attr not in own else []
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"_[a-zA-Z]\w*[a-z0-9]", node.value)
    ):
        return [] if node.value in own else [node.value]  # for getattr
    return []


def used(texts: dict[Path, str]) -> dict[str, set[str]]:
    """Packages that use each private foreign name; modules such as ``_C`` stand under the names taken from them."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    own, found = _own_names(trees) | OF_PYTHON, defaultdict[str, set[str]](set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in _names_of(node, own):
                found[name].add(_package(path))
    return {name: packages for name, packages in found.items() if name not in PRIVATE_MODULES}


def listed(page: str) -> dict[str, set[str]]:
    """Names of the table in docs/private_names.md, and the packages that it says use them."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if "| `" in line]
    assert all(len(row) == 5 and all(row) for row in rows), "a row has a name, packages, a reason, versions, a remedy"
    return {name: set(row[1].split(", ")) for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}


def test_every_private_name_is_listed_with_its_reason() -> None:
    found = used({path: path.read_text() for path in SOURCES})
    assert listed((ROOT / "docs/private_names.md").read_text()) == found


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch\ntorch._C._new()", "_new"),
        ("import torch\ntorch._C.New()", "New"),
        ("from torch._C import New", "New"),
        ("from torch.distributed import distributed_c10d\ndistributed_c10d._new", "_new"),
        ("def f(group):\n    return group._new", "_new"),
        ("def f(x):\n    return getattr(x, '_new', None)", "_new"),
        ("import torch\ntorch.ops.aten._new(1)", "_new"),
    ],
)
def test_a_new_private_name_is_found(line: str, name: str) -> None:
    assert used({ROOT / "tritoncomm/core/plan.py": line}) == {name: {"core"}}


def test_own_names_and_public_ones_are_not_listed() -> None:
    text = "import torch\nclass A:\n    def _f(self):\n        return self._f, torch.empty(1)._replace()\n"
    assert used({ROOT / "tritoncomm/core/plan.py": text}) == {}
