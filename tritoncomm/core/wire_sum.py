"""Reduce-scatter over a 16-bit wire: values travel in 16 bits, and are summed in fp32 in rank order, rounded once.

``out = round((wire(x of rank 0) + wire(x of rank 1) + ...) * scale)``: pack with the cast, all-to-all, one sum. Over
nodes the sum has two levels: of the ranks of each node, then of the nodes, both in order. The tensors are cut into
chunks: the exchange of a chunk runs while the one before it is summed, and only a few chunks need memory.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate as running
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm.core import backend, eager, ops
from tritoncomm.core.autograd import outside_graphs
from tritoncomm.core.call import compare_arguments, enter
from tritoncomm.core.exchange import StartedExchange
from tritoncomm.core.memory import empty, extent_of, share_elements
from tritoncomm.core.node_exchange import Nodes, chosen, nodes_of
from tritoncomm.core.plan import Ints, check_split_sizes, chunk_sizes, located, resized, split_evenly
from tritoncomm.core.validation import check_input, check_kind
from tritoncomm.core.wire_chunks import Chunk, Layout, plan_chunks, row_stride
from tritoncomm.errors import ArgumentError, CommError, UnsupportedError
from tritoncomm.record import CopyPath, Span

__all__ = [
    "WIRES",
    "Wire",
    "WireOptions",
    "all_reduce",
    "checked_wire",
    "chunk_elements",
    "reduce_scatter",
    "split_reduce_scatter",
    "sum_shards",
]

WIRES = (torch.bfloat16, torch.float16)
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Chunks of a call, of at least so many bytes of the wire. Four are in memory: two that were packed, two that arrive.
_CHUNKS, _LEAST = 12, 1 << 20


class WireOptions(NamedTuple):
    """Arguments ``wire``, ``wire_between`` and ``exchange`` of a caller, not checked yet."""

    dtype: Any
    between: Any = None
    exchange: Any = None


class Wire(NamedTuple):
    """How a sum travels.

    Attributes:
        dtype: of the values.
        between: of the sums of nodes, on their way between nodes.
        nodes: of the group, for two levels; None for an exchange from rank to rank.
    """

    dtype: torch.dtype
    between: torch.dtype = torch.float32
    nodes: Nodes | None = None

    @property
    def words(self) -> tuple[Any, ...]:
        """Return the parts of a wire that ranks compare in check mode."""
        return self.dtype, self.between, self.nodes and self.nodes.size


class Summed(NamedTuple):
    """A sum: the path of its passes, the bytes that they read plus write, the bytes sent, and a handle."""

    path: CopyPath
    copied: int
    sent: int
    handle: backend.Handle | None = None


def checked_wire(options: WireOptions, group: ProcessGroup, name: str) -> Wire:
    """Check the options of a wire, and return it."""
    dtype, between, exchange = options
    if dtype not in WIRES:
        raise ArgumentError(f"{name}: wire must be bfloat16 or float16, not {dtype!r:.80}")
    if between not in (None, torch.float32, *WIRES):
        raise ArgumentError(f"{name}: wire_between must be float32, bfloat16 or float16, not {between!r:.80}")
    if between is not None and exchange != "node":
        raise ArgumentError(f"{name}: wire_between needs exchange='node'")
    if exchange is not None:
        return Wire(dtype, between or torch.float32, chosen(exchange, group, name))
    count = nodes_of(group, name)
    if count > 1:
        raise UnsupportedError(
            f"{name}: the group is on {count} nodes, where an exchange from rank to rank sends more than a ring: pass "
            "exchange='node', or exchange='flat' to have it anyway"
        )
    return Wire(dtype)


def _checked_factor(op: Any, scale: Any, world: int, name: str) -> float | None:
    """Return the factor of a sum by ``scale``, or of an average; reject other ops, and a scale that is no number."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(f"{name}: with wire op is SUM or AVG, not {op}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise ArgumentError(f"{name}: scale must be a number, not {type(scale).__name__}")
    if op == ReduceOp.AVG:
        return (1.0 if scale is None else scale) / world
    return None if scale is None else float(scale)


def _check_summed(x: Tensor, name: str) -> None:
    """Reject a tensor that is not floating point."""
    check_input(x, name)
    if x.dtype not in _SUMMED:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUMMED)
        raise UnsupportedError(f"{name}: with wire the tensor must be of one of the dtypes {kinds}, not {x.dtype}")


