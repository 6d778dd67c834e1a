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
    for cls, methods in part.get("autograd_functions", {}).items()
    for method, parameters in methods.items()
]


def _written(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = parameter.default
    summed = isinstance(default, dist.ReduceOp.RedOpType) and default == dist.ReduceOp.SUM
    return f"{parameter.name}={'ReduceOp.SUM' if summed else default}"


@pytest.mark.parametrize(("module", "name", "wanted"), FUNCTIONS + METHODS, ids=[f[1] for f in FUNCTIONS + METHODS])
def test_signature(module: str, name: str, wanted: list[str]) -> None:
    found: Any = importlib.import_module(module)
    assert name.partition(".")[0] in found.__all__
    for part in name.split("."):
        found = getattr(found, part)
    parameters = list(inspect.signature(found).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        wanted = [*wanted[:-1], wanted[-1].lstrip("*")]
    assert [_written(p) for p in parameters[: len(wanted)]] == wanted
    for extra in parameters[len(wanted) :]:
        assert extra.default is not inspect.Parameter.empty, f"{name}: extra parameter {extra.name} has no default"


def test_reduce_ops() -> None:
    from tritoncomm import collective

    for op in SURFACE["tritoncomm.collective"]["reduce_ops"]:
        assert getattr(collective.ReduceOp, op) is not None


def test_something_is_compared() -> None:
    assert len(FUNCTIONS) > 20
    assert len(METHODS) > 20
