"""Every data movement of the mappings and collectives, not differentiable: pack, one collective, unpack.

World size 1 ends here. Under torch.compile the traceable forms of `traced` take over. `name` is the function that a
caller knows; errors and the record use it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import c10d, ops, record, traced
from tritoncomm.checks import even, flat, indivisible, piece, sized
from tritoncomm.errors import ShapeError
from tritoncomm.handle import Handle
from tritoncomm.plan import Ints
from tritoncomm.uneven import exchange_uneven, gather_uneven

__all__ = ["all_reduce", "ends_here", "exchange", "exchange_rows", "gather", "scatter_reduce", "split"]

_alone_ends_here = True


@contextmanager
def run_alone_too() -> Iterator[None]:
    """Send a group of one rank through the backend as well (for tests of a backend on one device)."""
    global _alone_ends_here
    before, _alone_ends_here = _alone_ends_here, False
    try:
        yield
    finally:
        _alone_ends_here = before


def ends_here(group: ProcessGroup) -> bool:
    """Whether the group is this rank alone, so that nothing has to move."""
    return _alone_ends_here and group.size() == 1


@lru_cache(maxsize=8192)
def _gathered(shape: Ints, dim: int, world: int) -> tuple[Ints, Ints, bool]:
    """Shape after a gather, shape of the wire (Gloo wants the ranks in dim 0), and whether they hold the same bytes."""
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim {dim} is out of range for shape {shape}")
    dim %= len(shape)
    joined = (*shape[:dim], shape[dim] * world, *shape[dim + 1 :])
    return joined, (shape[0] * world, *shape[1:]), math.prod(shape[:dim]) == 1


def gather(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str, asynchronous: bool = False) -> Any:
    """Concatenate the ranks' tensors along ``dim``; a tensor, or (tensor, handle) when asynchronous."""
    if is_compiling():
        return traced.gather(x, dim, group, sizes, name)
    started, world = record.clock(), group.size()
    if world == 1 and _alone_ends_here:
        return (x, None) if asynchronous else x
    if sizes is not None and (len(set(sizes)) != 1 or len(sizes) != world or sizes[0] != x.shape[dim]):
        return gather_uneven(x, dim, group, sizes, name, asynchronous, started)
    try:
        shape, stacked, is_view = _gathered(x.shape, dim, world)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
    wire_bytes = x.nbytes * (world - 1)
    x, moved = flat(x)
    if is_view:
        out = x.new_empty(shape)
        wire = out if shape == stacked else out.view(stacked)
    else:
        wire = x.new_empty(stacked)
        out = x.new_empty(shape) if asynchronous else None
    work = c10d.all_gather(wire, x, group, asynchronous)
    if asynchronous:
        assert out is not None
        record.add(name, "view" if is_view else ops.path_for(x), moved, wire_bytes, started)
        finish = None if is_view else lambda: ops.unpack(wire, shape, dim, world, out=out)
        return out, Handle(work, out, finish, x, wire)
    path = "view"
    if out is None:
        out, path, unpacked = ops.unpack(wire, shape, dim, world)
        moved += unpacked
    record.add(name, path if path != "view" or not moved else "torch", moved, wire_bytes, started)
    return out


