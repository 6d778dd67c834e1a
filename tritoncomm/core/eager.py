"""The collectives in eager mode, not differentiable: pack, one call of the backend, unpack.

Single-rank groups return early here, and under torch.compile the functions of ``compiled`` take over. ``name`` is the
function that a caller knows; errors and counters use it. Every call of Python costs 0.1 to 1 us on tensors for which
the host decides, so what depends on shapes only is looked up in ``cached``, and the even forms are written out here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm.core import backend, cached, compiled, ops
from tritoncomm.core.backend import Handle
from tritoncomm.core.call import enter
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.plan import CollectivePlan, Ints, all_equal, all_reduce_bytes, located
from tritoncomm.core.validation import check_input
from tritoncomm.errors import CommError, ShapeError
from tritoncomm.record import CopyPath, Span

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter",
    "split",
]

_SUM = ReduceOp.SUM


def all_gather(
    x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str, asynchronous: bool = False
) -> Any:
    """Concatenate the ranks' tensors along ``dim``; a tensor, or (tensor, handle) when asynchronous."""
    if is_compiling():
        return compiled.traced(all_gather, compiled.all_gather, name)(x, dim, group, sizes, name)
    span = enter(name, "all_gather", group, x, (dim, sizes))
    if span is None:
        return (x, None) if asynchronous else x
    world = span.world
    if sizes is not None and x.dim() and not all_equal(sizes, world, x.shape[dim]):
        return _all_gather_uneven(x, dim, group, sizes, span, asynchronous)
    try:
        plan = cached.all_gather(x.shape, x.dtype, dim, world)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    x, copied = cached.contiguous(x, plan.may_be_lazy)
    if asynchronous or not plan.in_order:
        return _all_gather_staged(x, dim, group, span, asynchronous, plan, copied)
    out = empty(x, plan.shape, plan.stride, x.dtype)
    backend.all_gather(out if plan.stacked is None else out.view(plan.stacked), x, group, name)
    span.end("torch" if copied else "view", copied, plan.bytes_sent)
    return out


