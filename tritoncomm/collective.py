"""ColossalAI's collectives over a parallel mode or a process group; any dim, contiguous results.

They are not differentiable: a tensor that requires grad is detached first, and results have no graph. ``all_reduce``,
``broadcast`` and ``reduce`` write into a contiguous tensor and return it. As in ColossalAI, a strided one stays as it
is, and a copy with the result is returned.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from tritoncomm.core import eager, wire_sum
from tritoncomm.core.autograd import outside_graphs, without_graph
from tritoncomm.core.backend import Handle
from tritoncomm.core.call import compare_arguments, enter
from tritoncomm.core.fused import plan_fused
from tritoncomm.core.node_exchange import Levels
from tritoncomm.core.plan import normalize_sizes
from tritoncomm.core.validation import check_input, checked_dim
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.groups import group_for
from tritoncomm.record import Span, hooks

__all__ = [
    "Handle",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "split_reduce_scatter",
]

_SUM = ReduceOp.SUM
_shape_of = attrgetter("shape")
# The functional collectives that torch.compile traces wait at once, and sum.
_all_gather_outside = outside_graphs(eager.all_gather)
_reduce_scatter_eagerly = outside_graphs(eager.reduce_scatter)
_all_reduce_outside = outside_graphs(eager.all_reduce)
_all_to_all_outside_graphs = outside_graphs(eager.all_to_all_single)
_rooted_outside = outside_graphs(eager.rooted)


def _checked(tensor: Any, parallel_mode: Any, name: str) -> dist.ProcessGroup:
    """Return the group of ``parallel_mode`` that moves ``tensor``; reject an argument that is no tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name}: expected a tensor, not {type(tensor).__name__}")
    return group_for(parallel_mode, tensor, name)