def _check_out(out: Any, x: Tensor, own: Tensor, name: str) -> None:
    """Reject an ``out`` that the sum of ``own``, this rank's shard of x, cannot be written into."""
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name}: out must be a tensor, not {type(out).__name__}")
    check_kind(out, f"{name}: out")
    if out.shape != own.shape or not out.is_contiguous() or out.device != x.device or out.dtype not in _SUMMED:
        raise ArgumentError(
            f"{name}: out must be contiguous, floating point, {list(own.shape)} on {x.device}, not {out.dtype} "
            f"{list(out.shape)} by {out.stride()} on {out.device}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name}: out requires grad, and is written into; use torch.no_grad()")
    # Chunks are packed before their sums are written, so the shard itself is safe.
    if out.data_ptr() == own.data_ptr() and out.dtype is own.dtype and own.is_contiguous():
        return
    starts, ends = zip(*((each.data_ptr(), each.data_ptr() + extent_of(each)) for each in (out, x)), strict=True)
    if max(starts) < min(ends) and share_elements(out, x):
        raise ArgumentError(f"{name}: out shares memory with the tensor, and is not this rank's shard of it")


@lru_cache(maxsize=256)
def _shard_of(shape: Ints, dim: int, sizes: Ints | None, world: int, rank: int) -> tuple[Ints, Ints]:
    """Return the size of ``dim`` on every rank, and the shape of this rank's shard."""
    sizes = sizes or (split_evenly(shape, dim, world),) * world
    check_split_sizes(shape, dim, world, sizes)
    return sizes, resized(shape, dim, sizes[rank])


@outside_graphs
def reduce_scatter(
    x: Tensor,
    dim: int,
    group: ProcessGroup,
    name: str,
    options: WireOptions,
    sizes: Ints | None = None,
    op: Any = ReduceOp.SUM,
    asynchronous: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    scratch: Tensor | None = None,
) -> Any:
    """Run ``collective.reduce_scatter`` with a wire.

    Args:
        dim: from the front.
        scratch: with ``asynchronous``, contiguous memory of the wire's dtype for what arrives.
    """
    world, rank = group.size(), group.rank()
    wire, factor = checked_wire(options, group, name), _checked_factor(op, scale, world, name)
    _check_summed(x, name)
    try:
        sizes, shape = _shard_of(x.shape, dim, sizes, world, rank)
    except CommError as error:
        raise located(error, x.shape, name, group) from None
    result = x.new_empty(shape) if out is None else out
    if out is not None:
        _check_out(out, x, x.narrow(dim, sum(sizes[:rank]), sizes[rank]), name)
    elif accumulate:
        raise ArgumentError(f"{name}: accumulate needs out, what is added to")
    compare_arguments(name, group, async_op=asynchronous)  # which decides the lengths of chunks
    span = enter(name, "wire_sum", group, x, ((dim,), sizes, op, *wire.words, factor, accumulate)) or Span(name)
    handle_result = result if asynchronous else None
    flat = result.view(-1)
    # Before the handle notes the version of what is sent, which ``out`` may be a view of.
    if out is not None:
        torch.autograd.graph.increment_version(out)
    path, copied, sent, handle = _sum(
        [x], [(dim, sizes)], flat, group, name, wire, factor, accumulate, handle_result, scratch
    )
    span.end(path, copied, sent)
    return (result, handle) if asynchronous else result


@outside_graphs
def all_reduce(
    tensor: Tensor, group: ProcessGroup, name: str, options: WireOptions, op: Any, scale: float | None = None
) -> Tensor:
    """Run ``collective.all_reduce`` with a wire: each rank sums its part of the elements, then they are gathered."""
    world, rank = group.size(), group.rank()
    wire, factor = checked_wire(options, group, name), _checked_factor(op, scale, world, name)
    _check_summed(tensor, name)
    span = enter(name, "wire_sum", group, tensor, (None, None, op, *wire.words, factor, None)) or Span(name)
    out = ops.resolved(tensor).contiguous()
    made = 0 if out is tensor else 2 * out.nbytes
    flat, sizes = out.detach().view(-1), chunk_sizes(tensor.numel(), world)
    largest = sizes[0]
    is_even = largest * world == flat.numel()
    # All ranks gather parts of the largest size, as parts of different sizes would be a broadcast each. Only the last
    # ones are shorter, so that all padding is at the end: the first elements of what is gathered are the sum.
    gathered = flat if is_even else flat.new_empty(largest * world)
    # The sum reads all of ``flat`` chunk by chunk, so a part has memory of its own.
    slot = flat.new_empty(largest) if is_even else gathered.narrow(0, rank * largest, largest)
    part = slot.narrow(0, 0, sizes[rank])
    path, copied, sent, _ = _sum([flat], [(0, sizes)], part, group, name, wire, factor)
    if world == 1:
        flat.copy_(part)
    else:
        eager.gather_parts(gathered, slot, group, name)
        if not is_even:
            flat.copy_(gathered.narrow(0, 0, flat.numel()))
            copied += 2 * flat.nbytes
    span.end(path, made + copied, sent + slot.nbytes * (world - 1))
    if out is tensor:
        torch.autograd.graph.increment_version(out)
    return out


