"""Transforms of ``torch.func`` refuse shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shards import ranks_of, sharded
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import ReplicaSpec, ShardSpec

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "grad": lambda x: torch.func.grad(lambda y: (y**2).sum())(x),
    "vjp": lambda x: torch.func.vjp(lambda y: (y**2).sum(), x)[0],
    "jacrev": lambda x: torch.func.jacrev(lambda y: y.sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda y: (y**2).sum())(x),
    "functionalize": lambda x: torch.func.functionalize(lambda y: y.sum())(x),
    "parameters": lambda x: torch.func.grad(lambda ws: (ws["w"] ** 2).sum())({"w": x})["w"],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_refuse_shards(group: TorchGroup, name: str) -> None:
    full, pg = torch.arange(16.0).view(4, 4), ranks_of(group)
    expected = TRANSFORMS[name](full)
    for spec in (ShardSpec([0], [group.size()]), ShardSpec([-1], [group.size()])):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            TRANSFORMS[name](sharded(full, spec, pg))
    # Replicas, plain tensors, and a plain tensor after a refusal.
    torch.testing.assert_close(TRANSFORMS[name](sharded(full, ReplicaSpec(), pg)), expected)
    torch.testing.assert_close(TRANSFORMS[name](full), expected)


@pytest.mark.ranks(2)
def test_transforms_compile(group: TorchGroup) -> None:
    sharded(torch.ones(2, 2), ShardSpec([0], [2]), ranks_of(group))  # from now on shards are refused
    x = torch.arange(6.0).view(2, 3)
    for transform in (torch.vmap(torch.sum), torch.func.grad(lambda y: (y**2).sum())):
        torch.testing.assert_close(torch.compile(transform, backend="eager", fullgraph=True)(x), transform(x))
