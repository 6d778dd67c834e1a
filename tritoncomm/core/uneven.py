"""The movements whose pieces differ from rank to rank: explicit sizes, one flat wire, no padding."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend, ops, routes
from tritoncomm.core.handle import Handle
from tritoncomm.core.plan import Ints, Plan
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["all_gather_uneven", "all_to_all_uneven", "reduce_scatter_uneven"]


def _counts(plan: Plan) -> Ints:
    """Elements of each rank's block on the wire."""
    assert plan.lengths is not None
    return tuple(plan.outer * length for length in plan.lengths)


def _check_joined(x: Tensor, dim: int, sizes: Ints, name: str, group: ProcessGroup) -> int:
    """``dim`` counted from the front; my entry of ``sizes`` has to be my size."""
    try:
        return routes.joined(x.shape, dim, sizes, group.size(), group.rank())
    except ShapeError as error:
        raise routes.located(error, x.shape, name, group) from None


def all_gather_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, name: str, asynchronous: bool, started: float
) -> Any:
    """Join ``dim`` from the ranks, ``sizes[w]`` of it from rank w."""
    dim, world = _check_joined(x, dim, sizes, name, group), group.size()
    shape = routes.piece(x.shape, dim, sum(sizes))
    plan = Plan.along(shape, dim, world, sizes)
    x, moved = routes.flat(x, routes.gathered(x.shape, x.dtype, dim, world))
    out = x.new_empty(shape)
    wire = out.view(-1) if plan.is_view else x.new_empty(out.numel())
    work = backend.all_gather_list(list(wire.split(_counts(plan))), x.view(-1), group, asynchronous)
    wire_bytes = x.nbytes * (world - 1)

    def finish() -> tuple[str, int]:
        return ("view", 0) if plan.is_view else ops.unpack(wire, shape, dim, world, sizes, out=out)[1:]

    if asynchronous:
        path = "view" if plan.is_view else ops.path_for(out, "unpack", dim, world, sizes)
        record.add(name, path, moved, wire_bytes, started)
        return out, Handle(work, out, finish, x, wire)
    path, unpacked = finish()
    record.add(name, path, moved + unpacked, wire_bytes, started)
    return out


def reduce_scatter_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, name: str, op: Any, asynchronous: bool, started: float
) -> Any:
    """Reduce over the ranks and keep ``sizes[rank]`` of ``dim``."""
    world, rank = group.size(), group.rank()
    plan = routes.sized(x.shape, dim, world, sizes, name, group)
    backend.check_op(op, x, group, name)
    wire, path, moved = ops.pack(routes.resolved(x), dim, world, sizes)
    out = x.new_empty(routes.piece(x.shape, dim, sizes[rank]))
    work = backend.reduce_scatter_list(out.view(-1), list(wire.split(_counts(plan))), op, group, asynchronous)
    record.add(name, path, moved, x.nbytes * (world - 1) // world, started)
    return (out, Handle(work, out, None, wire)) if asynchronous else out


def all_to_all_uneven(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: str,
    scatter_sizes: Ints | None,
    gather_sizes: Ints | None,
    started: float,
) -> Tensor:
    """Cut one dim and join another by sizes; a missing list means even pieces."""
    world, rank = group.size(), group.rank()
    if scatter_sizes is None:
        scatter_sizes = routes.even_sizes(x.shape, scatter_dim, world, name, group)
    sent = routes.sized(x.shape, scatter_dim, world, scatter_sizes, name, group)
    gather_sizes = gather_sizes if gather_sizes is not None else (x.shape[gather_dim],) * world
    gather_dim, scatter_dim = _check_joined(x, gather_dim, gather_sizes, name, group), scatter_dim % x.dim()
    if scatter_dim == gather_dim:
        raise ArgumentError(f"{name}: sizes need two different dims, not {scatter_dim} twice")
    wire, path, moved = ops.pack(routes.resolved(x), scatter_dim, world, scatter_sizes)
    joined = routes.piece(routes.piece(x.shape, scatter_dim, scatter_sizes[rank]), gather_dim, sum(gather_sizes))
    got = Plan.along(joined, gather_dim, world, gather_sizes)
    received = x.new_empty(joined)
    backend.all_to_all(received.view(-1), wire.view(-1), _counts(got), _counts(sent), group)
    del wire  # what was sent is not needed while what came is unpacked
    out = received if got.is_view else x.new_empty(joined)
    if not got.is_view:
        _, unpack_path, unpacked = ops.unpack(received.view(-1), joined, gather_dim, world, gather_sizes, out=out)
        path, moved = (path if path != "view" else unpack_path), moved + unpacked
    record.add(name, path, moved, x.nbytes - _counts(sent)[rank] * x.element_size(), started)
    return out
