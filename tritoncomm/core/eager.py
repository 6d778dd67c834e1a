"""Collectives in eager mode, not differentiable: pack, one call of the backend, unpack.

Every function returns its input over a group of one rank. With ``asynchronous`` it returns (result, handle) before the
exchange is over, where the handle is None over one rank. Under torch.compile the functions of ``compiled`` run
instead. ``op`` is a ``ReduceOp``.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate as running
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm.core import backend, compiled, node_exchange, ops, plan
from tritoncomm.core.backend import Handle
from tritoncomm.core.blocks import Block
from tritoncomm.core.call import enter, world_of_one
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.node_exchange import Levels
from tritoncomm.core.ops import SplitPass
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import (
    CollectivePlan,
    Ints,
    all_equal,
    all_reduce_bytes,
    cached_all_to_all_single,
    cached_reduce_scatter,
    cached_split,
    located,
)
from tritoncomm.core.validation import rank_in
from tritoncomm.errors import CommError

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "gather_parts", "padded_pass", "plan_exchange",
    "plan_gather", "reduce_scatter", "rooted", "split", "sum_wire",
]  # fmt: skip

_SUM = ReduceOp.SUM


def all_gather(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    name: str,
    sizes: Ints | None = None,
    asynchronous: bool = False,
    allocate: Callable[[Ints, torch.dtype], Tensor] | None = None,
) -> Any:
    """Concatenate the ranks' tensors along ``dim``.

    Args:
        allocate: returns memory for what arrives, contiguous and of this shape; new memory by default.
    """
    if is_compiling():
        return compiled.traced(all_gather, compiled.all_gather, name)(x, dim, group, name, sizes)
    span = enter(name, "all_gather", group, x, (dim, sizes))
    if span is None and sizes is None:
        return (x, None) if asynchronous else x
    world = world_of_one(x, name) if span is None else span.world
    try:
        if sizes is None or (x.dim() and all_equal(sizes, world, x.shape[dim])):
            sizes, (planned, unpack, shape) = None, _even_gather(x.shape, x.dtype, dim, world)
        else:
            planned, unpack, shape = plan_gather(x.shape, x.dtype, dim, world, group.rank(), sizes)
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    if span is None:  # only now, as a wrong list is wrong on one rank, too
        return (x, None) if asynchronous else x
    x, copied = ops.contiguous(x)
    wire = empty(x, shape, contiguous_stride(shape), x.dtype) if allocate is None else allocate(shape, x.dtype)
    if planned.padded:
        part = x
        if x.shape[dim] != planned.padded:  # this rank's part of the wire is what it sends
            part = wire.view(world, *plan.resized(x.shape, dim, planned.padded))[group.rank()]
            part.narrow(dim, 0, x.shape[dim]).copy_(x)
            copied += 2 * x.nbytes
        work = backend.all_gather(wire, part.view(-1), group, name, asynchronous)
    elif sizes is not None:
        parts = list(wire.view(-1).split(planned.recv_counts))
        work = backend.all_gather_list(parts, x.view(-1), group, name, asynchronous)
    # Dims of size 1 stand before ``dim``: Gloo, which wants the ranks in dim 0, gets flat tensors.
    elif unpack is None and dim != 0 and dim != -x.dim():
        work = backend.all_gather(wire.view(-1), x.view(-1), group, name, asynchronous)
    else:
        work = backend.all_gather(wire, x, group, name, asynchronous)
    if unpack is None:
        out = wire
        if planned.padded:  # what stands before the padding; not a view for autograd, as a result may be written
            out = torch.ops.aten._unsafe_view(wire.narrow(0, 0, math.prod(planned.shape)), planned.shape)
        span.end("torch" if copied else "view", copied, planned.bytes_sent)
        return (out, Handle(work, out, x, wire)) if asynchronous else out
    if asynchronous:
        out = empty(x, planned.shape, contiguous_stride(planned.shape), x.dtype)
        span.end(ops.path_for(out, "unpack", dim, world, sizes), copied, planned.bytes_sent)
        return out, Handle(work, out, x, wire, finish=lambda: unpack.unpack(wire, (out,)))
    (out,), path, unpacked = unpack.results(wire, (planned.shape,))
    span.end(path, copied + unpacked, planned.bytes_sent)
    return out


class _Gather(NamedTuple):
    """Plan of an all-gather, the pass that follows it (None where what arrives is in order), and the wire's shape."""

    plan: CollectivePlan
    unpack: SplitPass | Pass | None
    wire: Ints