def _all_gather_staged(
    x: Tensor, dim: int, group: ProcessGroup, span: Span, asynchronous: bool, plan: cached.EvenPlan, copied: int
) -> Any:
    """All-gather that needs a staging buffer, or is asynchronous."""
    world = span.world
    out = empty(x, plan.shape, plan.stride, x.dtype) if asynchronous else None
    if out is not None and plan.in_order:
        wire = out if plan.stacked is None else out.view(plan.stacked)
    else:
        shape = plan.stacked or plan.shape
        wire = empty(x, shape, contiguous_stride(shape), x.dtype)
    work = backend.all_gather(wire, x, group, span.name, asynchronous)
    if out is not None:
        path = "view" if plan.in_order else ops.path_for(out, "unpack", dim, world)
        span.end(path, copied, plan.bytes_sent)
        finish = None if plan.in_order else lambda: ops.unpack(wire, plan.shape, dim, world, out=out)
        return out, Handle(work, out, finish, x, wire)
    out, path, unpacked = ops.unpack(wire, plan.shape, dim, world)
    span.end(path, copied + unpacked, plan.bytes_sent)
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
    """Reduce over the ranks and keep this rank's shard of ``dim``; (tensor, handle) when asynchronous."""
    if is_compiling():
        return compiled.traced(reduce_scatter, compiled.reduce_scatter, name)(x, dim, group, sizes, name)
    span = enter(name, "reduce_scatter", group, x, (dim, sizes, op))
    if span is None:
        return (x, None) if asynchronous else x
    world = span.world
    if op is not _SUM:
        backend.check_op(op, x, group, name)
    if sizes is not None and x.dim() and not all_equal(sizes, world, x.shape[dim] // world):
        return _reduce_scatter_uneven(x, dim, group, sizes, span, op, asynchronous)
    try:
        plan = cached.reduce_scatter(x.shape, x.dtype, dim, world)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    if plan.in_order:
        wire, copied = cached.contiguous(x, plan.may_be_lazy)
        path = "torch" if copied else "view"
    else:
        wire, path, copied = ops.pack(cached.resolved(x) if plan.may_be_lazy else x, dim, world)
    out = empty(x, plan.shape, plan.stride, x.dtype)
    if plan.needs_cast:
        backend.check_op(op, x, group, name)
        work = backend.reduce_scatter(
            backend.carrier(out.view(-1)), backend.carrier(wire.view(-1)), backend.op_of(op, x.dtype), group, name,
            asynchronous,
        )  # fmt: skip
    elif plan.stacked is None:
        work = backend.reduce_scatter(out, wire, op, group, name, asynchronous)
    else:  # Gloo wants the ranks in dim 0
        work = backend.reduce_scatter(out.view(-1), wire.view(-1), op, group, name, asynchronous)
    span.end(path, copied, plan.bytes_sent)
    return (out, Handle(work, out, None, wire)) if asynchronous else out


def split(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """This rank's shard of ``dim``, contiguous; a view of ``x`` where that is contiguous already."""
    if is_compiling():
        return compiled.traced(split, compiled.split, name)(x, dim, group, sizes, name)
    span = enter(name, "split", group, x, (dim, sizes))
    if span is None:
        return x
    try:
        start, size = cached.split(x.shape, dim, span.world, group.rank(), sizes)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    shard = x[start : start + size] if dim == 0 else x.narrow(dim, start, size)
    if shard.is_contiguous():
        span.end("view", 0, 0)
        return shard
    shard = shard.contiguous()
    span.end("torch", 2 * shard.nbytes, 0)
    return shard


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
        return compiled.traced(all_reduce, compiled.all_reduce, name)(x, group, name)
    span = enter(name, "all_reduce", group, x, (op,))
    if span is None:
        return (x, None) if asynchronous else x
    size, special = x.nbytes, x.dtype in backend.not_summed
    if special or op is not _SUM:
        backend.check_op(op, x, group, name)
    if special or x.is_neg():  # what the backend would write to were a copy of a tensor with a lazy bit
        x, in_place = cached.resolved(x), in_place and not (x.is_conj() or x.is_neg())
    if not x.is_contiguous():
        out, path, copied = x.clone(memory_format=torch.contiguous_format), "torch", 2 * size
    elif in_place:
        out, path, copied = x, "view", 0
    else:  # a clone without arguments is a microsecond faster
        out, path, copied = x.clone(), "torch", 2 * size
    if special or op is not _SUM:  # an average is divided in place, which autograd refuses of a leaf
        sent, op = backend.carrier(out).detach(), backend.op_of(op, out.dtype)
        work = backend.all_reduce(sent, op, group, name, asynchronous)
    else:
        work = backend.all_reduce(out, op, group, name, asynchronous)
    span.end(path, copied, all_reduce_bytes(size, span.world))
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
        return compiled.traced(all_to_all_single, compiled.all_to_all_single, name)(x, group, out_sizes, in_sizes, name)
    span = enter(name, "all_to_all_single", group, x, (out_sizes, in_sizes))
    if span is None:
        return (x, None) if asynchronous else x
    world = span.world
    try:
        plan, stride, may_be_lazy = cached.all_to_all_single(x.shape, x.dtype, world, group.rank(), out_sizes, in_sizes)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    x, copied = cached.contiguous(x, may_be_lazy)
    out = empty(x, plan.shape, stride, x.dtype)
    work = backend.all_to_all(out, x, plan.recv_sizes, plan.send_sizes, group, name, asynchronous)
    span.end("torch" if copied else "view", copied, plan.bytes_sent)
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
    """Split ``scatter_dim`` over the ranks, concatenate ``gather_dim`` from them: one pack, one all-to-all, one unpack.

    ``shape`` reshapes the result. ``asynchronous`` issues the exchange on the backend's stream, then waits.
    """
    if is_compiling():
        return compiled.traced(all_to_all, compiled.all_to_all, name)(
            x, scatter_dim, gather_dim, group, name, shape, scatter_sizes, gather_sizes
        )
    span = enter(name, "all_to_all", group, x, (scatter_dim, gather_dim, scatter_sizes, gather_sizes))
    if span is None:
        if shape is None:
            return x
        check_input(x, name)
        return x.reshape(shape)
    world = span.world
    if scatter_sizes is not None or gather_sizes is not None:
        return _all_to_all_uneven(x, scatter_dim, gather_dim, group, span, scatter_sizes, gather_sizes)
    try:
        plan = cached.all_to_all(x.shape, x.dtype, scatter_dim, gather_dim, world)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    if plan.may_be_lazy:
        x = cached.resolved(x)
    wire, path, copied = ops.pack(x, scatter_dim, world)
    received = empty(wire, wire.shape, contiguous_stride(wire.shape), wire.dtype)
    if wire.shape[0] % world:  # dims of size 1 in front; torch 2.15 wants to split dim 0
        work = backend.all_to_all(received.view(-1), wire.view(-1), (), (), group, name, asynchronous)
    else:
        work = backend.all_to_all(received, wire, (), (), group, name, asynchronous)
    if work is not None:
        work.wait()
    del wire  # what was sent is not needed while what arrived is unpacked
    if plan.in_order:
        out = received
    else:
        out, unpack_path, unpacked = ops.unpack(received, plan.shape, gather_dim, world)
        path, copied = (path if path != "view" else unpack_path), copied + unpacked
    target = plan.shape if shape is None else shape
    if out.shape != target:
        out = torch.ops.aten._unsafe_view(out, target)  # a result of its own, not a view of anything
    span.end(path, copied, plan.bytes_sent)
    return out


def _plan(function: Any, x: Tensor, group: ProcessGroup, span: Span, dims: Ints, *sizes: Ints | None) -> CollectivePlan:
    try:
        return function(x.shape, x.dtype.itemsize, *dims, span.world, group.rank(), *sizes)
    except CommError as error:
        raise located(error, x.shape, span.name, group) from None


def _all_gather_uneven(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints, span: Span, asynchronous: bool) -> Any:
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


def _reduce_scatter_uneven(
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


def _all_to_all_uneven(
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