@outside_graphs
def split_reduce_scatter(
    many: Sequence[Tensor],
    axes: Sequence[int],
    group: ProcessGroup,
    name: str,
    options: WireOptions,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Run ``collective.split_reduce_scatter`` with a wire; return this rank's shard of each tensor."""
    world, rank = group.size(), group.rank()
    wire, factor = checked_wire(options, group, name), _checked_factor(ReduceOp.SUM, scale, world, name)
    for x in many:
        _check_summed(x, name)
    result = many[0].dtype if dtype is None else dtype
    if (dtype is None and any(x.dtype is not result for x in many)) or not result.is_floating_point:
        raise ArgumentError(f"{name}: with wire the results have one floating-point dtype, of all tensors or given")
    # What ranks have to agree on, with None for the sizes, which follow from the shapes.
    span = enter(name, "wire_sum", group, many, (tuple(axes), None, ReduceOp.SUM, *wire.words, factor, result))
    cuts = [(dim, chunk_sizes(x.shape[dim], world)) for x, dim in zip(many, axes, strict=True)]
    shapes = [resized(x.shape, dim, sizes[rank]) for x, (dim, sizes) in zip(many, cuts, strict=True)]
    lengths = [math.prod(shape) for shape in shapes]
    out = many[0].new_empty(sum(lengths), dtype=result)
    path, copied, sent, _ = _sum(many, cuts, out, group, name, wire, factor)
    (span or Span(name)).end(path, copied, sent)
    starts = running(lengths, initial=0)  # cut by slices: autograd refuses writes into the results of ``split``
    return [out[at : at + n].view(shape) for at, n, shape in zip(starts, lengths, shapes, strict=False)]


def _sum(
    tensors: Sequence[Tensor],
    cuts: Sequence[tuple[int, Ints]],
    out: Tensor,
    group: ProcessGroup,
    name: str,
    wire: Wire,
    scale: float | None,
    accumulate: bool = False,
    result: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Summed:
    """Run ``sum_shards`` of any tensors, cut along (dim, sizes) each."""
    copied, readable, layouts = 0, [], []
    for tensor, (dim, sizes) in zip(tensors, cuts, strict=True):
        x = tensor
        if row_stride(x.shape, x.stride(), dim) is None:
            x = _narrowed(x, wire.dtype).contiguous()  # of one chunk this is the wire, and nothing more is packed
            copied += tensor.nbytes + x.nbytes
        readable.append(x)
        layouts.append((x.shape, x.stride(), dim, sizes))
    summed = sum_shards(
        readable, tuple(layouts), out, group, name, wire, scale, accumulate, result=result, scratch=scratch
    )
    return summed._replace(copied=copied + summed.copied) if copied else summed


def chunk_elements(elements: int, itemsize: int, chunk_bytes: int | None = None) -> int:
    """Return the elements of all ranks in a chunk of a sum of so many; by default a twelfth, of 1 MiB at least."""
    return (chunk_bytes or max(elements * itemsize // _CHUNKS, _LEAST)) // itemsize


def sum_shards(
    tensors: Sequence[Tensor],
    layouts: tuple[Layout, ...],
    out: Tensor,
    group: ProcessGroup,
    name: str,
    wire: Wire,
    scale: float | None = None,
    accumulate: bool = False,
    chunk_bytes: int | None = None,
    result: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Summed:
    """Sum the ranks' tensors, and write this rank's shards of all of them into ``out``, one after the other.

    Args:
        tensors: of a floating-point dtype, with a ``row_stride``.
        layouts: of the tensors; shapes, dims and sizes are the same on every rank, strides need not be.
        out: flat and contiguous, of a floating-point dtype.
        scale: factor applied to the sum.
        accumulate: add to ``out``, before the one rounding.
        chunk_bytes: bytes of the wire in a chunk; a twelfth of it by default, 1 MiB at least.
        result: start all exchanges, and return a handle that sums in ``wait`` and returns this tensor; None waits here.
        scratch: memory for what arrives, of a call that sends all at once from rank to rank; new memory by default.
    """
    elements = 0
    for x in tensors:
        elements += x.numel()
    size = wire.dtype.itemsize
    limit = elements if result is not None else chunk_elements(elements, size, chunk_bytes)
    plan = plan_chunks(layouts, group.size(), group.rank(), max(limit, 1), wire.dtype, wire.between, wire.nodes)
    path: CopyPath = "view"
    copied = bytes_sent = 0
    chunk, flight = None, None
    overlaps = len(plan) > 1 or result is not None
    for following in plan:
        starting = following.levels[0].start(tensors, group, name, scratch, overlaps)
        path, copied = starting.path, copied + starting.copied
        for level in following.levels if group.size() > 1 else ():
            bytes_sent += level.bytes_sent
        if chunk is not None and flight is not None:
            copied += _finish(chunk, flight, out, group, name, scale, accumulate)
        chunk, flight = following, starting
    if chunk is None or flight is None:
        return Summed(path, copied, bytes_sent, None if result is None else backend.Handle(work=None, result=result))
    if path == "view":  # nothing was packed
        path = ops.path_for(flight.recv_wire, "reduce")
    if result is None:
        copied += _finish(chunk, flight, out, group, name, scale, accumulate)
        return Summed(path, copied, bytes_sent)
    if wire.nodes is not None:
        # The second level starts now, not in ``wait``: ranks may wait for handles in different orders, while messages
        # are matched by the order in which they start.
        with _beside(flight.recv_wire, flight.send_wire):
            flight = _cross(chunk, flight, group, name, asynchronous=True)
            copied += flight.copied
    shard, last = out.narrow(0, chunk.start, chunk.size), chunk.levels[-1].unpack
    copied += last.unpacked_bytes([shard], accumulate)  # the span ends before the sum is made
    finish = partial(last.unpack, flight.recv_wire, [shard], scale, accumulate)
    return Summed(
        path, copied, bytes_sent, backend.Handle(flight.work, result, flight.send_wire, flight.recv_wire, finish=finish)
    )


def _finish(
    chunk: Chunk,
    flight: StartedExchange,
    out: Tensor,
    group: ProcessGroup,
    name: str,
    scale: float | None,
    accumulate: bool,
) -> int:
    """Wait for a chunk and sum it into ``out``; with two levels the node's sum crosses first. Return bytes copied."""
    copied = 0
    if len(chunk.levels) > 1:
        flight = _cross(chunk, flight, group, name, asynchronous=False)
        copied = flight.copied
    elif flight.work is not None:
        flight.work.wait()
    last = chunk.levels[-1].unpack
    summed = last.unpack(flight.recv_wire, [out.narrow(0, chunk.start, chunk.size)], scale, accumulate)
    return copied + summed.copied


def _cross(
    chunk: Chunk, flight: StartedExchange, group: ProcessGroup, name: str, asynchronous: bool
) -> StartedExchange:
    """Wait for the exchange in the node, sum, and start the exchange of the nodes' sums."""
    inner, outer = chunk.levels[0], chunk.levels[-1]
    if flight.work is not None:
        flight.work.wait()
    sums = empty(flight.recv_wire, (outer.pack.elements,), (1,), outer.pack.dtypes[0])
    copied = inner.unpack.unpack(flight.recv_wire, [sums]).copied
    crossing = outer.start([sums], group, name, asynchronous=asynchronous)
    return crossing._replace(copied=copied)


@contextmanager
def _beside(*buffers: Tensor) -> Iterator[None]:
    """Run on a new stream, which may use ``buffers`` of the current one; that waits for nothing. A CPU has one."""
    if not buffers[0].is_cuda:
        yield
        return
    device = buffers[0].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            backend.released(buffers)


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in the wire's dtype; fp64 is rounded to 16 bits through fp32, as kernels do."""
    return (x.float() if x.dtype is torch.float64 else x).to(dtype)
