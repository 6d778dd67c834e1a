"""Reduce-scatter over a 16-bit wire: values travel in 16 bits, and are summed in fp32 in rank order, rounded once.

``out = round((wire(x of rank 0) + wire(x of rank 1) + ...) * scale)``: pack with the cast, all-to-all, one sum. Over
nodes the sum has two levels: of the ranks of each node, then of the nodes, both in order. The tensors are cut into
pieces: the exchange of a piece runs while the one before it is summed, and only a few pieces need memory.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from tritoncomm_kernels import MAX_PARTS, Segments
from tritoncomm_kernels.geometry import coalesce

from tritoncomm.core import backend, ops, segments
from tritoncomm.core.blocks import Block, table_of
from tritoncomm.core.memory import contiguous_stride, empty, extent_of, share_elements
from tritoncomm.core.node_exchange import Nodes, chosen, nodes_of
from tritoncomm.core.plan import Ints
from tritoncomm.core.split import Split, split_by
from tritoncomm.core.validation import check_input, check_kind
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.record import CopyPath

__all__ = [
    "WIRES",
    "Layout",
    "Wire",
    "check_out",
    "check_summed",
    "checked_factor",
    "checked_wire",
    "reduce_scatter",
    "row_stride",
]

WIRES = (torch.bfloat16, torch.float16)
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Pieces of a call, of at least so many bytes of the wire. Four are in memory: two that were packed, two that arrive.
_PIECES, _LEAST = 12, 1 << 20

Layout = tuple[Ints, Ints, int, Ints]
"""Of a tensor: shape, strides, the dim that is split, its size on every rank."""


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


def checked_wire(dtype: Any, between: Any, exchange: Any, group: ProcessGroup, name: str) -> Wire:
    """Check the options of a wire, and return it."""
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


def checked_factor(op: Any, scale: Any, world: int, name: str) -> float | None:
    """Return the factor of a sum by ``scale``, or of an average; reject other ops, and a scale that is no number."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(f"{name}: with wire op is SUM or AVG, not {op}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise ArgumentError(f"{name}: scale must be a number, not {type(scale).__name__}")
    if op == ReduceOp.AVG:
        return (1.0 if scale is None else scale) / world
    return None if scale is None else float(scale)


def check_summed(x: Tensor, name: str) -> None:
    """Reject a tensor that is not floating point."""
    check_input(x, name)
    if x.dtype not in _SUMMED:
        raise UnsupportedError(f"{name}: with wire the tensor must be floating point, not {x.dtype}")


