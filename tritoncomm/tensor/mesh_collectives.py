"""Collectives of ``CommSpec`` (ColossalAI's contract) over one group of a mesh, each with its adjoint as backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import eager
from tritoncomm.core.autograd import direct
from tritoncomm.core.call import compare_arguments
from tritoncomm.mappings.general import wants_grad
from tritoncomm.reshard import Layout, reshard
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.group_registry import AxisMembers
from tritoncomm.tensor.layout import shares_storage
from tritoncomm.tensor.redistribute import unchanged

__all__ = ["MeshCollective", "mixed_gather", "run_collective"]

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshCollective:
    """One collective over a group.

    Attributes:
        kind: a key of ``_KINDS``.
        name: for errors and counters.
        backward: whether the input is a gradient; the result must not be a view of a gradient.
    """

    kind: str
    members: AxisMembers
    name: str
    shard_dim: int = 0
    gather_dim: int = 0
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


def mixed_gather(x: Tensor, axes_by_dim: dict[int, Axes], mesh: DeviceMesh, group: ProcessGroup) -> Tensor:
    """Forward: all-gather dims over all axes of a mesh. Backward: split. Differentiable any number of times.

    Args:
        axes_by_dim: the mesh axes that shard a dim, the first one counting slowest.
        group: all ranks of the mesh.
    """
    shape = list(x.shape)
    for dim, axes in axes_by_dim.items():
        shape[dim] *= math.prod(mesh.mesh_shape[axis] for axis in axes)
    # ``Layout.on_mesh`` wants the dim that each axis shards, and of several axes of a dim the slowest first.
    axis_order = [axis for axes in axes_by_dim.values() for axis in axes]
    dim_of_axis = [dim for dim, axes in axes_by_dim.items() for _ in axes]
    ids = mesh.logical_mesh_id.permute(*axis_order)
    source = Layout.on_mesh(shape, ids, dim_of_axis)
    result = reshard(x, source, Layout.replicated(shape, ids.flatten().tolist()), group=group)
    return result.clone(memory_format=torch.contiguous_format) if shares_storage(result, x) else result


def _run(x: Tensor, collective: MeshCollective) -> Tensor:
    compare_arguments(collective.name, collective.members.group, order=collective.members.order)
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
    """Return the inverse of a permutation; None, which changes nothing, for None."""
    return None if order is None else [order.index(index) for index in range(len(order))]


def _own_memory(result: Tensor, x: Tensor, collective: MeshCollective) -> Tensor:
    """Copy a result that is the input itself (over one rank), unless it is a gradient."""
    if result is not x or collective.backward:
        return result
    record.add(collective.name, "torch", 2 * x.nbytes, 0, record.now())
    return x.clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, collective: MeshCollective) -> Tensor:
    """Gather in the order of the group, and bring the blocks into the order of the axis."""
    dim, members = collective.gather_dim, collective.members
    result = _reorder_blocks(eager.all_gather(x, dim, members.group, collective.name), dim, members.order)
    return _own_memory(result, x, collective)


def _split(x: Tensor, collective: MeshCollective) -> Tensor:
    """Bring the blocks from the order of the axis into the order of the group, and keep this rank's."""
    dim, members = collective.shard_dim, collective.members
    ordered = _reorder_blocks(x, dim, _inverse(members.order))
    shard = eager.split(ordered, dim, members.group, collective.name)
    shared = shard is not x and shares_storage(shard, x)
    return shard.clone() if collective.backward and shared else shard  # no view of a gradient


def _all_to_all(x: Tensor, collective: MeshCollective) -> Tensor:
    """Split ``shard_dim`` and concatenate ``gather_dim``, both in the order of the axis."""
    shard_dim, gather_dim, members = collective.shard_dim, collective.gather_dim, collective.members
    sent = _reorder_blocks(x, shard_dim, _inverse(members.order))
    received = eager.all_to_all(sent, shard_dim, gather_dim, members.group, collective.name)
    return _own_memory(_reorder_blocks(received, gather_dim, members.order), x, collective)


def _all_reduce(x: Tensor, collective: MeshCollective) -> Tensor:
    result = eager.all_reduce(x, collective.members.group, collective.name)
    # Gloo's thread may hold the last reference to the reduced tensor, and must not end the graph and its group.
    return result if collective.backward or result is x else result.detach()


def _identity(x: Tensor, collective: MeshCollective) -> Tensor:
    return x if collective.backward else x.view_as(x)


# By kind the function, and the kind of its adjoint.
_KINDS = {
    "gather": (_all_gather, "split"),
    "split": (_split, "gather"),
    "all2all": (_all_to_all, "all2all"),
    "all_reduce": (_all_reduce, "identity"),
    "identity": (_identity, "all_reduce"),
}
