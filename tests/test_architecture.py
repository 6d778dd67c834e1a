"""Pages of docs/architecture: one per package, at most 90 lines, and every name on them exists in the code."""

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "architecture"
PACKAGES = {
    "kernels": "tritoncomm_kernels",
    "core": "tritoncomm.core",
    "mappings": "tritoncomm.mappings",
    "p2p": "tritoncomm.p2p",
    "reshard": "tritoncomm.reshard",
    "tensor": "tritoncomm.tensor",
    "debug": "tritoncomm.debug",
    "integrations": "tritoncomm.integrations",
    "recurrent_experts": "tritoncomm",
}
LINES, COLUMNS = 90, 130
FENCE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"(?<![\w./])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"(?<![\w./])(?:(?:[a-z][\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|json|yml)\b)")


def page_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text()


def code_of(text: str) -> Iterator[str]:
    """Every diagram of a page, and every text in backticks outside of them."""
    yield from FENCE.findall(text)
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def files_of(text: str) -> set[str]:
    """Files and folders that a page names; a folder ends in a slash."""
    return {path for code in code_of(text) for path in FILE.findall(code)}


def names_of(text: str) -> set[str]:
    """Dotted names of a page; words without a dot are free."""
    return {name for code in code_of(text) for name in DOTTED.findall(FILE.sub("", code))}


def _assigned(cls: type) -> set[str]:
    """Attributes of a class's instances: annotated, in ``__slots__``, or assigned to ``self`` in ``__init__``."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        for key in ("__annotations__", "__dataclass_fields__", "__slots__"):
            names |= {*vars(base).get(key, ())}
        if inspect.isfunction(init := vars(base).get("__init__")):
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
            except OSError:  # of a dataclass, whose fields are annotated
                continue
            stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            names |= {node.attr for node in stores if isinstance(node.ctx, ast.Store)}
    return names


def _follows(value: Any, attributes: list[str]) -> bool:
    """Whether an object has an attribute, that one the next, and so on; an instance attribute may only be the last."""
    for place, name in enumerate(attributes):
        if not hasattr(value, name):
            return inspect.isclass(value) and place == len(attributes) - 1 and name in _assigned(value)
        value = getattr(value, name)
    return True


def exists(name: str, package: str) -> bool:
    """Whether ``name`` begins with a module of the package, else of the library or torch, and leads to an attribute."""
    parts = name.split(".")
    for start in ([package], ["tritoncomm"], []):
        if not start and parts[0] not in ("tritoncomm_kernels", "torch"):
            continue
        # The longest part that is a module; a function may have the name of its module.
        for length in range(len(parts), 0, -1):
            try:
                module = importlib.import_module(".".join([*start, *parts[:length]]))
            except ModuleNotFoundError:
                continue
            return _follows(module, parts[length:])
    return False


def missing_files(text: str, package: str) -> set[str]:
    """Files of a page that are neither in the package nor in the repository."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folders = [Path(spec.submodule_search_locations[0]), ROOT]
    return {path for path in files_of(text) if not any((folder / path).exists() for folder in folders)}


def missing_names(text: str, package: str) -> set[str]:
    """Dotted names of a page that lead nowhere."""
    return {name for name in names_of(text) if not exists(name, package)}


def test_every_package_has_its_page() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PACKAGES)
    design = (ROOT / "docs" / "design.md").read_text()
    assert all(f"](architecture/{page}.md)" in design for page in PACKAGES)


@pytest.mark.parametrize("page", PACKAGES)
def test_every_name_exists(page: str) -> None:
    text = page_of(page)
    assert len(names_of(text)) > 20
    assert missing_names(text, PACKAGES[page]) == set()


@pytest.mark.parametrize("page", PACKAGES)
def test_every_file_exists(page: str) -> None:
    text = page_of(page)
    assert len(files_of(text)) > 5
    assert missing_files(text, PACKAGES[page]) == set()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [target for target in targets if not (FOLDER / target).exists()] == []


@pytest.mark.parametrize("page", PACKAGES)
def test_a_page_is_short(page: str) -> None:
    lines = page_of(page).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize(
    "name",
    [
        "eager.all_gathers", "eagle.all_gather", "backend.Handle.waits", "backend.Handle._works", "core.eager.gather",
        "plan.CollectivePlan.order", "torch.nothing", "torch.distributed.all_gathers", "debug.flight.Flights",
        "numpy.array", "backend.Handle._work.wait",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    text = f"`eager.all_gather` and `f({name}, 1)`\n```\neager.split -> {name}\n```\n"
    assert missing_names(text, "tritoncomm.core") == {name}
    assert missing_names(f"```\n-> {name}(x)\n```\n", "tritoncomm.core") == {name}


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("eager.all_gather", "core"), ("backend.Handle.wait", "core"), ("backend.Handle._work", "core"),
        ("plan.CollectivePlan.in_order", "core"), ("ops.path_for", "core"), ("record.hooks.observer", "core"),
        ("torch.distributed.all_reduce", "core"), ("debug.flight.flight", "core"), ("plan.Bucket.send", "reshard"),
        ("execute.Executor._group", "reshard"), ("rules.engine.OperatorCall.run", "tensor"),
        ("core.eager.split", "mappings"), ("tritoncomm_kernels.launch.Launch", "core"),
        ("redistribute.redistribute", "tensor"),
    ],
)  # fmt: skip
def test_a_name_that_exists_is_none(name: str, package: str) -> None:
    assert exists(name, f"tritoncomm.{package}")


def test_a_file_that_does_not_exist_is_found() -> None:
    text = "`eager.py`, `rules/`, `tests/helpers/pool.py`, `tests/pool.py`, `[S/W, h]`\n```\nfirst/second\n```\n"
    wrong = {"rules/", "tests/pool.py", "first/second"}
    assert files_of(text) == {"eager.py", "tests/helpers/pool.py"} | wrong
    assert missing_files(text, "tritoncomm.core") == wrong
    assert names_of(text) == set()
