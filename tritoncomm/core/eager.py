"""Every data movement of the mappings and collectives, not differentiable: pack, one collective, unpack.

World size 1 ends here. Under torch.compile the traceable forms of `traced` take over. `name` is the function that a
caller knows; errors and the record use it. What depends on shapes only is looked up in `routes`: on small tensors the
host decides, and after autograd's own machinery every distinct call costs about a microsecond.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import record
from tritoncomm.core import backend, compiled, ops, routes
from tritoncomm.core.handle import Handle
from tritoncomm.core.plan import Ints
from tritoncomm.core.uneven import all_gather_uneven, all_to_all_uneven, reduce_scatter_uneven
from tritoncomm.core.validation import check_input, members, world_of
from tritoncomm.errors import ShapeError

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "force_single_rank_collectives",
    "is_single_rank",
    "reduce_scatter",
    "split",
]

_single_rank_returns_early = True
_SUM = ReduceOp.SUM


@contextmanager
def force_single_rank_collectives() -> Iterator[None]:
    """Send a group of one rank through the backend as well (for tests of a backend on one device)."""
    global _single_rank_returns_early
    before, _single_rank_returns_early = _single_rank_returns_early, False
    try:
        yield
    finally:
        _single_rank_returns_early = before


def is_single_rank(group: ProcessGroup, name: str) -> bool:
    """Whether the group is this rank alone, so that nothing has to be sent."""
    world = len(members[group]) if group in members else world_of(group, name)
    return _single_rank_returns_early and world == 1


def all_gather(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str, asynchronous: bool = False
) -> Any:
    """Concatenate the ranks' tensors along ``dim``; a tensor, or (tensor, handle) when asynchronous."""
    if is_compiling():
        return compiled.all_gather(x, dim, group, sizes, name)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return (x, None) if asynchronous else x
    check_input(x, name)
    if sizes is not None and x.dim() and (len(set(sizes)) != 1 or len(sizes) != world or sizes[0] != x.shape[dim]):
        return all_gather_uneven(x, dim, group, sizes, name, asynchronous, started)
    try:
        route = routes.gathered(x.shape, x.dtype, dim, world)
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None
    x, moved = routes.flat(x, route)
    if asynchronous or not route.is_view:
        return _gather_apart(x, dim, group, name, asynchronous, route, moved, started)
    out = x.new_empty(route.shape)
    backend.all_gather(out if route.stacked is None else out.view(route.stacked), x, group)
    record.add(name, "torch" if moved else "view", moved, route.wire_bytes, started)
    return out


def _gather_apart(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    name: str,
    asynchronous: bool,
    route: routes.Route,
    moved: int,
    started: float,
) -> Any:
    """A gather whose wire is not the result, or whose result comes later."""
    world = group.size()
    out = x.new_empty(route.shape) if asynchronous else None
    if out is not None and route.is_view:
        wire = out if route.stacked is None else out.view(route.stacked)
    else:
        wire = x.new_empty(route.stacked or route.shape)
    work = backend.all_gather(wire, x, group, asynchronous)
    if out is not None:
        path = "view" if route.is_view else ops.path_for(out, "unpack", dim, world)
        record.add(name, path, moved, route.wire_bytes, started)
        finish = None if route.is_view else lambda: ops.unpack(wire, route.shape, dim, world, out=out)
        return out, Handle(work, out, finish, x, wire)
    out, path, unpacked = ops.unpack(wire, route.shape, dim, world)
    record.add(name, path, moved + unpacked, route.wire_bytes, started)
    return out


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    sizes: Ints | None,
    name: str,
    op: Any = _SUM,
    asynchronous: bool = False,
) -> Any:
    """Reduce over the ranks and keep this rank's piece of ``dim``; (tensor, handle) when asynchronous."""
    if is_compiling():
        return compiled.reduce_scatter(x, dim, group, sizes, name)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return (x, None) if asynchronous else x
    check_input(x, name)
    if op is not _SUM:
        backend.check_op(op, x, group, name)
    if (
        sizes is not None
        and x.dim()
        and (len(set(sizes)) != 1 or len(sizes) != world or sizes[0] * world != x.shape[dim])
    ):
        return reduce_scatter_uneven(x, dim, group, sizes, name, op, asynchronous, started)
    try:
        route = routes.scattered(x.shape, x.dtype, dim, world)
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None
    if route.is_view:
        wire, moved = routes.flat(x, route)
        path = "torch" if moved else "view"
    else:
        wire, path, moved = ops.pack(routes.resolved(x) if route.lazy else x, dim, world)
    out = x.new_empty(route.shape)
    if route.special:
        backend.check_op(op, x, group, name)
        work = backend.reduce_scatter(
            backend.carrier(out.view(-1)), backend.carrier(wire.view(-1)), op, group, asynchronous
        )
    elif route.stacked is None:
        work = backend.reduce_scatter(out, wire, op, group, asynchronous)
    else:  # Gloo wants the ranks in dim 0
        work = backend.reduce_scatter(out.view(-1), wire.view(-1), op, group, asynchronous)
    record.add(name, path, moved, route.wire_bytes, started)
    return (out, Handle(work, out, None, wire)) if asynchronous else out


