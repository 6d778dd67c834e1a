"""Redistribution as one case table: which collective turns one placement into another, forward and backward.

| from \\ to | replica | shard, one dim | shard, several dims |
|---|---|---|---|
| replica | - | cut | cut |
| shard, one dim | gather | all-to-all (nothing when it is the same dim) | gather, cut |
| shard, several dims | gather | gather, cut | gather, cut (nothing when it is the same) |

A cut keeps this rank's piece; its adjoint is the gather, and the other way round: a replicated tensor has the same
gradient on every rank, so nothing is summed. Dims that do not divide are cut as ``torch.chunk`` cuts them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import engine, ops, record
from tritoncomm.autograd import direct
from tritoncomm.errors import ShapeError
from tritoncomm.plan import chunk_sizes
from tritoncomm.tensor.distspec import cuts, local_shape

__all__ = ["Transition", "redistribute", "steps"]

Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Transition:
    """From one cut of a tensor to another, over the same ranks.

    Attributes:
        shape: of the whole tensor.
        old: (dim, pieces) of every cut dim now; empty for a replica.
        new: the same afterwards.
    """

    shape: tuple[int, ...]
    old: Parts
    new: Parts

    def reversed(self) -> "Transition":
        """The way back, which is what gradients take."""
        return Transition(self.shape, self.new, self.old)


def steps(old: Parts, new: Parts) -> tuple[str, ...]:
    """Names of the movements from ``old`` to ``new``: cut, gather, all_to_all."""
    if old == new:
        return ()
    if not old:
        return ("cut",)
    if not new:
        return ("gather",)
    return ("all_to_all",) if len(old) == len(new) == 1 else ("gather", "cut")


def check(parts: Parts, world: int, name: str) -> None:
    """Refuse a cut into another number of pieces than there are ranks.

    Raises:
        ShapeError: says how many pieces and ranks there are.
    """
    count = math.prod(pieces for _, pieces in parts)
    if parts and count != world:
        raise ShapeError(f"{name}: a cut into {count} pieces needs {count} tensor-parallel ranks, not {world}")


def redistribute(x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
    """Move ``x``, this rank's piece, as the table says; the same tensor when nothing has to move."""
    if not steps(transition.old, transition.new):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(x, transition, group)
    return _move(x, transition, group, "redistribute")


@direct
class _Redistribute(torch.autograd.Function):
    """Forward: the transition. Backward: the transition back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
        ctx.transition, ctx.group = transition, group
        return _move(x, transition, group, "redistribute")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        back = ctx.transition.reversed()
        if grad_output.requires_grad:
            return _Redistribute.apply(grad_output, back, ctx.group), None, None
        return _move(grad_output, back, ctx.group, "redistribute.backward"), None, None


def _move(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    for step in steps(transition.old, transition.new):
        x = _MOVES[step](x, transition, group, name)
    return x


def _cut(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """This rank's piece of a replica; never a view of it."""
    started = record.now()
    piece = x
    for dim, start, size in cuts(transition.shape, dict(transition.new), group.rank()):
        piece = piece.narrow(dim, start, size)
    if piece.is_contiguous() or not piece.numel():
        record.add(name, "torch", 2 * piece.nbytes, 0, started)
        return piece.clone(memory_format=torch.contiguous_format)
    out = piece.new_empty(piece.shape)
    _, path, moved = ops.pack(piece, 0, 1, out=out.view(1, 1, -1))
    record.add(name, path, moved, 0, started)
    return out


def _gather(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """The whole tensor from everybody's pieces."""
    shape, parts, world = transition.shape, dict(transition.old), group.size()
    if len(parts) == 1:
        ((dim, count),) = parts.items()
        sizes = None if shape[dim] % count == 0 else chunk_sizes(shape[dim], count)
        return engine.gather(x, dim, group, sizes, name)
    shapes = [local_shape(shape, parts, rank) for rank in range(world)]
    counts = tuple(math.prod(each) for each in shapes)
    wire = engine.gather(x.reshape(-1), 0, group, None if len(set(counts)) == 1 else counts, name)
    started = record.now()
    out = x.new_empty(shape)
    for rank, block in enumerate(wire.split(counts)):
        target = out
        for dim, start, size in cuts(shape, parts, rank):
            target = target.narrow(dim, start, size)
        target.copy_(block.view(shapes[rank]))
    record.add(name, "torch", 2 * out.nbytes, 0, started, calls=0)
    return out


def _all_to_all(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """Cut the new dim, join the old one."""
    ((old, world),), ((new, _),) = transition.old, transition.new
    scatter, join = _uneven(transition.shape, new, world), _uneven(transition.shape, old, world)
    return engine.exchange(x, new, old, group, name, scatter_sizes=scatter, gather_sizes=join)


def _uneven(shape: Sequence[int], dim: int, world: int) -> tuple[int, ...] | None:
    return None if shape[dim] % world == 0 else chunk_sizes(shape[dim], world)


_MOVES = {"cut": _cut, "gather": _gather, "all_to_all": _all_to_all}
