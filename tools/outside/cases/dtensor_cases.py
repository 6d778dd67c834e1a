"""Every redistribution that PyTorch's tests of DTensor try, as a ``reshard``: torch's shards, strides and gradients."""

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.reshard import reshard

RANKS = 4
Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]  # mesh, shape, source, target


def cases() -> Iterator[Case]:
    """All pairs of placements on a line and on a grid, of shapes that the ranks divide and of others."""
    one = [Replicate(), Shard(0), Shard(1), Shard(-1), Partial()]
    rows = (
        [(RANKS * 3 + more, 3) for more in range(3)] + [(3, RANKS * 3 + more) for more in range(2)] + [(2, RANKS + 1)]
    )
    for shape, source, target in itertools.product(rows, one, one):
        yield (RANKS,), shape, (source,), (target,)
    two = list(itertools.product([Replicate(), Shard(0), Shard(1), Shard(2), Partial()], repeat=2))
    for shape, source, target in itertools.product([(8, 8, 8), (7, 9, 5)], two, two):
        yield (2, RANKS // 2), shape, source, target


@pytest.fixture(scope="session")
def meshes() -> Iterator[dict[tuple[int, ...], Any]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    yield {shape: init_device_mesh("cpu", shape) for shape in ((RANKS,), (2, RANKS // 2))}
    dist.destroy_process_group()


def moved(mesh: Any, shape: tuple[int, ...], placements: tuple[Any, ...], move: Any) -> tuple[DTensor, DTensor]:
    """A DTensor with these placements, moved, and its gradient."""
    torch.manual_seed(0)
    whole = [Replicate() if isinstance(each, Partial) else each for each in placements]
    x = distribute_tensor(torch.randn(shape), mesh, whole)
    if whole != [*placements]:
        x = DTensor.from_local(x.to_local(), mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
    x = x.detach().requires_grad_()
    out = move(x)
    out.to_local().square().sum().backward()
    return out, x.grad  # pyright: ignore


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_reshard_is_redistribute(meshes: dict[tuple[int, ...], Any], case: Case) -> None:
    mesh, shape, source, target = meshes[case[0]], *case[1:]
    try:
        expected, gradient = moved(mesh, shape, source, lambda x: x.redistribute(mesh, target))
    except Exception as error:
        pytest.skip(f"torch: {error}")
    try:
        out, own = moved(mesh, shape, source, lambda x: reshard(x, None, (mesh, target)))
    except UnsupportedError as error:
        assert any(isinstance(each, Partial) for each in (*source, *target)), error  # noqa: PT017
        pytest.skip(f"refused: {error}")
    assert (out.shape, out.stride(), out.placements) == (expected.shape, expected.stride(), expected.placements)
    assert torch.equal(out.to_local(), expected.to_local())
    assert own.placements == gradient.placements
    assert torch.equal(own.to_local(), gradient.to_local())
