"""Who may import whom, who may call collectives, and what every module has to have."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import tritoncomm_kernels

import tritoncomm

ROOT = Path(__file__).parents[1]
# From the bottom up; a module imports from lower layers, and modules of one layer import each other only downward
# in the order they are written here.
LAYERS = [
    ["tritoncomm_kernels"],
    ["errors"],
    ["record", "variables", "launchers", "sizes"],
    ["plan"],
    ["copies"],
    ["ops", "fused"],
    ["autograd", "ownership"],
    ["groups", "meshes", "validation"],
    ["c10d"],
    ["handle", "routes"],
    ["traced"],
    ["uneven", "engine"],
    ["collective"],
    ["agreement"],
    ["runtime"],
    ["dims", "along"],
    ["regions", "exchanges"],
    ["mappings"],
    ["p2p"],
    ["tensor"],
    ["arguments"],
    ["tune"],
    ["cost", "steps", "movements", "explain", "selftest", "doctor"],
    ["demo"],
    ["__init__"],
    ["terminal", "suite", "pictures", "planning", "commands"],
    ["cli", "__main__"],
]
ORDER = {name: place for place, name in enumerate(name for layer in LAYERS for name in layer)}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "barrier", "all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base",
    "alltoall_base", "allreduce", "allgather", "isend", "irecv", "batch_isend_irecv", "send", "recv",
}  # fmt: skip
SENDERS = {"c10d.py", "traced.py", "exchange.py"}
SOURCES = sorted((ROOT / "tritoncomm").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels" / "tritoncomm_kernels").rglob("*.py"))


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST, package: str) -> set[str]:
    """Dotted names of everything imported anywhere in the file, relative imports resolved."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package.split(".")
                base = ".".join([*kept[: len(kept) - node.level + 1], *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def _layer(path: Path) -> str:
    return path.relative_to(ROOT / "tritoncomm").parts[0].removesuffix(".py")


def _upward(path: Path, text: str) -> list[str]:
    """Imports of ``path`` that do not go down."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    mine, wrong = _layer(path), []
    for name in sorted(_imports(ast.parse(text), package)):
        top, _, rest = name.partition(".")
        if top == "tritoncomm_kernels":
            target = top
        elif top == "tritoncomm":
            target = rest.partition(".")[0]
            target = target if target in ORDER else "__init__"
        else:
            continue
        if target != mine and ORDER[target] >= ORDER[mine]:
            wrong.append(name)
        if {mine, target} == {"p2p", "tensor"}:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_go_down(path: Path) -> None:
    assert _layer(path) in ORDER, f"{_id(path)} has no place in the layers"
    assert _upward(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("plan.py", "from tritoncomm import ops"),
        ("ops.py", "import tritoncomm.mappings"),
        ("errors.py", "import tritoncomm_kernels\nfrom tritoncomm import record"),
        ("engine.py", "def f():\n    from tritoncomm.collective import all_gather"),
        ("p2p/engine.py", "from ..tensor import ColoTensor"),
        ("mappings.py", "from . import collective, cli"),
    ],
)
def test_an_upward_import_is_seen(module: str, line: str) -> None:
    assert _upward(ROOT / "tritoncomm" / module, line)


@pytest.mark.parametrize("path", KERNELS, ids=_id)
def test_kernels_know_nothing_above(path: Path) -> None:
    for name in _imports(ast.parse(path.read_text()), "tritoncomm_kernels"):
        assert name.partition(".")[0] != "tritoncomm"
        assert not name.startswith("torch.distributed")


def _collective_calls(text: str) -> list[str]:
    """Calls of torch.distributed's or a process group's collectives: on a module or a group, not on our own."""
    ours = {"engine", "traced", "c10d", "collective", "self", "p2p", "kernels", "reference", "ops"}
    found = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES:
            owner = ast.unparse(node.func.value)
            if owner.split(".")[0] not in ours and ("dist" in owner or "group" in owner or "c10d" in owner):
                found.append(ast.unparse(node.func))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found += [alias.name for alias in node.names if alias.name in COLLECTIVES]
            if "functional_collectives" in (node.module or ""):
                found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name not in SENDERS], ids=_id)
def test_only_three_modules_send(path: Path) -> None:
    assert _collective_calls(path.read_text()) == []


def test_a_stray_collective_is_seen() -> None:
    assert _collective_calls("import torch.distributed as dist\ndist.all_reduce(x)")
    assert _collective_calls("group.allreduce([x], o).wait()")
    assert _collective_calls("from torch.distributed import all_gather_into_tensor")
    assert _collective_calls((ROOT / "tritoncomm" / "c10d.py").read_text())


@pytest.mark.parametrize("folder", ["kernels", "tests", "bench", "docs"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def _modules(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package.__name__, *(module.name for module in found if not module.name.endswith("__main__"))]


MODULES = _modules(tritoncomm) + _modules(tritoncomm_kernels)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_explicit_and_documented(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("typer", "rich", "matplotlib"):
            pytest.skip(f"{error.name} is not installed")
        raise
    assert module.__doc__, f"{name} has no docstring"
    if name.partition(".")[0] == "tritoncomm":
        assert isinstance(module.__all__, list | tuple), name
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        here = getattr(value, "__module__", "").startswith("tritoncomm")
        if here and (inspect.isclass(value) or inspect.isfunction(value)):
            assert value.__doc__, f"{name}.{public} has no docstring"


def test_every_launcher_has_a_twin() -> None:
    from tritoncomm_kernels import reference

    for name in ("pack", "unpack", "reduce"):
        ours, twin = getattr(tritoncomm_kernels, name), getattr(reference, name)
        assert inspect.signature(ours) == inspect.signature(twin), name
    for name in reference.__all__:
        assert callable(getattr(tritoncomm_kernels, name)), name


@pytest.mark.parametrize("path", SOURCES + KERNELS, ids=_id)
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{_id(path)} has {lines} lines"
