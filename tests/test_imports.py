"""What an import brings in, and what waits for its first use: Triton, p2p and tensor."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tritoncomm_kernels
from jobs import run_job

ROOT = Path(__file__).parents[1]
COMPILERS = ("tune", "cli", "__main__")  # packages that are about kernels, and what imports them


def load_lazily() -> list[Any]:
    import tritoncomm

    early = sorted({"tritoncomm.p2p", "tritoncomm.tensor"} & set(sys.modules))
    names = {"p2p", "tensor", "ops"} <= set(dir(tritoncomm))
    used = [tritoncomm.p2p.P2PCommunicator, tritoncomm.tensor.ColoTensor, tritoncomm.core.ops.pack]
    try:
        tritoncomm.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    except AttributeError as error:
        return [early, names, len(used), str(error)]
    return []


def test_packages_are_there_after_the_import_and_loaded_at_their_first_use() -> None:
    assert run_job(load_lazily, [{}]) == [[[], True, 3, "module 'tritoncomm' has no attribute 'nothing'"]]


def mapping(path: str) -> list[float]:
    """A gather that no view can do, forward and backward, on the default group."""
    import tritoncomm

    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with tritoncomm.path(path):
        y = tritoncomm.mappings.all_to_all_sp2hp(x.expand(4, 2, 3).contiguous().flatten(1))
        y.square().sum().backward()
    assert x.grad is not None
    return [*y.flatten().tolist(), *x.grad.flatten().tolist()]


def triton_after_calls(store: str, world: int) -> list[Any]:
    """Whether Triton was imported: after the import, the call on CPU tensors, every other module, a forced call."""
    import torch.distributed as dist

    import tritoncomm

    imported = ["triton" in sys.modules]
    if store:
        rank = int(os.environ["PLACE"])
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tritoncomm.initialize(tensor=world)
    result = mapping("auto")
    imported.append("triton" in sys.modules)
    for path in sorted((ROOT / "tritoncomm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] not in COMPILERS:
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    imported.append("triton" in sys.modules)
    same = mapping("triton") == result
    return [*imported, "triton" in sys.modules, same]


@pytest.mark.parametrize("world", [1, 2])
def test_triton_is_imported_for_the_first_kernel(world: int, tmp_path: Path) -> None:
    """Not with the package, nor by calls on CPU tensors: it would be most of the time that the import takes."""
    store = str(tmp_path / "store") if world > 1 else ""
    answers = run_job(triton_after_calls, [{"PLACE": str(rank)} for rank in range(world)], store, world)
    assert answers == [[False, False, False, world > 1, True]] * world


def sympy_after_mappings(store: str, world: int) -> list[str]:
    """The mappings whose forward and backward imported sympy, which torch's symbolic shapes do."""
    import torch.distributed as dist
    from mapping_cases import MAPPINGS

    import tritoncomm

    rank = int(os.environ["PLACE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tritoncomm.initialize(tensor=world)
    importers = ["the import"] if "sympy" in sys.modules else []
    for name, (call, _, _) in MAPPINGS.items():
        x = torch.ones(4, 2, 4, requires_grad=True)
        call(x, dist.group.WORLD).square().sum().backward()
        assert x.grad is not None
        if "sympy" in sys.modules and not importers:
            importers.append(name)
    return importers


@pytest.mark.parametrize("world", [1, 2])
def test_no_mapping_imports_sympy(world: int, tmp_path: Path) -> None:
    """It takes half a second. ``backward(gradient)`` imports it in torch; that of a scalar does not."""
    ranks = [{"PLACE": str(rank)} for rank in range(world)]
    assert run_job(sympy_after_mappings, ranks, str(tmp_path / "store"), world) == [[]] * world


def test_names_of_kernels_are_looked_up_once() -> None:
    for name in tritoncomm_kernels.__all__:
        value = getattr(tritoncomm_kernels, name)
        assert vars(tritoncomm_kernels)[name] is value, name
        assert name in dir(tritoncomm_kernels)
    with pytest.raises(AttributeError, match="module 'tritoncomm_kernels' has no attribute 'nothing'"):
        tritoncomm_kernels.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_no_lazy_name_is_that_of_a_module() -> None:
    """Importing a module of a package sets its name in the package, over a function of that name."""
    modules = {path.stem for path in Path(tritoncomm_kernels.__path__[0]).glob("*.py")}
    assert modules.isdisjoint(tritoncomm_kernels._LAZY)
    assert modules.issuperset(tritoncomm_kernels._LAZY.values())