def check_out(out: Any, x: Tensor, shape: Ints, name: str) -> None:
    """Reject an ``out`` that the result of this shape cannot be written into."""
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name}: out must be a tensor, not {type(out).__name__}")
    check_kind(out, f"{name}: out")
    if (
        tuple(out.shape) != tuple(shape)
        or not out.is_contiguous()
        or out.device != x.device
        or out.dtype not in _SUMMED
    ):
        raise ArgumentError(
            f"{name}: out must be contiguous, floating point, {list(shape)} on {x.device}, not {out.dtype} "
            f"{list(out.shape)} by {out.stride()} on {out.device}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name}: out requires grad, and is written into; use torch.no_grad()")
    starts, ends = zip(*((each.data_ptr(), each.data_ptr() + extent_of(each)) for each in (out, x)), strict=True)
    if max(starts) < min(ends) and share_elements(out, x):
        raise ArgumentError(f"{name}: out shares memory with the tensor")


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of every rank's shards.

    Attributes:
        blocks: from the tensors into the wire, which has the ranks in the order of the exchange.
        counts: elements that every rank gets.
        start: where this rank's elements begin among its shards of all tensors.
        tensors: number of the call's tensors.
        dtype: of the wire.
    """

    blocks: tuple[Block, ...]
    counts: Ints
    start: int
    tensors: int
    dtype: torch.dtype

    @cached_property
    def table(self) -> Segments | None:
        """The blocks as a table; None if it would have too many segments."""
        return table_of(self.blocks, [self.dtype] * self.tensors)


class _Box(NamedTuple):
    """A box of one tensor's outer dims, those before the split one, and a range of the columns of every rank.

    Attributes:
        start, size: of the box in the outer dims.
        columns: of every rank the first column of its shard, and the number of columns.
    """

    tensor: int
    start: Ints
    size: Ints
    columns: tuple[tuple[int, int], ...]


def reduce_scatter(
    tensors: Sequence[Tensor],
    layouts: tuple[Layout, ...],
    out: Tensor,
    group: ProcessGroup,
    name: str,
    wire: Wire,
    scale: float | None = None,
    accumulate: bool = False,
    piece_bytes: int | None = None,
    result: Tensor | None = None,
) -> tuple[CopyPath, int, int, backend.Handle | None]:
    """Sum the ranks' tensors, and write this rank's shards of all of them into ``out``, one after the other.

    Args:
        tensors: without lazy bits, of a floating-point dtype, with a ``row_stride``.
        layouts: of the tensors; shapes, dims and sizes are the same on every rank, strides need not be.
        out: flat and contiguous, of a floating-point dtype.
        scale: factor applied to the sum.
        accumulate: add to ``out``, before the one rounding.
        piece_bytes: bytes of the wire in a piece; a twelfth of it by default, 1 MiB at least.
        result: send all at once, and return a handle that sums in ``wait`` and returns this tensor; None waits here.

    Returns:
        The path of the passes, the bytes that they read plus write, the bytes sent, and the handle.
    """
    rank, world = group.rank(), group.size()
    elements = sum(x.numel() for x in tensors)
    size = wire.dtype.itemsize
    most = elements if result is not None else (piece_bytes or max(elements * size // _PIECES, _LEAST)) // size
    nodes = None if wire.nodes is None else (wire.nodes.count, wire.nodes.size)
    call = _Call(out, group, name, wire, scale, accumulate)
    path: CopyPath = "view"
    flying: tuple[Piece, Tensor, backend.Work] | None = None
    for piece in pieces(layouts, world, rank, max(most, 1), wire.dtype, nodes):
        packed, path = call.pack(tensors, piece)
        following = piece, *call.send(packed, piece)
        if flying is not None:
            call.finish(*flying)
        flying = following
    handle = None if result is None else backend.Handle(None, result, None)
    if flying is not None and result is not None:
        piece, received, work = flying
        call.count(piece)  # now: the span ends before the sum is made
        handle = backend.Handle(work, result, partial(call.finish, piece, received, None, is_counted=True), received)
    elif flying is not None:
        call.finish(*flying)
    return path, call.copied, call.sent, handle


@dataclass
class _Call:
    """Common data of the exchanges and sums of one call, and the bytes that they copy and send."""

    out: Tensor
    group: ProcessGroup
    name: str
    wire: Wire
    scale: float | None
    accumulate: bool
    copied: int = 0
    sent: int = 0

    def pack(self, tensors: Sequence[Tensor], piece: Piece) -> tuple[Tensor, CopyPath]:
        """Copy a piece of the tensors into a new wire, cast to its dtype; return the path."""
        wire = empty(tensors[0], (sum(piece.counts),), (1,), piece.dtype)
        if not wire.numel():
            return wire, "view"
        if ops.path_for(wire, "segments") == "triton" and piece.table is not None:
            path, copied = segments.gather(tensors, wire, piece.table)
            self.copied += copied
            return wire, path
        for block in piece.blocks:
            x, place = block.view(tensors[block.tensor]), block.in_wire(wire)
            # A kernel rounds fp64 to 16 bits through fp32.
            place.copy_(x.float() if x.dtype is torch.float64 else x)
            self.copied += place.nbytes + x.nbytes
        return wire, "torch"

    def send(self, packed: Tensor, piece: Piece) -> tuple[Tensor, backend.Work]:
        """Start the exchange of a piece, of the first level if there are two; return what arrives."""
        rank, world, nodes = self.group.rank(), self.group.size(), self.wire.nodes
        if world == 1:
            return packed, None
        counts = piece.counts
        if nodes is None:
            sends, receives = counts, (counts[rank],) * world
            own = counts[rank]
        else:
            mine = [sum(counts[local :: nodes.size]) for local in range(nodes.size)]
            own = mine[nodes.local]
            sends, receives = nodes.inside(mine), nodes.inside([own] * nodes.size)
        received = empty(packed, (sum(receives),), (1,), packed.dtype)
        self.sent += (sum(counts) - own) * packed.itemsize
        if len({*sends, *receives}) == 1:
            sends = receives = ()
        return received, backend.all_to_all(received, packed, receives, sends, self.group, self.name, True)

    def count(self, piece: Piece) -> None:
        """Count the bytes that ``finish`` copies and sends."""
        nodes, own = self.wire.nodes, piece.counts[self.group.rank()]
        written = own * self.out.itemsize * (2 if self.accumulate else 1)
        if nodes is None:
            self.copied += self.group.size() * own * piece.dtype.itemsize + written
            return
        mine, size = sum(piece.counts[nodes.local :: nodes.size]), self.wire.between.itemsize
        self.copied += mine * (nodes.size * piece.dtype.itemsize + size) + nodes.count * own * size + written
        self.sent += (mine - own) * size

    def finish(self, piece: Piece, received: Tensor, work: backend.Work, is_counted: bool = False) -> None:
        """Wait for a piece, and sum it."""
        if not is_counted:
            self.count(piece)
        if work is not None:
            work.wait()
        nodes, own = self.wire.nodes, piece.counts[self.group.rank()]
        count = self.group.size()
        if nodes is not None:
            counts, count = piece.counts[nodes.local :: nodes.size], nodes.count
            sums = empty(received, (sum(counts),), (1,), self.wire.between)
            _sum(received.view(nodes.size, -1), sums, None)
            received = empty(received, (count * own,), (1,), self.wire.between)
            across = nodes.across([own] * count), nodes.across(counts)
            backend.all_to_all(received, sums, *across, self.group, self.name)
        _sum(received.view(count, own), self.out.narrow(0, piece.start, own), self.scale, self.accumulate)


def _sum(parts: Tensor, out: Tensor, scale: float | None, accumulate: bool = False) -> None:
    """Sum parts ``[n, elements]`` in order into ``out``, with one rounding."""
    count, elements = parts.shape
    if not elements:
        return
    if not accumulate and count <= MAX_PARTS:
        ops.reduce(parts, scale=scale, out=out)
    else:
        table = _sums(count, elements, parts.dtype)
        segments.scatter(parts.view(-1), [out], table, scale=scale, accumulate=accumulate, sums=True)


@lru_cache(maxsize=256)
def _sums(count: int, elements: int, dtype: torch.dtype) -> Segments:
    """Return the table that sums ``count`` parts of a wire."""
    rows = [(0, 0, 1, elements, elements, part * elements * dtype.itemsize) for part in range(count)]
    return Segments(rows, [dtype])


@lru_cache(maxsize=256)
def pieces(
    layouts: tuple[Layout, ...], world: int, rank: int, most: int, dtype: torch.dtype, nodes: tuple[int, int] | None
) -> list[Piece]:
    """Cut the shards of all tensors into pieces of about ``most`` elements, the same on every rank but for ``start``.

    Args:
        nodes: number of nodes and ranks of each; the wire then has, for each local rank, what goes to that rank of
            every node. None for an exchange from rank to rank.
    """
    splits = [split_by(*layout[:3], world, layout[3]) for layout in layouts]
    order = list(range(world))
    if nodes is not None:
        count, size = nodes
        order = [node * size + local for local in range(size) for node in range(count)]
    result, start, held, boxes = [], 0, 0, []
    for box, elements in _boxes(splits, most):
        if boxes and held + elements > most:
            result.append(_piece(splits, boxes, order, start, dtype))
            start, held, boxes = start + result[-1].counts[rank], 0, []
        boxes.append(box)
        held += elements
    return [*result, _piece(splits, boxes, order, start, dtype)] if boxes else result


def _boxes(splits: Sequence[Split], most: int) -> Iterator[tuple[_Box, int]]:
    """Yield boxes of ``most`` elements of all ranks at most, in the order of the shards, and their elements.

    They follow from the shapes alone: ranks may have other strides.
    """
    for i, split in enumerate(splits):
        lead = split.shape[: split.dim] or (1,)
        if not split.row or 0 in lead:
            continue
        # The outermost dim whose index has few enough elements; all dims before it are walked one by one.
        inner = [math.prod(lead[d + 1 :]) * split.row for d in range(len(lead))]
        depth = next((d for d, elements in enumerate(inner) if elements <= most), len(lead) - 1)
        rows = max(most // inner[depth], 1)
        cuts = -(-split.row // most) if inner[depth] > most else 1  # one row is too much: its columns are cut
        for index in itertools.product(*map(range, lead[:depth])):
            for first in range(0, lead[depth], rows):
                size = (*(1 for _ in index), min(rows, lead[depth] - first), *lead[depth + 1 :])
                start = (*index, first, *(0 for _ in lead[depth + 1 :]))
                for cut in range(cuts):
                    edges = [(n * cut // cuts, n * (cut + 1) // cuts) for n in split.lengths or ()]
                    columns = tuple([(low, high - low) for low, high in edges])
                    yield _Box(i, start, size, columns), math.prod(size) * sum(n for _, n in columns)


def row_stride(shape: Ints, stride: Ints, dim: int) -> int | None:
    """Return the stride that walks the dims from ``dim`` on, merged; None if no single one does."""
    sizes, steps = coalesce(shape[dim:], stride[dim:])
    if 0 in shape or sizes == (1,):
        return 1
    return steps[0] if len(steps) == 1 else None


def _piece(
    splits: Sequence[Split], boxes: Sequence[_Box], order: Sequence[int], start: int, dtype: torch.dtype
) -> Piece:
    """Return the piece of some boxes, whose wire has the ranks in this order."""
    counts = [sum(math.prod(box.size) * box.columns[rank][1] for box in boxes) for rank in range(len(order))]
    blocks, at = [], 0
    for rank in order:
        for box in boxes:
            split, (column, count) = splits[box.tensor], box.columns[rank]
            inside = row_stride(split.shape, split.stride, split.dim)
            assert inside is not None
            outer = split.stride[: split.dim] or (0,)
            offset = sum(i * step for i, step in zip(box.start, outer, strict=True))
            offset += (sum((split.lengths or ())[:rank]) + column) * inside
            size = (*box.size, count)
            blocks.append(Block(box.tensor, size, (*outer, inside), offset, at, contiguous_stride(size)))
            at += math.prod(size) * dtype.itemsize
    return Piece(_merged(blocks, dtype.itemsize), tuple(counts), start, len(splits), dtype)


def _merged(blocks: Sequence[Block], itemsize: int) -> tuple[Block, ...]:
    """Join neighbouring blocks of one size, at equal distances in a tensor and in the wire, to one of one dim more."""
    runs: list[tuple[Block, int, Ints]] = []  # first block, number of blocks, distances
    for block in blocks:
        if 0 in block.size:
            continue
        if runs:
            first, count, apart = runs[-1]
            steps = apart if count > 1 else (block.offset - first.offset, block.wire - first.wire)
            place = first.offset + count * steps[0], first.wire + count * steps[1]
            is_next = place == (block.offset, block.wire) and steps[0] >= 0 and steps[1] % itemsize == 0
            if first[:3] == block[:3] and is_next:
                runs[-1] = first, count + 1, steps
                continue
        runs.append((block, 1, (0, 0)))
    return tuple([
        first if count == 1 else first._replace(
            size=(count, *first.size), stride=(apart[0], *first.stride),
            wire_stride=(apart[1] // itemsize, *first.wire_stride),
        )
        for first, count, apart in runs
    ])  # fmt: skip
