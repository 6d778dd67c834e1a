"""Planner of a sum over a wire: the shards of all tensors in chunks, cut the same way on every rank."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from tritoncomm_kernels.geometry import coalesce

from tritoncomm.core.blocks import Block
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.node_exchange import Nodes
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints
from tritoncomm.core.split import Split, split_by

__all__ = ["Chunk", "Layout", "WireExchange", "plan_chunks", "row_stride", "sum_pass"]

_ALIGNMENT = 16  # bytes: NCCL (2.28) copies a block that starts elsewhere by single bytes
WireExchange = Exchange[Pass, Pass]
"""An exchange whose unpack sums what arrives."""
Layout = tuple[Ints, Ints, int, Ints]
"""Shape and strides of a tensor, the dim that is split, and its size on every rank."""


class Chunk(NamedTuple):
    """A part of every rank's shards.

    Attributes:
        start, size: this rank's elements among its shards of all tensors.
        levels: one exchange from rank to rank, or two: in the node, and of the nodes' sums between nodes. Each unpack
            sums what arrives.
    """

    start: int
    size: int
    levels: tuple[WireExchange] | tuple[WireExchange, WireExchange]


class _Box(NamedTuple):
    """A box of one tensor's outer dims, those before the split one, and a range of the columns of every rank.

    Attributes:
        start, size: of the box in the outer dims.
        columns: for every rank the first of these columns of its shard, and their number.
    """

    tensor: int
    start: Ints
    size: Ints
    columns: tuple[tuple[int, int], ...]

    def elements_of(self, rank: int) -> int:
        """Return the elements of the box in the shard of one rank."""
        return math.prod(self.size) * self.columns[rank][1]


@lru_cache(maxsize=256)
def plan_chunks(
    layouts: tuple[Layout, ...],
    world: int,
    rank: int,
    limit: int,
    dtype: torch.dtype,
    between: torch.dtype,
    nodes: Nodes | None,
) -> list[Chunk]:
    """Cut the shards of all tensors into chunks of about ``limit`` elements of all ranks, the same on every rank.

    Args:
        dtype, between: of the wire, and of the sums of nodes between nodes.
        nodes: of the group, for two levels; None for an exchange from rank to rank.
    """
    splits = [split_by(*layout[:3], world, layout[3]) for layout in layouts]
    order = list(range(world))
    if nodes is not None:  # the wire has, for each local rank, what goes to that rank of every node
        order = [node * nodes.size + local for local in range(nodes.size) for node in range(nodes.count)]
    result: list[Chunk] = []
    start, elements_of_boxes, boxes = 0, 0, []
    for box, elements in (*_boxes(splits, limit, _ALIGNMENT // dtype.itemsize), (None, 0)):  # the last ends a chunk
        if boxes and (box is None or elements_of_boxes + elements > limit):
            counts = [sum(each.elements_of(r) for each in boxes) for r in range(world)]
            blocks = _blocks(splits, boxes, order, dtype.itemsize)
            pack = Pass(blocks, [dtype] * len(splits), sum(counts))
            levels = (_flat(pack, counts, rank),) if nodes is None else _by_nodes(pack, counts, rank, between, nodes)
            result.append(Chunk(start, counts[rank], levels))
            start, elements_of_boxes, boxes = start + counts[rank], 0, []
        if box is not None:
            boxes.append(box)
            elements_of_boxes += elements
    return result


def _flat(pack: Pass, counts: Sequence[int], rank: int) -> WireExchange:
    """Return the exchange of a chunk from rank to rank; ``counts`` are the elements of every rank's shards."""
    own, world = counts[rank], len(counts)
    # Every rank has all counts, so all of them choose the even call.
    send, recv = ((), ()) if len(set(counts)) == 1 else (tuple(counts), (own,) * world)
    bytes_sent = (sum(counts) - own) * pack.dtypes[0].itemsize
    return Exchange(pack, sum_pass(world, own, pack.dtypes[0]), send, recv, bytes_sent)


def _by_nodes(
    pack: Pass, counts: Sequence[int], rank: int, between: torch.dtype, nodes: Nodes
) -> tuple[WireExchange, WireExchange]:
    """Return the exchanges of a chunk in the node, by local rank, and of the nodes' sums between nodes.

    Args:
        pack: writes the blocks for the ranks in the order of ``nodes``: by local rank, and then by node.
        counts: elements of every rank's block, by rank.
    """
    # First each rank sums, over its node, what goes to the ranks of its own local rank on all nodes; then it sends each
    # of those its part of the sum.
    of_local = [sum(counts[local :: nodes.size]) for local in range(nodes.size)]
    of_nodes = counts[nodes.local :: nodes.size]
    summed, own = of_local[nodes.local], counts[rank]
    dtype = pack.dtypes[0]
    in_node = Exchange(
        pack,
        unpack=sum_pass(nodes.size, summed, dtype),
        send_counts=nodes.inside(of_local),
        recv_counts=nodes.inside([summed] * nodes.size),
        bytes_sent=(sum(counts) - summed) * dtype.itemsize,
    )
    flat = Block(tensor=0, size=(summed,), stride=(1,), offset=0, wire_byte=0, wire_stride=(1,))
    crossing = Exchange(
        Pass([flat], [between], summed),
        unpack=sum_pass(nodes.count, own, between),
        send_counts=nodes.across(of_nodes),
        recv_counts=nodes.across([own] * nodes.count),
        bytes_sent=(summed - own) * between.itemsize,
    )
    return in_node, crossing


@lru_cache(maxsize=256)
def sum_pass(count: int, elements: int, dtype: torch.dtype) -> Pass:
    """Return the pass that sums ``count`` parts of a wire, of this many elements, into a contiguous tensor."""
    return Pass([Block(0, (count, elements), (0, 1), 0, 0, (elements, 1))], [dtype], count * elements, sums=True)


