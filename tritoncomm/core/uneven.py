"""Variable-size collectives (all-gatherv, reduce-scatterv, all-to-allv): split sizes, flat unpadded buffers."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend, cached, ops
from tritoncomm.core.handle import Handle
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.plan import CollectivePlan, Ints, located
from tritoncomm.errors import CommError
from tritoncomm.record import CopyPath, Span

__all__ = ["all_gather_uneven", "all_to_all_uneven", "reduce_scatter_uneven"]


def _plan(function: Any, x: Tensor, group: ProcessGroup, span: Span, dims: Ints, *sizes: Ints | None) -> CollectivePlan:
    try:
        return function(x.shape, x.dtype.itemsize, *dims, span.world, group.rank(), *sizes)
    except CommError as error:
        raise located(error, x.shape, span.name, group) from None


def all_gather_uneven(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, span: Span, asynchronous: bool) -> Any:
    """Concatenate the ranks' tensors along ``dim``, ``sizes[w]`` of it from rank w."""
    plan, world = _plan(cached.uneven_all_gather, x, group, span, (dim,), sizes), span.world
    x, copied = cached.contiguous(x)
    out = empty(x, plan.shape, contiguous_stride(plan.shape), x.dtype)
    wire = out.view(-1) if plan.in_order else x.new_empty(out.numel())
    work = backend.all_gather_list(list(wire.split(plan.recv_counts)), x.view(-1), group, span.name, asynchronous)

    def finish() -> tuple[CopyPath, int]:
        return ("view", 0) if plan.in_order else ops.unpack(wire, plan.shape, dim, world, sizes, out=out)[1:]

    if asynchronous:
        path = "view" if plan.in_order else ops.path_for(out, "unpack", dim, world, sizes)
        span.end(path, copied, plan.bytes_sent)
        return out, Handle(work, out, finish, x, wire)
    path, unpacked = finish()
    span.end(path, copied + unpacked, plan.bytes_sent)
    return out


def reduce_scatter_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, span: Span, op: Any, asynchronous: bool
) -> Any:
    """Reduce over the ranks and keep ``sizes[rank]`` of ``dim``."""
    plan = _plan(cached.uneven_reduce_scatter, x, group, span, (dim,), sizes)
    backend.check_op(op, x, group, span.name)
    wire, path, copied = ops.pack(cached.resolved(x), dim, span.world, sizes)
    out = empty(x, plan.shape, contiguous_stride(plan.shape), x.dtype)
    parts = list(wire.split(plan.send_counts))
    work = backend.reduce_scatter_list(out.view(-1), parts, op, group, span.name, asynchronous)
    span.end(path, copied, plan.bytes_sent)
    return (out, Handle(work, out, None, wire)) if asynchronous else out


def all_to_all_uneven(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    span: Span,
    scatter_sizes: Ints | None,
    gather_sizes: Ints | None,
) -> Tensor:
    """Split one dim and concatenate another by sizes; a missing list is even."""
    dims, world = (scatter_dim, gather_dim), span.world
    plan = _plan(cached.uneven_all_to_all, x, group, span, dims, scatter_sizes, gather_sizes)
    wire, path, copied = ops.pack(cached.resolved(x), scatter_dim, world, plan.send_sizes)
    stride = contiguous_stride(plan.shape)
    received = empty(x, plan.shape, stride, x.dtype)
    backend.all_to_all(received.view(-1), wire.view(-1), plan.recv_counts, plan.send_counts, group, span.name)
    del wire  # what was sent is not needed while what arrived is unpacked
    if plan.in_order:
        span.end(path, copied, plan.bytes_sent)
        return received
    out = empty(x, plan.shape, stride, x.dtype)
    _, unpack_path, unpacked = ops.unpack(received.view(-1), plan.shape, gather_dim, world, plan.recv_sizes, out=out)
    span.end(path if path != "view" else unpack_path, copied + unpacked, plan.bytes_sent)
    return out