def plan_gather(
    shape: Ints, dtype: torch.dtype, dim: int, world: int, rank: int = 0, sizes: Ints | None = None
) -> _Gather:
    """Plan ``all_gather``; an even plan is that of any rank."""
    planned = plan.all_gather(shape, dtype.itemsize, dim, world, rank, sizes, pads=True)
    if planned.padded:
        wire_shape = (world * math.prod(plan.resized(shape, dim, planned.padded)),)
        unpack = None if planned.in_order else padded_pass(planned.shape, dtype, dim, planned.recv_sizes)
        return _Gather(planned, unpack, wire_shape)
    if planned.in_order:
        return _Gather(planned, unpack=None, wire=planned.shape)
    unpack = ops.split_pass(planned.shape, dim, world, sizes)
    if sizes is None:
        wire_shape = plan.resized(shape, 0, world * shape[0])  # Gloo wants the ranks in dim 0
    else:
        wire_shape = (math.prod(planned.shape),)
    return _Gather(planned, unpack, wire_shape)


@lru_cache(maxsize=256)
def padded_pass(shape: Ints, dtype: torch.dtype, dim: int, sizes: Ints) -> SplitPass | Pass:
    """Return the pass from uneven parts, each padded to the largest, to a contiguous tensor of this shape."""
    dim, world = plan.normalize_dim(shape, dim), len(sizes)
    if sizes == plan.chunk_sizes(shape[dim], world):  # padding at the end alone
        return ops.split_pass(shape, dim, world)
    inner = math.prod(shape[dim + 1 :])
    outer, row, run = math.prod(shape[:dim]), shape[dim] * inner, max(sizes) * inner
    starts = running([size * inner for size in sizes], initial=0)
    blocks = [
        Block(0, (outer, size * inner), (row, 1), start, w * outer * run * dtype.itemsize, (run, 1))
        for w, (size, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    return Pass(blocks, [dtype], 0)


_even_gather = lru_cache(maxsize=8192)(plan_gather)


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    name: str,
    sizes: Ints | None = None,
    op: Any = _SUM,
    asynchronous: bool = False,
) -> Any:
    """Reduce the ranks' tensors, all of one shape, by ``op`` and return this rank's shard of ``dim``."""
    if is_compiling():
        return compiled.traced(reduce_scatter, compiled.reduce_scatter, name)(x, dim, group, name, sizes)
    span = enter(name, "reduce_scatter", group, x, (dim, sizes, op))
    if span is None and sizes is None:
        return (x, None) if asynchronous else x
    is_special = x.dtype in backend.not_summed
    if (is_special or op is not _SUM) and span is not None:
        backend.check_op(op, x, group, name)
    world = world_of_one(x, name) if span is None else span.world
    try:
        if sizes is None or (x.dim() and all_equal(sizes, world, x.shape[dim] // world)):
            sizes, planned = None, cached_reduce_scatter(x.shape, x.itemsize, dim, world, 0)
        else:
            planned = plan.reduce_scatter(x.shape, x.itemsize, dim, world, group.rank(), sizes)
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    if span is None:  # only now, as a wrong list is wrong on one rank, too
        return (x, None) if asynchronous else x
    if planned.in_order and sizes is None:
        wire, copied = ops.contiguous(x)
        path = "torch" if copied else "view"
    else:
        wire, path, copied = ops.pack(x, dim, world, sizes)
    out = empty(x, planned.shape, contiguous_stride(planned.shape), x.dtype)
    if sizes is not None:
        parts = list(wire.split(planned.send_counts))
        work = backend.reduce_scatter_list(out.view(-1), parts, op, group, name, asynchronous)
    elif is_special or (dim != 0 and dim != -x.dim()):  # Gloo wants the ranks in dim 0
        sent, received = backend.carrier(wire.view(-1)), backend.carrier(out.view(-1))
        work = backend.reduce_scatter(received, sent, backend.op_of(op, x.dtype), group, name, asynchronous)
    else:
        work = backend.reduce_scatter(out, wire, op, group, name, asynchronous)
    span.end(path, copied, planned.bytes_sent)
    return (out, Handle(work, out, wire)) if asynchronous else out


def split(x: Tensor, dim: int, group: ProcessGroup, name: str, sizes: Ints | None = None) -> Tensor:
    """Return this rank's shard of ``dim``, a view of ``x`` where that is contiguous; nothing is sent."""
    if is_compiling():
        return compiled.traced(split, compiled.split, name)(x, dim, group, name, sizes)
    span = enter(name, "split", group, x, (dim, sizes))  # None over a group of one rank
    if span is None and sizes is None:
        return x
    world = world_of_one(x, name) if span is None else span.world
    try:
        if sizes is None:
            start, size = cached_split(x.shape, dim, world, group.rank())
        else:
            start, size = plan.split(x.shape, dim, world, group.rank(), sizes)
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    if span is None:  # only now, as a wrong list is wrong on one rank, too
        return x
    shard = x[start : start + size] if dim == 0 else x.narrow(dim, start, size)
    if shard.is_contiguous():
        span.end("view", bytes_copied=0, bytes_sent=0)
        return shard
    span.end("torch", bytes_copied=2 * shard.nbytes, bytes_sent=0)
    return shard.contiguous()


def all_reduce(
    x: Tensor,
    group: ProcessGroup,
    name: str,
    op: Any = _SUM,
    in_place: bool = False,
    asynchronous: bool = False,
) -> Any:
    """Reduce the ranks' tensors, all of one shape, by ``op``; every rank has the whole result.

    Args:
        in_place: write the result into ``x``, if ``x`` is contiguous and has no lazy bits; else into a copy.
    """
    if is_compiling():  # other ops and asynchronous calls run outside of graphs
        return compiled.traced(all_reduce, compiled.all_reduce, name)(x, group, name, in_place=in_place)
    span = enter(name, "all_reduce", group, x, (op,))
    if span is None:
        return (x, None) if asynchronous else x
    size, is_special = x.nbytes, x.dtype in backend.not_summed or op is not _SUM
    if is_special:
        backend.check_op(op, x, group, name)
    if is_special or x.is_neg():  # a tensor with lazy bits: only complex ones, all in ``not_summed``, may be conjugate
        in_place = in_place and not ops.has_lazy((x,))  # the backend would write to a copy of it
        x = ops.resolved(x)
    if not x.is_contiguous():
        out, path, copied = x.clone(memory_format=torch.contiguous_format), "torch", 2 * size
    elif in_place:
        out, path, copied = x, "view", 0
    else:
        out, path, copied = x.clone(), "torch", 2 * size
    if is_special:  # an average is divided in place, which autograd refuses of a leaf
        sent, op = backend.carrier(out).detach(), backend.op_of(op, out.dtype)
        work = backend.all_reduce(sent, op, group, name, asynchronous)
    else:
        work = backend.all_reduce(out, op, group, name, asynchronous)
    span.end(path, copied, all_reduce_bytes(size, span.world))
    return (out, Handle(work, out, out)) if asynchronous else out


def rooted(
    x: Tensor, root: int, group: ProcessGroup, name: Literal["broadcast", "reduce"], op: Any, asynchronous: bool
) -> Any:
    """Broadcast ``x`` from global rank ``root``, or reduce it into that rank by ``op``; in place if contiguous."""
    group_root = rank_in(group, root, name)
    span = enter(name, name, group, x, (root, op))
    if span is None:
        return (x, None) if asynchronous else x
    out = ops.resolved(x).contiguous()
    copied = 0 if out is x else 2 * x.nbytes
    if name == "reduce":
        backend.check_op(op, out, group, name)
        work = backend.reduce(out, group_root, op, group, name, asynchronous)
    else:
        work = backend.broadcast(out, group_root, group, name, asynchronous)
    is_root = group.rank() == group_root
    is_sender = is_root if name == "broadcast" else not is_root
    span.end("torch" if copied else "view", copied, out.nbytes if is_sender else 0)
    return (out, Handle(work, out, out)) if asynchronous else out


def sum_wire(wire: Tensor, group: ProcessGroup, name: str) -> Tensor:
    """Sum the ranks' flat wires, and return this rank's part of the elements; the caller reports and counts."""
    backend.check_op(_SUM, wire, group, name)
    out = wire.new_empty(wire.numel() // group.size())
    op = backend.op_of(_SUM, wire.dtype)
    backend.reduce_scatter(backend.carrier(out), backend.carrier(wire), op, group, name)
    return out


def gather_parts(wire: Tensor, part: Tensor, group: ProcessGroup, name: str) -> None:
    """Gather parts of one size into a flat wire, which may have this rank's; the caller reports and counts."""
    backend.all_gather(wire, part, group, name)


def all_to_all_single(
    x: Tensor,
    group: ProcessGroup,
    out_sizes: Ints | None,
    in_sizes: Ints | None,
    name: str,
    asynchronous: bool = False,
    levels: Levels = "flat",
) -> Any:
    """Send the rows of dim 0 to the ranks, and concatenate the rows that arrive, in rank order.

    Args:
        out_sizes, in_sizes: rows from and to each rank. Without both lists the backend's even call runs.
        levels: from rank to rank, or in two levels: see ``node_exchange``.
    """
    if is_compiling():
        return compiled.traced(all_to_all_single, compiled.all_to_all_single, name)(x, group, out_sizes, in_sizes, name)
    nodes = None
    if levels != "flat":
        nodes = node_exchange.chosen(levels, group, name)
    # The last argument is the number of ranks on a node; None for an exchange from rank to rank.
    span = enter(name, "all_to_all_single", group, x, (out_sizes, in_sizes, nodes and nodes.size))
    is_even = out_sizes is None and in_sizes is None
    if span is None and is_even:
        return (x, None) if asynchronous else x
    world = world_of_one(x, name) if span is None else span.world
    try:
        if is_even:
            planned = cached_all_to_all_single(x.shape, x.itemsize, world, 0)
        else:
            planned = plan.all_to_all_single(x.shape, x.itemsize, world, group.rank(), out_sizes, in_sizes)
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    if span is None:  # only now, as wrong lists are wrong on one rank, too
        return (x, None) if asynchronous else x
    if nodes is not None:
        out = node_exchange.all_to_all(x, planned, nodes, group, span)
        # The exchange in two levels is over: the handle has no work to wait for.
        return (out, Handle(work=None, result=out)) if asynchronous else out
    x, copied = ops.contiguous(x)
    shape = planned.shape
    # A stride does not depend on the number of rows, which may be new in every call with split sizes.
    out = empty(x, shape, contiguous_stride(shape if is_even else (1, *shape[1:])), x.dtype)
    work = backend.all_to_all(out, x, planned.recv_sizes, planned.send_sizes, group, name, asynchronous)
    span.end("torch" if copied else "view", copied, planned.bytes_sent)
    return (out, Handle(work, out, x)) if asynchronous else out


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
    """Split ``scatter_dim`` over the ranks and concatenate ``gather_dim`` from them: pack, exchange, unpack.

    Args:
        shape: shape that the result gets at the end; None keeps the shape of the exchange.
        asynchronous: run the exchange on the backend's own stream. The result is waited for in any case.
    """
    if is_compiling():
        return compiled.traced(all_to_all, compiled.all_to_all, name)(
            x, scatter_dim, gather_dim, group, name, shape, scatter_sizes, gather_sizes
        )
    span = enter(name, "all_to_all", group, x, (scatter_dim, gather_dim, scatter_sizes, gather_sizes))
    is_even = scatter_sizes is None and gather_sizes is None
    if span is None and is_even and shape is None:
        return x
    world = world_of_one(x, name) if span is None else span.world
    try:
        if is_even:
            exchange = _even_exchange(x.shape, x.stride(), x.itemsize, scatter_dim, gather_dim, world, 0, shape)
        else:
            sizes = shape, scatter_sizes, gather_sizes
            exchange = _sized_exchange(
                x.shape, x.stride(), x.itemsize, scatter_dim, gather_dim, world, group.rank(), *sizes
            )
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    if span is None:
        return x if shape is None else x.reshape(shape)
    (out,) = exchange.run((x,), group, span, asynchronous=asynchronous)
    if shape is None or out.shape == shape:
        return out
    return torch.ops.aten._unsafe_view(out, shape)  # a result of its own, not a view of anything


def plan_exchange(
    shape: Ints,
    stride: Ints,
    itemsize: int,
    scatter_dim: int,
    gather_dim: int,
    world: int,
    rank: int,
    target: Ints | None = None,
    scatter_sizes: Ints | None = None,
    gather_sizes: Ints | None = None,
) -> Exchange:
    """Plan ``all_to_all`` of a tensor of this shape and stride.

    Args:
        target: shape of the result, of as many elements, where the wire needs no unpack and so any shape will do.
    """
    planned = plan.all_to_all(shape, itemsize, scatter_dim, gather_dim, world, rank, scatter_sizes, gather_sizes)
    unpack, result_shape = None, planned.shape
    if not planned.in_order:
        unpack = ops.split_pass(planned.shape, gather_dim, world, planned.recv_sizes or None)
    elif target is not None:
        result_shape = target
    return Exchange(
        ops.split_pass(shape, scatter_dim, world, planned.send_sizes or None, stride),
        unpack,
        planned.send_counts,
        planned.recv_counts,
        planned.bytes_sent,
        shapes=(result_shape,),
    )


_even_exchange = lru_cache(maxsize=8192)(plan_exchange)
_sized_exchange = lru_cache(maxsize=256)(plan_exchange)
"""Exchanges by split sizes, in a small cache: the sizes may be new in every call, and grow with the ranks."""