def _boxes(splits: Sequence[Split], limit: int, unit: int) -> Iterator[tuple[_Box, int]]:
    """Yield boxes of about ``limit`` elements of all ranks, in the order of the shards, and their elements.

    They follow from the shapes alone: ranks may have other strides. A row has the columns of all ranks, which are cut
    at multiples of ``unit``.
    """

    def edge(size: int, cut: int) -> int:
        """Return the column at which piece number ``cut`` of a rank's ``size`` columns begins."""
        return size if cut == cuts else size * cut // cuts // unit * unit

    for i, split in enumerate(splits):
        outer = split.shape[: split.dim] or (1,)
        if not split.row or 0 in outer:
            continue
        assert split.lengths is not None  # layouts have the sizes of all ranks
        cuts = -(-split.row // limit)  # 1, except where one row is too much: then its columns are cut
        for start, size in _outer_boxes(outer, max(limit // split.row, 1)):
            for cut in range(cuts):
                edges = [(edge(n, cut), edge(n, cut + 1)) for n in split.lengths]
                columns = tuple([(low, high - low) for low, high in edges])
                yield _Box(i, start, size, columns), math.prod(size) * sum(n for _, n in columns)


def _outer_boxes(outer: Ints, limit: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield start and size of boxes that cover dims of these sizes, of at most ``limit`` indices, in row-major order.

    Example:
        ``(2, 5)`` in boxes of 3 has the starts (0, 0), (0, 3), (1, 0), (1, 3).
    """
    counts = [math.prod(outer[d + 1 :]) for d in range(len(outer))]  # indices of the dims behind each dim
    depth = next(d for d, count in enumerate(counts) if count <= limit)  # the outermost dim that boxes cut
    rows = limit // counts[depth]
    for index in itertools.product(*map(range, outer[:depth])):
        for first in range(0, outer[depth], rows):
            start = (*index, first, *(0 for _ in outer[depth + 1 :]))
            yield start, (*(1 for _ in index), min(rows, outer[depth] - first), *outer[depth + 1 :])


@lru_cache(maxsize=4096)
def row_stride(shape: Ints, stride: Ints, dim: int) -> int | None:
    """Return the stride that walks the dims from ``dim`` on, merged; None if no single one does."""
    sizes, steps = coalesce(shape[dim:], stride[dim:])
    if 0 in shape or sizes == (1,):
        return 1
    return steps[0] if len(steps) == 1 else None


def _blocks(splits: Sequence[Split], boxes: Sequence[_Box], order: Sequence[int], itemsize: int) -> tuple[Block, ...]:
    """Return the blocks of a chunk's boxes, for a wire that has the ranks in this order.

    Example:
        A contiguous ``[2, 6]`` in fp32, split along dim 1 over 2 ranks, in one box of all rows and columns: rank 0 has
        columns 0 to 2, rank 1 columns 3 to 5. Blocks of ``(2, 3)`` by ``(6, 1)`` start at elements 0 and 3 of the
        tensor, and at bytes 0 and 24 of the wire.
    """
    blocks, wire_byte = [], 0
    for rank in order:
        for box in boxes:
            split = splits[box.tensor]
            assert split.lengths is not None  # layouts have the sizes of all ranks
            column_stride = row_stride(split.shape, split.stride, split.dim)
            assert column_stride is not None  # callers have made tensors contiguous that no single stride walks
            first, count = box.columns[rank]  # of the columns of the rank's shard
            first_column = sum(split.lengths[:rank]) + first  # of the tensor's columns
            outer_stride = split.stride[: split.dim] or (0,)  # a split of dim 0 has one outer index, 0
            start, stride, size = (*box.start, first_column), (*outer_stride, column_stride), (*box.size, count)
            offset = sum(index * step for index, step in zip(start, stride, strict=True))
            blocks.append(Block(box.tensor, size, stride, offset, wire_byte, contiguous_stride(size)))
            wire_byte += math.prod(size) * itemsize
    return _merged(blocks, itemsize)


def _merged(blocks: Sequence[Block], itemsize: int) -> tuple[Block, ...]:
    """Join neighbouring blocks of one size, at equal distances in a tensor and in the wire, to one of one dim more."""
    runs: list[_Run] = []
    for block in blocks:
        if 0 in block.size:
            continue
        extended = runs[-1].extended_by(block, itemsize) if runs else None
        if extended is None:
            runs.append(_Run(block, 1, (0, 0)))
        else:
            runs[-1] = extended
    return tuple([run.joined(itemsize) for run in runs])


class _Run(NamedTuple):
    """Blocks of one size: the first, their number, and the distances from one to the next: elements, bytes of the wire.

    All are contiguous in the wire, so that equal sizes have equal strides there.
    """

    first: Block
    count: int
    distances: tuple[int, int]

    def extended_by(self, block: Block, itemsize: int) -> "_Run | None":
        """Return the run with one more block; None if it does not continue it. The second block sets the distances."""
        first, count, distances = self
        if (block.tensor, block.size, block.stride) != (first.tensor, first.size, first.stride):
            return None
        apart = block.offset - first.offset, block.wire_byte - first.wire_byte
        if count == 1:
            return _Run(first, 2, apart) if apart[0] >= 0 and apart[1] % itemsize == 0 else None
        return _Run(first, count + 1, distances) if apart == (count * distances[0], count * distances[1]) else None

    def joined(self, itemsize: int) -> Block:
        """Return the run as one block."""
        first, count, (offset, wire) = self
        if count == 1:
            return first
        return first._replace(
            size=(count, *first.size),
            stride=(offset, *first.stride),
            wire_stride=(wire // itemsize, *first.wire_stride),
        )