def split(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """This rank's piece of ``dim``, contiguous; a view of ``x`` where that is contiguous already."""
    if is_compiling():
        return x if group.size() == 1 else compiled.split(x, dim, group.size(), group.rank(), sizes)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return x
    check_input(x, name)
    rank = group.rank()
    try:
        start, end, first = routes.piece_of(x.shape, dim, world, rank, sizes)
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None
    piece = x[start:end] if first else x.narrow(dim, start, end - start)
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
    op: Any = _SUM,
    in_place: bool = False,
    asynchronous: bool = False,
) -> Any:
    """Reduce over the ranks; into ``x`` itself when ``in_place`` and it is contiguous, otherwise into one copy."""
    if is_compiling():
        return compiled.all_reduce(x, group, name)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return (x, None) if asynchronous else x
    check_input(x, name)
    special = x.dtype in backend.special
    if special or op is not _SUM:
        backend.check_op(op, x, group, name)
        x, in_place = routes.resolved(x), in_place and not (x.is_conj() or x.is_neg())
    size = x.nbytes
    if not x.is_contiguous():
        out, path, moved = x.clone(memory_format=torch.contiguous_format), "torch", 2 * size
    elif in_place:
        out, path, moved = x, "view", 0
    else:  # a clone without arguments is a microsecond faster
        out, path, moved = x.clone(), "torch", 2 * size
    work = backend.all_reduce(backend.carrier(out) if special else out, op, group, asynchronous)
    record.add(name, path, moved, 2 * size * (world - 1) // world, started)
    return (out, Handle(work, out, None)) if asynchronous else out


def all_to_all_single(
    x: Tensor,
    group: ProcessGroup,
    out_sizes: Ints | None,
    in_sizes: Ints | None,
    name: str,
    asynchronous: bool = False,
) -> Any:
    """All-to-all along dim 0 by split sizes; a list that is missing is even, without both it is the even collective."""
    if is_compiling():
        return compiled.all_to_all_single(x, group, out_sizes, in_sizes, name)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return (x, None) if asynchronous else x
    check_input(x, name)
    try:
        route = routes.rows_exchanged(x.shape, x.dtype, world, group.rank(), out_sizes, in_sizes)
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None
    x, moved = routes.flat(x, route)
    out = torch.empty_like(x) if route.shape is None else x.new_empty(route.shape)
    work = backend.all_to_all(out, x, route.out_rows, route.in_rows, group, asynchronous)
    record.add(name, "torch" if moved else "view", moved, route.wire_bytes, started)
    return (out, Handle(work, out, None, x)) if asynchronous else out


def all_to_all(
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

    ``shape`` reshapes the result. ``asynchronous`` issues the exchange on the backend's stream, then waits.
    """
    if is_compiling():
        return compiled.all_to_all(x, scatter_dim, gather_dim, group, name, shape, scatter_sizes, gather_sizes)
    started, world = record.now(), len(members[group]) if group in members else world_of(group, name)
    if world == 1 and _single_rank_returns_early:
        return x if shape is None else x.reshape(shape)
    check_input(x, name)
    if scatter_sizes is not None or gather_sizes is not None:
        return all_to_all_uneven(x, scatter_dim, gather_dim, group, name, scatter_sizes, gather_sizes, started)
    try:
        route = routes.exchanged(x.shape, x.dtype, scatter_dim, gather_dim, world)
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None
    if route.lazy:
        x = routes.resolved(x)
    wire, path, moved = ops.pack(x, scatter_dim, world)
    received = torch.empty_like(wire)
    if wire.shape[0] % world:  # dims of size 1 in front; torch 2.15 wants to cut dim 0
        work = backend.all_to_all(received.view(-1), wire.view(-1), (), (), group, asynchronous)
    else:
        work = backend.all_to_all(received, wire, (), (), group, asynchronous)
    if work is not None:
        work.wait()
    del wire  # what was sent is not needed while what came is unpacked
    if route.is_view:
        out = received
    else:
        out, unpack_path, unpacked = ops.unpack(received, route.shape, gather_dim, world)
        path, moved = (path if path != "view" else unpack_path), moved + unpacked
    target = route.shape if shape is None else shape
    if out.shape != target:
        out = torch.ops.aten._unsafe_view(out, target)  # a result of its own, not a view of anything
    record.add(name, path, moved, route.wire_bytes, started)
    return out
