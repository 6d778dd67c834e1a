"""Redistribution as one case table: which collective turns one placement into another, forward and backward.

| from \\ to | replica | shard, one dim | shard, several dims |
|---|---|---|---|
| replica | - | cut | cut |
| shard, one dim | gather | all-to-all (nothing when it is the same dim) | all-to-all |
| shard, several dims | gather | all-to-all | all-to-all (nothing when it is the same) |

A cut keeps this rank's piece; its adjoint is the gather, and the other way round: a replicated tensor has the same
gradient on every rank, so nothing is summed. Dims that do not divide are cut as ``torch.chunk`` cuts them. An
all-to-all sends every rank what its new piece and my old one have in common.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import eager, ops
from tritoncomm.core.function import direct, without_graph
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import CommError, PeerError, ShapeError
from tritoncomm.tensor.distspec import cuts, local_shape

__all__ = ["Transition", "redistribute", "steps", "unchanged"]

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
    return ("all_to_all",) if new else ("gather",)


def check(parts: Parts, world: int, name: str) -> None:
    """Refuse a cut into another number of pieces than there are ranks.

    Raises:
        ShapeError: says how many pieces and ranks there are.
    """
    count = math.prod(pieces for _, pieces in parts)
    if parts and count != world:
        raise ShapeError(f"{name}: a cut into {count} pieces needs {count} tensor-parallel ranks, not {world}")


def unchanged(x: Tensor) -> Tensor:
    """An input that is the result as well: the same tensor, without its graph where autograd is off."""
    return x if torch.is_grad_enabled() else without_graph(x)


def redistribute(x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
    """Move ``x``, this rank's piece, as the table says; ``unchanged(x)`` when nothing has to move."""
    if not steps(transition.old, transition.new):
        return unchanged(x)
    x = _plain(x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(x, transition, group)
    return _move(x, transition, group, "redistribute")


def _plain(x: Tensor) -> Tensor:
    """A piece as an ordinary tensor: what moves it must not ask an operator's rule what it means."""
    if type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


@direct
class _Redistribute(torch.autograd.Function):
    """Forward: the transition. Backward: the transition back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
        ctx.transition, ctx.group = transition, group
        return _move(x, transition, group, "redistribute")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_output, back = _plain(grad_output), ctx.transition.reversed()
        if grad_output.requires_grad:
            return _Redistribute.apply(grad_output, back, ctx.group), None, None
        return _move(grad_output, back, ctx.group, "redistribute.backward"), None, None


def _move(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    for step in steps(transition.old, transition.new):
        try:
            x = _MOVES[step](x, transition, group, name)
        except RuntimeError as error:
            if step == "cut" or isinstance(error, CommError | torch.OutOfMemoryError):
                raise
            ranks = dist.get_process_group_ranks(group)
            raise PeerError(
                f"{name}: the {step} of {list(transition.shape)} over ranks {ranks} failed: {error}. All of these "
                "ranks have to call it. That goes for every operator that gathers a shard: numpy(), tolist(), "
                "iteration, those without a rule; a rank that calls one alone waits for the others"
            ) from error
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
        return eager.all_gather(x, dim, group, sizes, name)
    shapes = [local_shape(shape, parts, rank) for rank in range(world)]
    counts = tuple(math.prod(each) for each in shapes)
    wire = eager.all_gather(x.reshape(-1), 0, group, None if len(set(counts)) == 1 else counts, name)
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
    """Cut the new dims, join the old ones."""
    (old, world), (new, _) = transition.old[0], transition.new[0]
    if len(transition.old) > 1 or len(transition.new) > 1:
        return _exchange_blocks(x, transition, group, name)
    scatter, join = _uneven(transition.shape, new, world), _uneven(transition.shape, old, world)
    return eager.all_to_all(x, new, old, group, name, scatter_sizes=scatter, gather_sizes=join)


def _exchange_blocks(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """An all-to-all whose blocks are cut along several dims: a strided copy per block, one pass on each side."""
    started, rank, world = record.now(), group.rank(), group.size()
    sent = blocks(transition, rank, world)
    got = blocks(transition.reversed(), rank, world)
    wire, moved = _in_rank_order(x, sent)
    received = eager.all_to_all_single(wire, group, got.counts, sent.counts, name)
    del wire  # what arrived and the result are the most that is held
    if got.in_order:
        out = torch.ops.aten._unsafe_view(received, got.shape)  # a result of its own, not a view of anything
    else:
        out, moved = x.new_empty(got.shape), moved + 2 * received.nbytes
        for block, box in zip(received.split(got.counts), got.boxes, strict=True):
            part = _part(out, box)
            part.copy_(block.view(part.shape))
    record.add(name, "torch", moved, 0, started, calls=0)
    return out


def _in_rank_order(x: Tensor, sent: "Blocks") -> tuple[Tensor, int]:
    """The wire, and the bytes moved for it."""
    if sent.in_order and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x.view(-1), 0
    wire = x.new_empty(x.numel())
    for block, box in zip(wire.split(sent.counts), sent.boxes, strict=True):
        part = _part(x, box)
        block.view(part.shape).copy_(part)
    return wire, 2 * x.nbytes


Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A piece as the blocks that the ranks' other pieces have in common with it.

    Attributes:
        shape: of the piece.
        boxes: (start, size) along every dim of the piece, by rank.
        counts: elements of each.
        in_order: whether the blocks lie one behind the other in memory, so that the piece is its own wire.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    counts: tuple[int, ...]
    in_order: bool


@lru_cache(maxsize=4096)
def blocks(transition: Transition, rank: int, world: int) -> Blocks:
    """What a rank's old piece has in common with everybody's new pieces."""
    mine = _box(transition.shape, transition.old, rank)
    shape = tuple(size for _, size in mine)
    boxes = tuple(_common(mine, _box(transition.shape, transition.new, w)) for w in range(world))
    counts = tuple(math.prod(size for _, size in box) for box in boxes)
    return Blocks(shape, boxes, counts, _in_order(shape, boxes, counts))


def _box(shape: Sequence[int], parts: Parts, rank: int) -> Box:
    box = [(0, size) for size in shape]
    for dim, start, size in cuts(shape, dict(parts), rank):
        box[dim] = (start, size)
    return tuple(box)


def _common(mine: Box, other: Box) -> Box:
    """The intersection, counted from the first element of ``mine``; an empty one starts at 0."""
    found = []
    for (start, size), (begin, length) in zip(mine, other, strict=True):
        first, last = max(start, begin), min(start + size, begin + length)
        found.append((first - start, last - first) if first < last else (0, 0))
    return tuple(found)


def _in_order(shape: Sequence[int], boxes: Sequence[Box], counts: Sequence[int]) -> bool:
    at = 0
    for box, count in zip(boxes, counts, strict=True):
        if not count:
            continue
        long = next((dim for dim, (_, size) in enumerate(box) if size > 1), len(box))
        gaps = any(size != full for (_, size), full in zip(box[long + 1 :], shape[long + 1 :], strict=True))
        first = sum(start * math.prod(shape[dim + 1 :]) for dim, (start, _) in enumerate(box))
        if gaps or first != at:
            return False
        at += count
    return True


def _part(x: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(box):
        if size != x.shape[dim]:
            x = x.narrow(dim, start, size)
    return x


def _uneven(shape: Sequence[int], dim: int, world: int) -> tuple[int, ...] | None:
    return None if shape[dim] % world == 0 else chunk_sizes(shape[dim], world)


_MOVES = {"cut": _cut, "gather": _gather, "all_to_all": _all_to_all}