def scatter_reduce(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    sizes: Ints | None,
    name: str,
    op: Any = ReduceOp.SUM,
    asynchronous: bool = False,
) -> Any:
    """Reduce over the ranks and keep this rank's piece of ``dim``; (tensor, handle) when asynchronous."""
    if is_compiling():
        return traced.scatter_reduce(x, dim, group, sizes, name)
    started, world = record.clock(), group.size()
    if world == 1 and _alone_ends_here:
        return (x, None) if asynchronous else x
    if op is not ReduceOp.SUM or x.dtype in c10d.special:
        c10d.check_op(op, x, group, name)
    if sizes is None or (len(set(sizes)) == 1 and len(sizes) == world and sizes[0] * world == x.shape[dim]):
        even(x.shape, dim, world, name, group)
        wire, path, moved = ops.pack(x, dim, world)
        shape = wire.shape[1:] if path != "view" else piece(x.shape, dim, x.shape[dim] // world)
        out = x.new_empty(shape)
        rows = (out, wire) if dim == 0 and path == "view" else (out.view(-1), wire.view(-1))
        work = c10d.reduce_scatter(*rows, op, group, asynchronous)
    else:
        plan = sized(x.shape, dim, world, sizes, name, group)
        wire, path, moved = ops.pack(x, dim, world, sizes)
        assert plan.lengths is not None
        out = x.new_empty(piece(x.shape, dim, sizes[group.rank()]))
        parts = list(wire.split([plan.outer * length for length in plan.lengths]))
        work = c10d.reduce_scatter_list(out.view(-1), parts, op, group, asynchronous)
    record.add(name, path, moved, x.nbytes * (world - 1) // world, started)
    return (out, Handle(work, out, None, wire)) if asynchronous else out


def split(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """This rank's piece of ``dim``, contiguous; a view of ``x`` where that is contiguous already."""
    world, rank = group.size(), group.rank()
    if world == 1 and _alone_ends_here:
        return x
    if is_compiling():
        return traced.split(x, dim, world, rank, sizes)
    started = record.clock()
    if sizes is None:
        even(x.shape, dim, world, name, group)
        size = x.shape[dim] // world
        piece = x.narrow(dim, rank * size, size)
    else:
        sized(x.shape, dim, world, sizes, name, group)
        piece = x.narrow(dim, sum(sizes[:rank]), sizes[rank])
    if piece.is_contiguous():
        record.add(name, "view", 0, 0, started)
        return piece
    piece = piece.contiguous()
    record.add(name, "torch", 2 * piece.nbytes, 0, started)
    return piece


def all_reduce(
    x: Tensor,
    group: ProcessGroup,
    name: str,
    op: Any = ReduceOp.SUM,
    in_place: bool = False,
    asynchronous: bool = False,
) -> Any:
    """Reduce over the ranks; into ``x`` itself when ``in_place`` and it is contiguous, otherwise into one copy."""
    if is_compiling():
        return traced.all_reduce(x, group, name)
    started, world = record.clock(), group.size()
    if world == 1 and _alone_ends_here:
        return (x, None) if asynchronous else x
    if op is not ReduceOp.SUM or x.dtype in c10d.special:
        c10d.check_op(op, x, group, name)
    if in_place and x.is_contiguous() and not x.is_neg() and not x.is_conj():
        out, path, moved = x, "view", 0
    else:
        out, path, moved = x.clone(memory_format=torch.contiguous_format), "torch", 2 * x.nbytes
    work = c10d.all_reduce(out, op, group, asynchronous)
    record.add(name, path, moved, 2 * x.nbytes * (world - 1) // world, started)
    return (out, Handle(work, out, None)) if asynchronous else out


def exchange_rows(
    x: Tensor,
    group: ProcessGroup,
    out_sizes: Ints | None,
    in_sizes: Ints | None,
    name: str,
    asynchronous: bool = False,
) -> Any:
    """All-to-all along dim 0 by split sizes; even where a list is missing."""
    if is_compiling():
        return traced.exchange_rows(x, group, out_sizes, in_sizes, name)
    started, world = record.clock(), group.size()
    if world == 1 and _alone_ends_here:
        return (x, None) if asynchronous else x
    if x.dim() == 0:
        raise ShapeError(f"{name}: a 0-dim tensor has no rows to exchange")
    if in_sizes is not None:
        sized(x.shape, 0, world, in_sizes, name, group)
    else:
        even(x.shape, 0, world, name, group)
    if out_sizes is not None and (len(out_sizes) != world or min(out_sizes) < 0):
        raise ShapeError(f"{name}: output split sizes {list(out_sizes)} need {world} entries of 0 or more")
    x, moved = flat(x)
    rows = sum(out_sizes) if out_sizes is not None else x.shape[0]
    out = x.new_empty((rows, *x.shape[1:]))
    balanced = (in_sizes is None or len(set(in_sizes)) == 1) and (out_sizes is None or len(set(out_sizes)) == 1)
    if balanced and rows == x.shape[0]:
        work = c10d.all_to_all(out, x, None, None, group, asynchronous)
    else:
        pieces = tuple(
            sizes if sizes is not None else (count // world,) * world
            for sizes, count in ((out_sizes, rows), (in_sizes, x.shape[0]))
        )
        work = c10d.all_to_all(out, x, pieces[0], pieces[1], group, asynchronous)
    kept = in_sizes[group.rank()] if in_sizes is not None else x.shape[0] // world
    wire_bytes = x.nbytes // max(x.shape[0], 1) * (x.shape[0] - kept)
    record.add(name, "torch" if moved else "view", moved, wire_bytes, started)
    return (out, Handle(work, out, None, x)) if asynchronous else out


def exchange(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: str,
    shape: Ints | None = None,
    scatter_sizes: Ints | None = None,
    gather_sizes: Ints | None = None,
    asynchronous: bool = False,
) -> Tensor:
    """Cut ``scatter_dim`` over the ranks and join ``gather_dim`` from them: one pack, one all-to-all, one unpack.

    ``shape`` reshapes the result (same number of elements, the joined dim must stay walkable by one stride).
    """
    if is_compiling():
        return traced.exchange(x, scatter_dim, gather_dim, group, name, shape, scatter_sizes, gather_sizes)
    started, world = record.clock(), group.size()
    if world == 1 and _alone_ends_here:
        return x if shape is None else x.reshape(shape)
    if scatter_sizes is not None or gather_sizes is not None:
        return exchange_uneven(x, scatter_dim, gather_dim, group, name, scatter_sizes, gather_sizes, started)
    wire_bytes = x.nbytes * (world - 1) // world
    try:
        joined, arrives = _exchanged(x.shape, scatter_dim, gather_dim, world)
    except ShapeError as error:
        if error.args[0] == "indivisible":
            raise indivisible(name, x.shape, scatter_dim, x.shape[scatter_dim], group) from None
        raise ShapeError(f"{name}: {error} (rank {group.rank()} of {world})") from None
    wire, path, moved = ops.pack(x, scatter_dim, world)
    received = torch.empty_like(wire)
    work = c10d.all_to_all(received, wire, None, None, group, asynchronous)
    if work is not None:
        work.wait()
    if arrives:
        out = received
    else:
        out, unpack_path, unpacked = ops.unpack(received, joined, gather_dim, world)
        path, moved = (path if path != "view" else unpack_path), moved + unpacked
    target = joined if shape is None else shape
    if out.shape != target:
        out = torch.ops.aten._unsafe_view(out, target)  # the result of its own, not a view of anything
    record.add(name, path, moved, wire_bytes, started)
    return out


@lru_cache(maxsize=8192)
def _exchanged(shape: Ints, scatter_dim: int, gather_dim: int, world: int) -> tuple[Ints, bool]:
    """Shape of the result, and whether the received wire already is the result."""
    for dim in (scatter_dim, gather_dim):
        if not -len(shape) <= dim < len(shape):
            raise ShapeError(f"dim {dim} is out of range for shape {tuple(shape)}")
    scatter_dim, gather_dim = scatter_dim % len(shape), gather_dim % len(shape)
    if shape[scatter_dim] % world:
        raise ShapeError("indivisible")
    block = piece(shape, scatter_dim, shape[scatter_dim] // world)
    joined = piece(block, gather_dim, block[gather_dim] * world)
    return joined, math.prod(block[:gather_dim]) == 1
