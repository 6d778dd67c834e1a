"""Names, parameter order and defaults of the systems whose API this is; `seed_surface.json` has them."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SURFACE: dict[str, Any] = json.loads((Path(__file__).parent / "seed_surface.json").read_text())
FUNCTIONS = [(m, name, parameters) for m, part in SURFACE.items() for name, parameters in part["functions"].items()]
METHODS = [
    (module, f"{cls}.{method}", parameters)
    for module, part in SURFACE.items()
    for cls, methods in (part.get("autograd_functions", {}) | part.get("classes", {})).items()
    for method, parameters in methods.items()
    if parameters != "property"
]
PROPERTIES = [
    (module, cls, name)
    for module, part in SURFACE.items()
    for cls, members in part.get("classes", {}).items()
    for name, kind in members.items()
    if kind == "property"
]
ENUMS = [(m, name, members) for m, part in SURFACE.items() for name, members in part.get("enums", {}).items()]
SUBMODULES = [
    (f"{m}.{name}", names) for m, part in SURFACE.items() for name, names in part.get("submodule_names", {}).items()
]


def _written(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = parameter.default
    if isinstance(default, str):
        return f"{parameter.name}={default!r}"
    summed = isinstance(default, dist.ReduceOp.RedOpType) and default == dist.ReduceOp.SUM
    return f"{parameter.name}={'ReduceOp.SUM' if summed else default}"


@pytest.mark.parametrize(("module", "name", "wanted"), FUNCTIONS + METHODS, ids=[f[1] for f in FUNCTIONS + METHODS])
def test_signature(module: str, name: str, wanted: list[str]) -> None:
    found: Any = importlib.import_module(module)
    assert name.partition(".")[0] in found.__all__
    for part in name.split("."):
        found = getattr(found, part)
    parameters = list(inspect.signature(found).parameters.values())
    if "*" in wanted:
        after = wanted[wanted.index("*") + 1 :]
        assert {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY} >= {
            p.partition("=")[0] for p in after
        }
        wanted = [p for p in wanted if p != "*"]
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        wanted = [*wanted[:-1], wanted[-1].lstrip("*")]
    assert [_written(p) for p in parameters[: len(wanted)]] == wanted
    for extra in parameters[len(wanted) :]:
        assert extra.default is not inspect.Parameter.empty, f"{name}: extra parameter {extra.name} has no default"


@pytest.mark.parametrize(("module", "cls", "name"), PROPERTIES, ids=[p[2] for p in PROPERTIES])
def test_property(module: str, cls: str, name: str) -> None:
    assert isinstance(getattr(getattr(importlib.import_module(module), cls), name), property)


@pytest.mark.parametrize(("module", "name", "members"), ENUMS, ids=[e[1] for e in ENUMS])
def test_enum(module: str, name: str, members: list[str]) -> None:
    assert [member.name for member in getattr(importlib.import_module(module), name)] == members


@pytest.mark.parametrize(("module", "names"), SUBMODULES, ids=[s[0] for s in SUBMODULES])
def test_submodule(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


def test_data() -> None:
    for module, part in SURFACE.items():
        found = importlib.import_module(module)
        for name in part.get("data", ()):
            assert name in found.__all__, (module, name)
        for name in part.get("submodules", ()):
            importlib.import_module(f"{module}.{name}")


def test_reduce_ops() -> None:
    from tritoncomm import collective

    for op in SURFACE["tritoncomm.collective"]["reduce_ops"]:
        assert getattr(collective.ReduceOp, op) is not None


def test_something_is_compared() -> None:
    assert len(FUNCTIONS) > 20
    assert len(METHODS) > 20
