"""The movements whose pieces differ from rank to rank: explicit sizes, one flat wire, no padding."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import c10d, ops, record
from tritoncomm.checks import even, flat, piece, sized
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.handle import Handle
from tritoncomm.plan import Ints, Plan

__all__ = ["exchange_uneven", "gather_uneven"]


def gather_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, name: str, asynchronous: bool, started: float
) -> Any:
    world, rank, dim = group.size(), group.rank(), dim % x.dim()
    if len(sizes) != world or sizes[rank] != x.shape[dim]:
        raise ShapeError(
            f"{name}: split sizes {list(sizes)} need {world} entries with {x.shape[dim]}, the size of dim {dim}, "
            f"at rank {rank} (shape {tuple(x.shape)})"
        )
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    plan = Plan.along(shape, dim, world, sizes)
    x, moved = flat(x)
    out = x.new_empty(shape)
    wire = out.view(-1) if plan.is_view else x.new_empty(out.numel())
    assert plan.lengths is not None
    parts = list(wire.split([plan.outer * length for length in plan.lengths]))
    work = c10d.all_gather_list(parts, x.view(-1), group, asynchronous)
    wire_bytes = x.nbytes * (world - 1)

    def finish() -> tuple[str, int]:
        return ("view", 0) if plan.is_view else ops.unpack(wire, shape, dim, world, sizes, out=out)[1:]

    if asynchronous:
        record.add(name, "view" if plan.is_view else ops.path_for(x), moved, wire_bytes, started)
        return out, Handle(work, out, finish, x, wire)
    path, unpacked = finish()
    record.add(name, path, moved + unpacked, wire_bytes, started)
    return out


def exchange_uneven(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: str,
    scatter_sizes: Ints | None,
    gather_sizes: Ints | None,
    started: float,
) -> Tensor:
    world, rank = group.size(), group.rank()
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    if scatter_dim == gather_dim:
        raise ArgumentError(f"{name}: sizes need two different dims, not {scatter_dim} twice")
    if scatter_sizes is None:
        even(x.shape, scatter_dim, world, name, group)
        scatter_sizes = (x.shape[scatter_dim] // world,) * world
    gather_sizes = gather_sizes if gather_sizes is not None else (x.shape[gather_dim],) * world
    sent = sized(x.shape, scatter_dim, world, scatter_sizes, name, group)
    if len(gather_sizes) != world or gather_sizes[rank] != x.shape[gather_dim]:
        raise ShapeError(
            f"{name}: gather sizes {list(gather_sizes)} need {world} entries with {x.shape[gather_dim]}, the size of "
            f"dim {gather_dim}, at rank {rank} (shape {tuple(x.shape)})"
        )
    wire, path, moved = ops.pack(x, scatter_dim, world, scatter_sizes)
    joined = piece(piece(x.shape, scatter_dim, scatter_sizes[rank]), gather_dim, sum(gather_sizes))
    got = Plan.along(joined, gather_dim, world, gather_sizes)
    assert sent.lengths is not None
    assert got.lengths is not None
    out = x.new_empty(joined)
    received = out.view(-1) if got.is_view else x.new_empty(out.numel())
    counts = [tuple(plan.outer * length for length in plan.lengths or ()) for plan in (got, sent)]
    c10d.all_to_all(received, wire.view(-1), counts[0], counts[1], group)
    if not got.is_view:
        _, unpack_path, unpacked = ops.unpack(received, joined, gather_dim, world, gather_sizes, out=out)
        path, moved = (path if path != "view" else unpack_path), moved + unpacked
    record.add(name, path, moved, x.nbytes - sent.outer * sent.lengths[rank] * x.element_size(), started)
    return out
