"""Movements over one process group of a mesh, each with its adjoint as backward; CommSpec picks them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm import record
from tritoncomm.core import eager
from tritoncomm.core.function import direct
from tritoncomm.errors import ShapeError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.mesh_groups import Members
from tritoncomm.tensor.redistribute import unchanged

__all__ = ["Movement", "move"]

Axes = tuple[int, ...]

_ADJOINTS = {
    "gather": "split",
    "split": "gather",
    "exchange": "exchange",
    "all_reduce": "identity",
    "identity": "all_reduce",
    "mix_gather": "mix_split",
    "mix_split": "mix_gather",
}


@dataclass(frozen=True, slots=True)
class Movement:
    """One movement of a tensor over a group.

    Attributes:
        kind: a key of ``_MOVES``.
        members: the group.
        name: for errors and the record.
        cut: dim that is cut.
        join: dim that is joined.
        mixed: of a mixed gather, the mesh axes of every cut dim.
        mesh: of a mixed gather, the grid.
        backward: whether the tensor is a gradient, which the result may not be a view of.
    """

    kind: str
    members: Members
    name: str
    cut: int = 0
    join: int = 0
    mixed: tuple[tuple[int, Axes], ...] = ()
    mesh: DeviceMesh | None = None
    backward: bool = False

    def adjoint(self) -> "Movement":
        """What gradients go through."""
        name = f"{self.name.removesuffix('.backward')}.backward"
        return replace(self, kind=_ADJOINTS[self.kind], cut=self.join, join=self.cut, name=name, backward=True)


def move(x: Tensor, movement: Movement) -> Tensor:
    """Run the movement on this rank's piece; differentiable, any number of times."""
    if wants_grad(x):
        return _Moved.apply(x, movement)
    result = _MOVES[movement.kind](x, movement)
    return unchanged(x) if result is x else result


@direct
class _Moved(torch.autograd.Function):
    """Forward: the movement. Backward: its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, movement: Movement) -> Tensor:
        ctx.movement = movement
        return _MOVES[movement.kind](x, movement)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return move(grad_output, ctx.movement.adjoint()), None


def _in_order(x: Tensor, dim: int, order: Sequence[int] | None) -> Tensor:
    """The equal blocks of ``dim`` in another order; a dim that does not divide is left to the engine to refuse."""
    if order is None or x.shape[dim] % len(order):
        return x
    size = x.shape[dim] // len(order)
    return torch.cat([x.narrow(dim, place * size, size) for place in order], dim)


def _inverse(order: Axes | None) -> list[int] | None:
    return None if order is None else [order.index(place) for place in range(len(order))]


def _own(result: Tensor, x: Tensor, movement: Movement) -> Tensor:
    """Contiguous memory of its own: a group of one rank hands the input back. A gradient may be handed back."""
    if result is not x or movement.backward:
        return result
    record.add(movement.name, "torch", 2 * x.nbytes, 0, record.now())
    return x.clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, movement: Movement) -> Tensor:
    dim, members = movement.join, movement.members
    result = _in_order(eager.all_gather(x, dim, members.group, None, movement.name), dim, members.order)
    return _own(result, x, movement)


def _split(x: Tensor, movement: Movement) -> Tensor:
    dim, members = movement.cut, movement.members
    whole = _in_order(x, dim, _inverse(members.order))
    piece = eager.split(whole, dim, members.group, None, movement.name)
    shared = piece is not x and piece.untyped_storage()._cdata == x.untyped_storage()._cdata
    return piece.clone() if movement.backward and shared else piece


def _exchange(x: Tensor, movement: Movement) -> Tensor:
    cut, join, members = movement.cut, movement.join, movement.members
    sent = _in_order(x, cut, _inverse(members.order))
    result = _in_order(eager.all_to_all(sent, cut, join, members.group, movement.name), join, members.order)
    return _own(result, x, movement)


def _all_reduce(x: Tensor, movement: Movement) -> Tensor:
    return eager.all_reduce(x, movement.members.group, movement.name)


def _identity(x: Tensor, movement: Movement) -> Tensor:
    return x if movement.backward else x.view_as(x)


def _mix_gather(x: Tensor, movement: Movement) -> Tensor:
    """Everybody's piece, then one pass that puts the mesh axes in front of the dims they cut."""
    assert movement.mesh is not None
    sizes, order = movement.mesh.mesh_shape, movement.members.order
    wire = _in_order(eager.all_gather(x, 0, movement.members.group, None, movement.name), 0, order)
    axes_of, shape = dict(movement.mixed), list(x.shape)
    if movement.mixed == ((0, (0, 1)),):
        return _own(wire, x, movement)
    started = record.now()
    places: list[int] = []
    for dim in range(x.dim()):
        places += [*axes_of.get(dim, ()), len(sizes) + dim]
        shape[dim] *= math.prod(sizes[axis] for axis in axes_of.get(dim, ()))
    blocks = wire.view(*sizes, *x.shape).permute(places)
    out = torch.ops.aten._unsafe_view(blocks.clone(memory_format=torch.contiguous_format), shape)
    record.add(movement.name, "torch", 2 * out.nbytes, 0, started, calls=0)
    return out


def _mix_split(x: Tensor, movement: Movement) -> Tensor:
    """This rank's piece of every dim that ``_mix_gather`` joins."""
    assert movement.mesh is not None
    started, sizes = record.now(), movement.mesh.mesh_shape
    at = movement.mesh.global_rank_to_logical_rank(dist.get_rank())
    piece = x
    for dim, axes in movement.mixed:
        place, parts = 0, math.prod(sizes[axis] for axis in axes)
        for axis in axes:
            place = place * sizes[axis] + at[axis]
        if x.shape[dim] % parts:
            raise ShapeError(f"{movement.name}: dim {dim} of size {x.shape[dim]} does not divide over {parts} ranks")
        piece = piece.narrow(dim, place * (x.shape[dim] // parts), x.shape[dim] // parts)
    record.add(movement.name, "torch", 2 * piece.nbytes, 0, started)
    return piece.clone(memory_format=torch.contiguous_format)


_MOVES = {
    "gather": _gather,
    "split": _split,
    "exchange": _exchange,
    "all_reduce": _all_reduce,
    "identity": _identity,
    "mix_gather": _mix_gather,
    "mix_split": _mix_split,
}