def _own_or_detached(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if a collective can write into it, else a detached one, as the copy is no part of its graph."""
    # Collectives write into contiguous tensors without lazy bits. A tensor that requires no grad needs no detached one.
    if not tensor.requires_grad or tensor.layout is not torch.strided:
        return tensor  # ``check_input`` refuses another layout
    return tensor.detach() if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj() else tensor


def all_gather(
    tensor: Tensor, dim: int, parallel_mode: Any, async_op: bool = False, *, sizes: Sequence[int] | None = None
) -> Any:
    """Concatenate the ranks' tensors along ``dim``: ``out = cat([tensor of rank 0, tensor of rank 1, ...], dim)``.

    Args:
        tensor: the same shape on every rank, except along ``dim`` when ``sizes`` says so; any strides.
        dim: any dim, negative counts from the end.
        parallel_mode: a ParallelMode (CPU tensors go over its CPU group) or a group (see ``groups.as_group``).
        async_op: return ``(out, handle)``; ``out`` is undefined until ``handle.wait()``.
        sizes: size of ``dim`` on each rank, for uneven tensors.

    Returns:
        A contiguous tensor; with one rank the very same tensor (and None as handle).

    Shape: ``[..., n, ...] -> [..., n*world, ...]``, or ``[..., sum(sizes), ...]``.
    """
    group = _checked(tensor, parallel_mode, "all_gather")
    dim = checked_dim(tensor, dim, "all_gather")
    per_rank = normalize_sizes(sizes, "all_gather")
    call = _all_gather_outside if async_op else eager.all_gather
    return call(without_graph(tensor), dim, group, "all_gather", per_rank, async_op)


def reduce_scatter(
    tensor: Tensor,
    dim: int,
    parallel_mode: Any,
    op: Any = ReduceOp.SUM,
    async_op: bool = False,
    *,
    sizes: Sequence[int] | None = None,
    wire: torch.dtype | None = None,
    wire_between: torch.dtype | None = None,
    exchange: Levels | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Any:
    """Reduce over the ranks and keep this rank's shard of ``dim``.

    With ``wire`` values travel in 16 bits, half of the bytes of an fp32 reduce-scatter, and nothing is rounded in the
    sum: ``out = round((wire(x of rank 0) + wire(x of rank 1) + ...) * scale)`` in fp32, in rank order (fp64 where the
    result is). The bits depend on the ranks' values alone. Values of the wire's dtype travel as they are; a value that
    overflows fp16 is Inf in the result. Buffers take a third of the wire, 4 MiB at least; with ``async_op`` twice the
    wire. Under torch.compile the graph breaks.

    Args:
        tensor: the same shape on every rank, any strides.
        dim: any dim; its size divides by the number of ranks unless ``sizes`` are given.
        parallel_mode: a ParallelMode or a group (see ``groups.as_group``).
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, where the backend has it for the dtype. MIN and MAX may
            lose a NaN, as the backend does. With ``wire`` SUM or AVG, which is the sum by ``1 / ranks``.
        async_op: return ``(out, handle)``; ``out`` is undefined until ``handle.wait()``, and ``tensor`` must not change
            until then.
        sizes: size of ``dim`` on each rank.
        wire: bfloat16 or float16, what travels; the tensor's own dtype, and the backend's sum, by default.
        wire_between: what travels between nodes with ``exchange="node"``: float32 by default, or a 16-bit dtype at one
            more rounding of each node's sum.
        exchange: with ``wire``. ``flat``: from rank to rank, the default on one node; over more nodes it sends more
            between them than a ring does, and has to be asked for. ``node``: sums of the ranks of each node travel
            between nodes, and are summed in the order of the nodes. On a CPU a call with ``async_op`` waits for the
            sums in the node, as messages of a group are matched in the order in which they start.
        scale: with ``wire``, a factor applied to the sum.
        out: with ``wire``, a contiguous tensor for the result, of any floating-point dtype; it may be this rank's shard
            of ``tensor``.
        accumulate: add to ``out`` before the one rounding.

    Returns:
        A contiguous tensor, ``out`` if given; without ``wire`` over one rank the very same tensor (and None as handle).

    Raises:
        ArgumentError: a wire of another dtype; options of ``wire`` without it; an ``out`` that does not fit.
        UnsupportedError: with ``wire`` another op, or a tensor that is not floating point; more than one node without
            ``exchange``; nodes with different numbers of ranks.

    Shape: ``[..., n, ...] -> [..., n/world, ...]``, or ``[..., sizes[rank], ...]``.
    """
    name = "reduce_scatter"
    group = _checked(tensor, parallel_mode, name)
    dim = checked_dim(tensor, dim, name)
    per_rank = normalize_sizes(sizes, name)
    if wire is None:
        if accumulate or not (wire_between is None and exchange is None and scale is None and out is None):
            needs_wire = {"wire_between": wire_between, "exchange": exchange, "scale": scale, "out": out}
            names = [key for key, value in needs_wire.items() if value is not None]
            if accumulate:
                names.append("accumulate")
            raise ArgumentError(f"{name}: {', '.join(names)} needs wire, the dtype that travels")
        call = _reduce_scatter_eagerly if async_op or op is not _SUM else eager.reduce_scatter
        return call(without_graph(tensor), dim, group, name, per_rank, op, async_op)
    options = wire_sum.WireOptions(wire, between=wire_between, exchange=exchange)
    return wire_sum.reduce_scatter(
        without_graph(tensor), dim, group, name, options, per_rank, op, asynchronous=async_op, scale=scale, out=out,
        accumulate=accumulate,
    )  # fmt: skip


def all_reduce(
    tensor: Tensor,
    parallel_mode: Any,
    op: Any = ReduceOp.SUM,
    async_op: bool = False,
    *,
    wire: torch.dtype | None = None,
    wire_between: torch.dtype | None = None,
    exchange: Levels | None = None,
    scale: float | None = None,
) -> Any:
    """Reduce over the ranks, in place when ``tensor`` is contiguous; otherwise into a contiguous copy.

    With ``wire`` the sum is that of ``reduce_scatter``, and the result travels in the tensor's dtype: 0.75 of the bytes
    for fp32. Every rank has the same bits.

    Args:
        wire, wire_between, exchange, scale: as for ``reduce_scatter``; not with ``async_op``.

    Returns:
        The reduced tensor (``tensor`` itself when contiguous), or ``(tensor, handle)``.
    """
    group = _checked(tensor, parallel_mode, "all_reduce")
    if wire is not None:
        if async_op:
            raise UnsupportedError("all_reduce: with wire there is no async_op: the result is gathered after the sum")
        options = wire_sum.WireOptions(wire, wire_between, exchange)
        return wire_sum.all_reduce(_own_or_detached(tensor), group, "all_reduce", options, op, scale)
    if wire_between is not None or exchange is not None or scale is not None:
        raise ArgumentError("all_reduce: wire_between, exchange and scale need wire, the dtype that travels")
    call = _all_reduce_outside if async_op or op is not _SUM else eager.all_reduce
    return call(_own_or_detached(tensor), group, "all_reduce", op, in_place=True, asynchronous=async_op)


def broadcast(tensor: Tensor, src: int, parallel_mode: Any, async_op: bool = False) -> Any:
    """Return the values of global rank ``src``, in place when ``tensor`` is contiguous, else in a copy.

    Returns:
        The tensor with the values, or ``(tensor, handle)``.
    """
    return _rooted("broadcast", tensor, src, parallel_mode, op=None, async_op=async_op)


def reduce(tensor: Tensor, dst: int, parallel_mode: Any, op: Any = ReduceOp.SUM, async_op: bool = False) -> Any:
    """Reduce over the ranks into global rank ``dst``; in place when ``tensor`` is contiguous, else in a copy.

    Returns:
        On ``dst`` the reduced tensor; elsewhere the same buffer with unspecified contents. Or ``(tensor, handle)``.
    """
    return _rooted("reduce", tensor, dst, parallel_mode, op, async_op)


def _rooted(name: Any, tensor: Tensor, root: int, parallel_mode: Any, op: Any, async_op: bool) -> Any:
    """Run ``reduce`` into, or ``broadcast`` (``op`` None) from, global rank ``root``, and return its result."""
    group = _checked(tensor, parallel_mode, name)
    return _rooted_outside(_own_or_detached(tensor), root, group, name, op, async_op)


def all_to_all(
    tensor: Tensor,
    parallel_mode: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    async_op: bool = False,
    *,
    exchange: Levels = "flat",
) -> Any:
    """Send chunk w of dim 0 to rank w and concatenate what arrives, in rank order.

    Args:
        tensor: any strides; dim 0 is split.
        parallel_mode: a ParallelMode or a group (see ``groups.as_group``).
        output_split_sizes: rows that arrive from each rank; even by default.
        input_split_sizes: rows that go to each rank; even by default. Lists, tuples or numpy arrays, zeros allowed.
        async_op: return ``(out, handle)``.
        exchange: ``flat`` from rank to rank. ``node``: in two levels, with N + L instead of N * L messages of each rank
            for N nodes of L ranks; each row moves twice and is copied twice. All ranks have to agree.
            ``TRITONCOMM_NODE`` sets the ranks per node.

    Raises:
        ArgumentError: the number of ranks per node is unknown.
        UnsupportedError: nodes have different numbers of ranks of the group.

    Shape: ``[n, ...] -> [sum(output_split_sizes), ...]``, ``[n, ...]`` without them.
    """
    name = "all_to_all"
    group = _checked(tensor, parallel_mode, name)
    out_sizes, in_sizes = normalize_sizes(output_split_sizes, name), normalize_sizes(input_split_sizes, name)
    # Graphs have the flat call that waits; the others break them.
    call = eager.all_to_all_single if exchange == "flat" and not async_op else _all_to_all_outside_graphs
    return call(without_graph(tensor), group, out_sizes, in_sizes, name, async_op, exchange)


@outside_graphs
def split_reduce_scatter(
    tensors: Tensor | Sequence[Tensor],
    dims: int | Sequence[int],
    parallel_mode: Any,
    *,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    wire: torch.dtype | None = None,
    wire_between: torch.dtype | None = None,
    exchange: Levels | None = None,
) -> Any:
    """Split, cast and scale one or several tensors into one buffer (one pass) and reduce-scatter it (one collective).

    With ``wire`` values travel in 16 bits and are summed in fp32, as in ``reduce_scatter``: ``dtype`` is the result's
    alone, and ``scale`` is applied to the sum.

    Args:
        tensors: one tensor or several, any shapes and strides, the same on every rank.
        dims: the dim each is split along, or one for all; an uneven dim is split as ``torch.chunk`` does.
        parallel_mode: a ParallelMode or a group (see ``groups.as_group``).
        dtype: element type on the wire and of the result; the tensors' own by default.
        scale: factor applied before the sum (``1/world`` for a mean).

    Returns:
        This rank's summed shard of each tensor, views of one buffer (one tensor for one tensor).

    Raises:
        ArgumentError: tensors of different dtypes without ``dtype``; a cast or a scale of integers or complex numbers.
        UnsupportedError: a scale that fp32 cannot hold.

    Example:
        Gradients ``[5, 8]`` and ``[16]`` with dims ``[1, 0]`` on 4 ranks give shards ``[5, 2]`` and ``[4]``.
    """
    name = "split_reduce_scatter"
    many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not many:
        return []
    axes: list[Any] = list(dims) if isinstance(dims, list | tuple) else [dims] * len(many)
    if len(axes) != len(many):
        raise ArgumentError(f"{name}: {len(many)} tensors but {len(axes)} dims")
    group = _checked(many[0], parallel_mode, name)
    for i, x in enumerate(many):
        if not isinstance(x, Tensor):
            _checked(x, group, name)  # raises
        check_input(x, name)
        if x.requires_grad:
            many[i] = x.detach()
    for i, x in enumerate(many):
        axes[i] = checked_dim(x, axes[i], name)
    if wire is not None:
        options = wire_sum.WireOptions(wire, wire_between, exchange)
        results = wire_sum.split_reduce_scatter(many, axes, group, name, options, dtype, scale)
    elif wire_between is not None or exchange is not None:
        raise ArgumentError(f"{name}: wire_between and exchange need wire, the dtype that travels")
    else:
        results = _split_reduce_scatter(many, axes, group, dtype, scale)
    return results[0] if isinstance(tensors, Tensor) else results


def _split_reduce_scatter(
    many: list[Tensor], axes: list[int], group: dist.ProcessGroup, dtype: torch.dtype | None, scale: float | None
) -> list[Tensor]:
    """Run ``split_reduce_scatter`` of checked arguments, ``axes`` from the front; return this rank's shard of each."""
    name = "split_reduce_scatter"
    world, rank = group.size(), group.rank()
    span = enter(name, name, group, many, (tuple(axes), dtype, scale)) or Span(name)
    if dtype is None:
        dtype = many[0].dtype
        if len({x.dtype for x in many}) > 1:
            kinds = sorted({str(x.dtype) for x in many})
            raise ArgumentError(f"{name}: tensors of different dtypes {kinds} need an explicit dtype")
    if hooks.observer is not None and len(many) > 1:
        compare_arguments(name, group, dtypes=[x.dtype for x in many])
    planned = plan_fused(
        tuple(map(_shape_of, many)), tuple(map(Tensor.stride, many)), tuple(axes), world, rank, dtype
    )  # fmt: skip
    try:
        wire, path, copied = planned.pack.pack(many, scale=scale)
    except TypeError as error:  # dtypes without arithmetic, or a scale that is no number
        raise ArgumentError(f"{name}: {error}") from error
    except ValueError as error:  # a scale that fp32 cannot hold
        raise UnsupportedError(f"{name}: {error}") from error
    summed = wire
    if world > 1:  # over one rank the tensors are only cast and scaled
        summed = eager.sum_wire(wire, group, name)
    span.end(path, copied, wire.nbytes * (world - 1) // world)
    results = []
    for start, stop, shape, dim, size in planned.shards:
        part = summed[start:stop].view(shape)  # slices, as autograd refuses writes into the results of ``split``
        results.append(part if size is None else part.narrow(dim, 0, size))  # without the padding of an uneven dim
    return results
