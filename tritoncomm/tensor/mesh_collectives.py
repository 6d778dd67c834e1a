"""Collectives of ``CommSpec`` (ColossalAI's contract) over one group of a mesh, each with its adjoint as backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm import record
from tritoncomm.core import eager
from tritoncomm.core.autograd import direct
from tritoncomm.errors import ShapeError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.group_registry import Members
from tritoncomm.tensor.layout import shares_storage
from tritoncomm.tensor.redistribute import unchanged

__all__ = ["MeshCollective", "run_collective"]

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshCollective:
    """One collective over a group.

    Attributes:
        kind: a key of ``_KINDS``.
        members: the group.
        name: for errors and counters.
        shard_dim: dim that is split.
        gather_dim: dim that is gathered.
        mixed: for a mixed gather the mesh axes of every sharded dim.
        mesh: for a mixed gather the mesh.
        backward: whether the input is a gradient; the result must not be a view of a gradient.
    """

    kind: str
    members: Members
    name: str
    shard_dim: int = 0
    gather_dim: int = 0
    mixed: tuple[tuple[int, Axes], ...] = ()
    mesh: DeviceMesh | None = None
    backward: bool = False

    def adjoint(self) -> "MeshCollective":
        """Return the collective of the gradients."""
        kind, name = _KINDS[self.kind][1], f"{self.name.removesuffix('.backward')}.backward"
        dims = {"shard_dim": self.gather_dim, "gather_dim": self.shard_dim}
        return replace(self, kind=kind, name=name, backward=True, **dims)


def run_collective(x: Tensor, collective: MeshCollective) -> Tensor:
    """Run the collective on the local tensor; differentiable any number of times."""
    if wants_grad(x):
        return _Differentiable.apply(x, collective)
    result = _run(x, collective)
    return unchanged(x) if result is x else result


def _run(x: Tensor, collective: MeshCollective) -> Tensor:
    return _KINDS[collective.kind][0](x, collective)


@direct
class _Differentiable(torch.autograd.Function):
    """Forward: the collective. Backward: its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: MeshCollective) -> Tensor:
        ctx.collective, ctx.group = collective, collective.members.group
        return _run(x, collective)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return run_collective(grad_output, ctx.collective.adjoint()), None


def _reorder_blocks(x: Tensor, dim: int, order: Sequence[int] | None) -> Tensor:
    """Permute the equal blocks of ``dim``; a dim that does not divide raises in ``eager``."""
    if order is None or x.shape[dim] % len(order):
        return x
    size = x.shape[dim] // len(order)
    return torch.cat([x.narrow(dim, index * size, size) for index in order], dim)


def _inverse(order: Axes | None) -> list[int] | None:
    return None if order is None else [order.index(index) for index in range(len(order))]


def _own_memory(result: Tensor, x: Tensor, collective: MeshCollective) -> Tensor:
    """Copy a result that is the input itself (over one rank), unless it is a gradient."""
    if result is not x or collective.backward:
        return result
    record.add(collective.name, "torch", 2 * x.nbytes, 0, record.now())
    return x.clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, collective: MeshCollective) -> Tensor:
    dim, members = collective.gather_dim, collective.members
    result = _reorder_blocks(eager.all_gather(x, dim, members.group, None, collective.name), dim, members.order)
    return _own_memory(result, x, collective)


def _split(x: Tensor, collective: MeshCollective) -> Tensor:
    dim, members = collective.shard_dim, collective.members
    ordered = _reorder_blocks(x, dim, _inverse(members.order))
    shard = eager.split(ordered, dim, members.group, None, collective.name)
    shared = shard is not x and shares_storage(shard, x)
    return shard.clone() if collective.backward and shared else shard


def _all_to_all(x: Tensor, collective: MeshCollective) -> Tensor:
    shard_dim, gather_dim, members = collective.shard_dim, collective.gather_dim, collective.members
    sent = _reorder_blocks(x, shard_dim, _inverse(members.order))
    received = eager.all_to_all(sent, shard_dim, gather_dim, members.group, collective.name)
    return _own_memory(_reorder_blocks(received, gather_dim, members.order), x, collective)


def _all_reduce(x: Tensor, collective: MeshCollective) -> Tensor:
    result = eager.all_reduce(x, collective.members.group, collective.name)
    # Gloo's thread may outlive every other reference to what it reduced, and must not end the graph and its group.
    return result if collective.backward or result is x else result.detach()


def _identity(x: Tensor, collective: MeshCollective) -> Tensor:
    return x if collective.backward else x.view_as(x)


def _mix_gather(x: Tensor, collective: MeshCollective) -> Tensor:
    """All-gather, then one pass that moves each mesh axis in front of the dim it shards."""
    assert collective.mesh is not None
    sizes, order = collective.mesh.mesh_shape, collective.members.order
    wire = _reorder_blocks(eager.all_gather(x, 0, collective.members.group, None, collective.name), 0, order)
    axes_of, shape = dict(collective.mixed), list(x.shape)
    if collective.mixed == ((0, (0, 1)),):
        return _own_memory(wire, x, collective)
    started = record.now()
    permutation: list[int] = []
    for dim in range(x.dim()):
        permutation += [*axes_of.get(dim, ()), len(sizes) + dim]
        shape[dim] *= math.prod(sizes[axis] for axis in axes_of.get(dim, ()))
    blocks = wire.view(*sizes, *x.shape).permute(permutation)
    out = torch.ops.aten._unsafe_view(blocks.clone(memory_format=torch.contiguous_format), shape)
    record.add(collective.name, "torch", 2 * out.nbytes, 0, started, calls=0)
    return out


def _mix_split(x: Tensor, collective: MeshCollective) -> Tensor:
    """Split every dim that ``_mix_gather`` gathers; its adjoint."""
    assert collective.mesh is not None
    sizes = collective.mesh.mesh_shape
    span = record.begin(collective.name, "split", collective.members.group, x, (collective.mixed, None))
    at = collective.mesh.global_rank_to_logical_rank(dist.get_rank())
    shard = x
    for dim, axes in collective.mixed:
        index, parts = 0, math.prod(sizes[axis] for axis in axes)
        for axis in axes:
            index = index * sizes[axis] + at[axis]
        if x.shape[dim] % parts:
            raise ShapeError(f"{collective.name}: dim {dim} of size {x.shape[dim]} does not divide over {parts} ranks")
        shard = shard.narrow(dim, index * (x.shape[dim] // parts), x.shape[dim] // parts)
    span.end("torch", 2 * shard.nbytes, 0)
    return shard.clone(memory_format=torch.contiguous_format)


# By kind the function, and the kind of its adjoint.
_KINDS = {
    "gather": (_all_gather, "split"),
    "split": (_split, "gather"),
    "all2all": (_all_to_all, "all2all"),
    "all_reduce": (_all_reduce, "identity"),
    "identity": (_identity, "all_reduce"),
    "mixgather": (_mix_gather, "mixsplit"),
    "mixsplit": (_mix_split, "mixgather"),
}
