"""Who may import whom, who may call collectives, and what every module has to have."""

import ast
import functools
import graphlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tritoncomm_kernels

import tritoncomm
from docs import draw

ROOT = Path(__file__).parents[1]
# From the bottom up. A module imports from lower layers, or from what stands before it in its own.
LAYERS = [
    ["tritoncomm_kernels"],
    ["errors"],
    ["record", "variables", "launchers", "parsing"],
    ["core"],
    ["groups", "ops"],
    ["collective", "mappings", "debug", "runtime"],
    ["reshard"],
    ["p2p", "tensor", "parallel", "ulysses", "recurrent", "experts"],
    ["integrations"],
    ["explain", "tune", "doctor", "verify", "bench"],
    ["__init__"],
    ["demo"],
    ["cli", "__main__"],
]
ORDER = {name: place for place, name in enumerate(name for layer in LAYERS for name in layer)}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "barrier", "all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base",
    "alltoall_base", "allreduce", "allgather", "isend", "irecv", "batch_isend_irecv", "send", "recv",
}  # fmt: skip
SENDERS = {"backend.py", "compiled.py", "transport.py"}
PEERS = ROOT / "tritoncomm" / "bench"  # what others send, to measure ours beside it
SOURCES = sorted((ROOT / "tritoncomm").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels" / "tritoncomm_kernels").rglob("*.py"))


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _statements(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import of a file, and whether it is inside a function; those for type checkers only are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, in_function
        elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            yield from _statements(node, in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _imports(tree: ast.AST, package: str, nested: bool = True) -> set[str]:
    """Dotted names of what a file imports, relative imports resolved; inside functions too, if ``nested``."""
    names: set[str] = set()
    for node, in_function in _statements(tree):
        if in_function and not nested:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = node.module or ""
            if node.level:
                kept = package.split(".")
                base = ".".join([*kept[: len(kept) - node.level + 1], *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def _entry(dotted: str) -> str:
    """The entry of the package that a name belongs to: ``tritoncomm.core.ops.pack`` is ``core``."""
    top = dotted.removeprefix("tritoncomm.").partition(".")[0]
    return top if (ROOT / "tritoncomm" / top).is_dir() or (ROOT / "tritoncomm" / f"{top}.py").is_file() else "__init__"


def _upward(path: Path, tree: ast.Module) -> list[str]:
    """Imports of ``path`` from a higher layer."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    mine = _entry(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    if path.parent == ROOT / "tritoncomm" and path.stem == "__init__":
        mine = "__init__"
    wrong = []
    for name in sorted(_imports(tree, package)):
        first = name.partition(".")[0]
        if first not in ("tritoncomm_kernels", "tritoncomm"):
            continue
        target = first if first == "tritoncomm_kernels" else _entry(name)
        if ORDER[target] > ORDER[mine] or {mine, target} == {"p2p", "tensor"}:
            wrong.append(name)
    return wrong


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULE_PATHS = {_module_of(path): path for path in SOURCES}


def _module_graph(nested: bool = True) -> dict[str, set[str]]:
    """Which modules every module imports: anywhere, or at its top."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULE_PATHS.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for target in _imports(_tree(path), package, nested):
            module = target if target in MODULE_PATHS else target.rpartition(".")[0]
            if module in MODULE_PATHS and module != name and not name.startswith(f"{module}."):
                graph.setdefault(name, set()).add(module)
    return graph


def _package_graph() -> dict[str, set[str]]:
    """Which entries of the package every entry imports anywhere."""
    graph: dict[str, set[str]] = {}
    for name, targets in _module_graph().items():
        aims = {_entry(target) for target in targets if target != "tritoncomm"}
        if name != "tritoncomm":
            graph.setdefault(_entry(name), set()).update(aims - {_entry(name)})
    return graph


def _is_circular(graph: dict[str, set[str]]) -> bool:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_imports_go_down(path: Path) -> None:
    assert _entry(_module_of(path)) in ORDER, f"{_id(path)} has no place in the layers"
    assert _upward(path, _tree(path)) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/ops.py", "import tritoncomm.mappings"),
        ("core/ops.py", "from tritoncomm import ops"),
        ("errors.py", "import tritoncomm_kernels\nfrom tritoncomm import record"),
        ("core/eager.py", "def f():\n    from tritoncomm.collective import all_gather"),
        ("p2p/hop.py", "from ..tensor import ColoTensor"),
        ("mappings/general.py", "from .. import cli"),
    ],
)
def test_an_upward_import_is_seen(module: str, line: str) -> None:
    assert _upward(ROOT / "tritoncomm" / module, ast.parse(line))


def test_the_picture_has_these_imports() -> None:
    drawn = {name: imports - {"tritoncomm_kernels"} for name, imports in draw.package_imports().items()}
    graph = {name: imports - {"__init__"} for name, imports in _package_graph().items() if name != "__main__"}
    assert {name: imports for name, imports in drawn.items() if imports} == {k: v for k, v in graph.items() if v}


def test_imports_have_no_circle() -> None:
    at_top, anywhere, packages = _module_graph(nested=False), _module_graph(), _package_graph()
    assert len(at_top) > 60
    assert "core" in packages["mappings"]
    for graph in (at_top, anywhere, packages):
        assert not _is_circular(graph)
    for more in ({"tritoncomm.errors": {"tritoncomm.cli"}}, {"tritoncomm.core.plan": {"tritoncomm.core.ops"}}):
        assert _is_circular(at_top | more)


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_an_import_inside_a_function_says_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    for node, in_function in _statements(_tree(path)):
        beside = lines[max(node.lineno - 2, 0) : node.end_lineno]
        assert not in_function or any("#" in line for line in beside), f"{_id(path)}:{node.lineno}: no reason stated"


@pytest.mark.parametrize("path", KERNELS, ids=_id)
def test_kernels_know_nothing_above(path: Path) -> None:
    for name in _imports(_tree(path), "tritoncomm_kernels"):
        assert name.partition(".")[0] != "tritoncomm"
        assert not name.startswith("torch.distributed")


def _collective_calls(tree: ast.Module) -> list[str]:
    """Calls of torch.distributed's or a process group's collectives: on a module or a group, not on our own."""
    ours = {"eager", "compiled", "backend", "collective", "self", "p2p", "kernels", "torch_path", "ops"}
    found = []
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


_VIEW = re.compile(r"contiguous\(\)(\.view\(-1\)|\.flatten\(\))?\.view\((torch\.|[\w.]*dtype\b)")


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "kernels").rglob("*.py"))], ids=_id)
def test_one_function_reads_memory_as_another_dtype(path: Path) -> None:
    """``contiguous()`` leaves odd strides of dims of size 1, at which ``view(dtype)`` stumbles; ``dense`` does not."""
    assert not _VIEW.search(path.read_text()), "call core.ops.reinterpreted"


