"""Variable-size collectives (all-gatherv, reduce-scatterv, all-to-allv): split sizes, flat unpadded buffers."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend, cached, ops
from tritoncomm.core.handle import Handle
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.plan import CollectivePlan, Ints, located
from tritoncomm.errors import CommError

__all__ = ["all_gather_uneven", "all_to_all_uneven", "reduce_scatter_uneven"]


def _plan(function: Any, x: Tensor, group: ProcessGroup, name: str, dims: Ints, *sizes: Ints | None) -> CollectivePlan:
    try:
        return function(x.shape, x.dtype.itemsize, *dims, group.size(), group.rank(), *sizes)
    except CommError as error:
        raise located(error, x.shape, name, group) from None


def all_gather_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, name: str, asynchronous: bool, started: float
) -> Any:
    """Concatenate the ranks' tensors along ``dim``, ``sizes[w]`` of it from rank w."""
    plan, world = _plan(cached.uneven_all_gather, x, group, name, (dim,), sizes), group.size()
    x, copied = cached.contiguous(x)
    out = empty(x, plan.shape, contiguous_stride(plan.shape), x.dtype)
    wire = out.view(-1) if plan.in_order else x.new_empty(out.numel())
    work = backend.all_gather_list(list(wire.split(plan.recv_counts)), x.view(-1), group, name, asynchronous)

    def finish() -> tuple[record.CopyPath, int]:
        return ("view", 0) if plan.in_order else ops.unpack(wire, plan.shape, dim, world, sizes, out=out)[1:]

    if asynchronous:
        path = "view" if plan.in_order else ops.path_for(out, "unpack", dim, world, sizes)
        record.add(name, path, copied, plan.bytes_sent, started)
        return out, Handle(work, out, finish, x, wire)
    path, unpacked = finish()
    record.add(name, path, copied + unpacked, plan.bytes_sent, started)
    return out


def reduce_scatter_uneven(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, name: str, op: Any, asynchronous: bool, started: float
) -> Any:
    """Reduce over the ranks and keep ``sizes[rank]`` of ``dim``."""
    plan = _plan(cached.uneven_reduce_scatter, x, group, name, (dim,), sizes)
    backend.check_op(op, x, group, name)
    wire, path, copied = ops.pack(cached.resolved(x), dim, group.size(), sizes)
    out = empty(x, plan.shape, contiguous_stride(plan.shape), x.dtype)
    work = backend.reduce_scatter_list(out.view(-1), list(wire.split(plan.send_counts)), op, group, name, asynchronous)
    record.add(name, path, copied, plan.bytes_sent, started)
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
    """Split one dim and concatenate another by sizes; a missing list is even."""
    dims, world = (scatter_dim, gather_dim), group.size()
    plan = _plan(cached.uneven_all_to_all, x, group, name, dims, scatter_sizes, gather_sizes)
    wire, path, copied = ops.pack(cached.resolved(x), scatter_dim, world, plan.send_sizes)
    stride = contiguous_stride(plan.shape)
    received = empty(x, plan.shape, stride, x.dtype)
    backend.all_to_all(received.view(-1), wire.view(-1), plan.recv_counts, plan.send_counts, group, name)
    del wire  # what was sent is not needed while what arrived is unpacked
    if plan.in_order:
        record.add(name, path, copied, plan.bytes_sent, started)
        return received
    out = empty(x, plan.shape, stride, x.dtype)
    _, unpack_path, unpacked = ops.unpack(received.view(-1), plan.shape, gather_dim, world, plan.recv_sizes, out=out)
    record.add(name, path if path != "view" else unpack_path, copied + unpacked, plan.bytes_sent, started)
    return out
