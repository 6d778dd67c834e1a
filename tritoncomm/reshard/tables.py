"""Blocks of local tensors as tables for the copy kernels, and as pairs of views."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tritoncomm_kernels import Copies, Segment, Segments

from tritoncomm.core.plan import Ints
from tritoncomm.core.segments import MOST_SEGMENTS, strided_segments
from tritoncomm.reshard.layout import Array
from tritoncomm.reshard.plan import Local, Side

__all__ = ["Blocks", "Pair", "Strides", "Table", "blocks_of", "copies_of", "joined", "local_pairs", "table_of"]

Strides = tuple[tuple[int, ...], ...]
Pair = tuple[int, Ints, Ints, int, Ints, int]
"""A block that stays: tensor, size, strides and offset in the source, strides and offset in the result."""
Table = tuple[tuple[int, ...], Segments]
"""The tensors of a bucket, and its segments, whose indices count those."""


class Blocks(NamedTuple):
    """Boxes of tensors, and where they are in the wire.

    Attributes:
        tensor: index of every block's tensor.
        start, size: ``[dims, blocks]``.
        wire: byte offset on the wire.
        gaps: elements from one index to the next on the wire, ``[dims, blocks]``.
    """

    tensor: Array
    start: Array
    size: Array
    wire: Array
    gaps: Array

    def pick(self, index: Any) -> "Blocks":
        """Those at an index or under a mask."""
        return Blocks(*(each[..., index] for each in self))

    def parts(self, block: Array, start: Array, size: Array, dtypes: Sequence[torch.dtype]) -> "Blocks":
        """Boxes inside of blocks: the block of each, its start and size."""
        whose = self.pick(block)
        itemsize = np.array([dtype.itemsize for dtype in dtypes], np.int64)[whose.tensor]
        wire = whose.wire + ((start - whose.start) * whose.gaps).sum(0) * itemsize
        return Blocks(whose.tensor, start, size, wire, whose.gaps)


def blocks_of(side: Side | Local, start: Array, shift: int = 0) -> Blocks:
    """Blocks of a side of a bucket, contiguous on the wire, that many bytes further on."""
    gaps = np.ones_like(side.size)
    gaps[:-1] = side.size[:0:-1].cumprod(0)[::-1]
    return Blocks(side.tensor, start, side.size, side.wire + shift, gaps)


def joined(*parts: Blocks) -> Blocks:
    """All blocks, one part after the other."""
    return Blocks(*(np.concatenate(each, -1) for each in zip(*parts, strict=True)))


def table_of(blocks: Blocks, strides: Strides, dtypes: Sequence[torch.dtype]) -> Table | None:
    """The segments of blocks, in their order; None if there are none.

    Equal blocks of a tensor are segments of equal rows, wherever they are on the wire.

    Args:
        blocks: the blocks.
        strides: of all tensors, in elements.
        dtypes: of all tensors on the wire.
    """
    tensor, start, size, wire, gaps = blocks
    if not len(tensor):
        return None
    ids, position = np.unique(tensor, return_inverse=True)
    steps = _padded(strides, len(size), ids)[position].T
    itemsize = np.array([dtypes[i].itemsize for i in ids], np.int64)[position]
    rows = _rows(start, size, steps, (wire, gaps, itemsize))
    rows[0] = position[rows[0]]
    used = tuple(ids.tolist())
    return used, Segments(zip(*(each.tolist() for each in rows), strict=True), [dtypes[i] for i in used])


def _padded(strides: Strides, dims: int, ids: Array) -> Array:
    """Strides of the tensors ``ids`` with leading zeros."""
    padded = [(0,) * (dims - len(strides[i])) + tuple(strides[i]) for i in ids.tolist()]
    return np.array(padded, np.int64).reshape(len(ids), dims)


def _rows(start: Array, size: Array, steps: Array, ends: tuple[Array, Array, Array]) -> list[Array]:
    """Block, offset, rows, row, stride, wire offset and stride there of every segment.

    Dims are coalesced where one stride can walk them in the tensor. It can on the wire, too: a dim that a block has in
    full has its full extent there.

    Args:
        start, size: of the blocks.
        steps: strides of their tensors.
        ends: of the wire: byte offsets, strides, bytes of an element.
    """
    count, (wire, gaps, itemsize) = size.shape[1], ends
    columns = np.arange(count)
    # Levels from the innermost dim out: extent and steps of each; ``top`` is the outermost level so far.
    extent, step, gap = np.ones((3, len(size) + 2, count), np.int64)
    top = np.zeros(count, np.int64)
    for dim in reversed(range(len(size))):
        length, stride = size[dim], steps[dim]
        joins = (length == 1) | (stride == extent[top, columns] * step[top, columns])
        extent[top, columns] *= np.where(joins, length, 1)
        opens = np.nonzero(~joins)[0]
        top[opens] += 1
        extent[top[opens], opens], step[top[opens], opens] = length[opens], stride[opens]
        gap[top[opens], opens] = gaps[dim, opens]
    offset = (start * steps).sum(0)
    outer = extent[2:].prod(0)
    block = np.repeat(columns, outer)
    index = np.arange(len(block)) - np.repeat(np.cumsum(outer) - outer, outer)
    offset, at = offset[block], np.zeros_like(block)
    for level in range(2, len(extent)):
        index, digit = np.divmod(index, extent[level, block])
        offset = offset + digit * step[level, block]
        at += digit * gap[level, block]
    at = wire[block] + at * itemsize[block]
    return [block, offset, extent[1, block], extent[0, block], step[1, block], at, gap[1, block]]


def copies_of(pairs: Sequence[Pair], dtypes: Sequence[torch.dtype]) -> tuple[Ints, Copies] | None:
    """The tensors of these pairs, and the table of their copies; None where there is none, or too many segments.

    Args:
        pairs: blocks that stay.
        dtypes: of all results.
    """
    used = sorted({pair[0] for pair in pairs})
    rows: list[Segment] = []
    for index, size, stride, offset, into, at in pairs:
        itemsize = dtypes[index].itemsize
        rows += strided_segments(used.index(index), size, stride, offset, itemsize, at * itemsize, into)
        if len(rows) > MOST_SEGMENTS:
            return None
    return (tuple(used), Copies(rows, [dtypes[i] for i in used])) if rows else None


def local_pairs(local: Local, strides: tuple[Strides, Strides]) -> list[Pair]:
    """Blocks that stay, as a plan's index space has them."""
    pairs: list[Pair] = []
    sides = (local.source.T.tolist(), local.target.T.tolist())
    for place, (index, extent) in enumerate(zip(local.tensor.tolist(), local.size.T.tolist(), strict=True)):
        dims = len(strides[0][index])
        described: list[Any] = []
        for side, steps in zip(sides, strides, strict=True):
            start = side[place][len(extent) - dims :]
            described += [steps[index], sum(a * b for a, b in zip(start, steps[index], strict=True))]
        pairs.append((index, tuple(extent[len(extent) - dims :]), *described))
    return pairs