def test_a_stray_view_is_seen() -> None:
    assert _VIEW.search("return x.contiguous().view(torch.uint8)")
    assert _VIEW.search("x = x.contiguous().view(-1).view(weights.dtype)")
    assert not _VIEW.search("x.contiguous().view(-1, 4)")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name not in SENDERS and p.parent != PEERS], ids=_id)
def test_only_three_modules_send(path: Path) -> None:
    assert _collective_calls(_tree(path)) == []


def _started(tree: ast.Module) -> set[str]:
    """Collectives that a module starts by functions of ``core.backend``."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "backend"]
    return {call.attr for call in names} & {
        "all_gather", "all_gather_list", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter",
        "reduce_scatter_list",
    }  # fmt: skip


def test_collectives_start_in_one_module_and_exchanges_in_another() -> None:
    started = {path.relative_to(ROOT / "tritoncomm").as_posix(): _started(_tree(path)) for path in SOURCES}
    starters = {name for name, collectives in started.items() if collectives}
    # What ranks compare before a call, integers on the host, is neither.
    assert starters == {"core/eager.py", "core/exchange.py", "core/agreement.py"}
    assert started["core/exchange.py"] == {"all_to_all"}
    assert started["core/agreement.py"] == {"all_gather", "all_reduce"}


def test_a_stray_collective_is_seen() -> None:
    assert _collective_calls(ast.parse("import torch.distributed as dist\ndist.all_reduce(x)"))
    assert _collective_calls(ast.parse("group.allreduce([x], o).wait()"))
    assert _collective_calls(ast.parse("from torch.distributed import all_gather_into_tensor"))
    assert _collective_calls(_tree(ROOT / "tritoncomm" / "core" / "backend.py"))


@pytest.mark.parametrize("folder", ["kernels", "tests", "tools", "bench", "docs"])
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
    from tritoncomm_kernels import torch_path

    copies = [f"{kind}_{unit}" for unit in ("rows", "segments") for kind in ("gather", "scatter")]
    for name in ("pack", "unpack", "reduce", "copy_segments", *copies):
        ours, twin = getattr(tritoncomm_kernels, name), getattr(torch_path, name)
        assert inspect.signature(ours) == inspect.signature(twin), name
    for name in torch_path.__all__:
        assert callable(getattr(tritoncomm_kernels, name)), name


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=_id)
def test_tests_import_helpers_and_never_each_other(path: Path) -> None:
    for name in _imports(_tree(path), "tests"):
        first = name.partition(".")[0]
        assert first != "tests", f"{_id(path)} imports {name}"
        assert not first.startswith("test_"), f"{_id(path)} imports {name}"
