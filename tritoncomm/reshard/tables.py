"""Tables of the copy kernels: blocks of local tensors as segments, and staying blocks as pairs of strided views."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tritoncomm_kernels import Copies, Segment, Segments

from tritoncomm.core.plan import Ints
from tritoncomm.core.segments import MOST_SEGMENTS, strided_segments
from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.plan import Side, StayingBlocks

__all__ = [
    "Blocks", "StridedPair", "Strides", "Table", "blocks_of", "concatenated", "copies_of", "pairs_of", "table_of",
]  # fmt: skip

Strides = tuple[Ints, ...]
"""Strides of all tensors of a plan, in elements."""
Table = tuple[Ints, Segments]
"""The tensors that a table refers to, and its segments; a segment counts those tensors."""


class StridedPair(NamedTuple):
    """Block that stays on its rank, as a strided view of its tensor and one of its result.

    Attributes:
        tensor: index of the tensor.
        size: extent of the block.
        source_stride, source_offset: the view of the tensor, in elements.
        target_stride, target_offset: the view of the result, in elements.
    """

    tensor: int
    size: Ints
    source_stride: Ints
    source_offset: int
    target_stride: Ints
    target_offset: int


class Blocks(NamedTuple):
    """Boxes of local tensors and their places on the wire.

    Attributes:
        tensor: index of every block's tensor.
        start, size: first index and extent of every block, ``[dims, blocks]``.
        wire: byte offset of every block on the wire.
        gaps: strides of every block on the wire, in elements, ``[dims, blocks]``.
    """

    tensor: Array
    start: Array
    size: Array
    wire: Array
    gaps: Array

    def pick(self, index: Any) -> "Blocks":
        """Return the blocks that an index array or a boolean mask selects."""
        return Blocks(*(array[..., index] for array in self))

    def cut(self, block: Array, start: Array, size: Array, dtypes: Sequence[torch.dtype]) -> "Blocks":
        """Return pieces ``[dims, pieces]`` of the blocks ``block`` as blocks, at their places on the wire."""
        whole = self.pick(block)
        itemsize = np.array([dtype.itemsize for dtype in dtypes], np.int64)[whole.tensor]
        wire = whole.wire + ((start - whole.start) * whole.gaps).sum(0) * itemsize
        return Blocks(whole.tensor, start, size, wire, whole.gaps)


def blocks_of(side: Side | StayingBlocks, start: Array, shift: int = 0) -> Blocks:
    """Return the blocks of a side, or blocks that stay, each contiguous on the wire, ``shift`` bytes further."""
    # The strides of a contiguous block: the number of elements of all dims behind.
    gaps = np.ones_like(side.size)
    gaps[:-1] = side.size[:0:-1].cumprod(0)[::-1]
    return Blocks(side.tensor, start, side.size, side.wire + shift, gaps)


def concatenated(*groups: Blocks) -> Blocks:
    """Concatenate several groups of blocks into one, in order."""
    return Blocks(*(np.concatenate(arrays, -1) for arrays in zip(*groups, strict=True)))


def table_of(blocks: Blocks, strides: Strides, dtypes: Sequence[torch.dtype]) -> Table | None:
    """Convert blocks to the segments of a copy kernel, in the order of the blocks; None without blocks.

    Args:
        strides: strides of all tensors, in elements.
        dtypes: dtypes of all tensors on the wire.
    """
    if not len(blocks.tensor):
        return None
    # A launch takes the addresses of its tensors as arguments, so a table numbers the tensors that it has.
    tensors, place = np.unique(blocks.tensor, return_inverse=True)
    used = tuple(tensors.tolist())
    # Blocks have leading dims of size 1 where their tensor has fewer, whose strides do not matter.
    padded = [(0,) * (len(blocks.size) - len(strides[i])) + tuple(strides[i]) for i in used]
    itemsizes = np.array([dtypes[i].itemsize for i in used], np.int64)
    rows = _segment_rows(blocks, np.array(padded, np.int64).reshape(len(used), -1)[place].T, itemsizes[place])
    rows[0] = place[rows[0]]
    return used, Segments(zip(*(column.tolist() for column in rows), strict=True), [dtypes[i] for i in used])


def _segment_rows(blocks: Blocks, steps: Array, itemsize: Array) -> list[Array]:
    """Convert blocks to segments of equidistant rows; return a column of values per field of a segment.

    Returns:
        Of every segment: its block, the element offset in the tensor, the number of rows, the elements of a row, the
        stride of the rows, the byte offset on the wire, the stride of the rows there.

    Example:
        A block ``[2, 3, 4]`` at strides ``(24, 8, 1)`` has merged dims of 6 rows and 4 columns, and becomes one segment
        of 6 rows of 4 elements, 8 apart in the tensor and 4 apart on the wire.
    """
    count = blocks.size.shape[1]
    columns = np.arange(count)
    # Merged dims, called levels, from the innermost out: extent, stride and gap; ``top`` is a block's outermost level.
    extent, step, gap = np.ones((3, len(blocks.size) + 2, count), np.int64)
    top = np.zeros(count, np.int64)
    for dim in reversed(range(len(blocks.size))):
        length, stride = blocks.size[dim], steps[dim]
        # Dims that one stride walks in the tensor are merged. One stride walks them on the wire, too, because a dim
        # that a block has in full has its full extent there.
        joins = (length == 1) | (stride == extent[top, columns] * step[top, columns])
        extent[top, columns] *= np.where(joins, length, 1)
        opens = np.nonzero(~joins)[0]
        top[opens] += 1
        extent[top[opens], opens], step[top[opens], opens] = length[opens], stride[opens]
        gap[top[opens], opens] = blocks.gaps[dim, opens]
    # Levels 0 and 1 are the row and the rows of a segment; there is a segment for each index of the outer levels.
    outer = extent[2:].prod(0)
    block = np.repeat(columns, outer)
    index = np.arange(len(block)) - np.repeat(np.cumsum(outer) - outer, outer)
    offset, on_wire = (blocks.start * steps).sum(0)[block], np.zeros_like(block)
    for level in range(2, len(extent)):
        index, digit = np.divmod(index, extent[level, block])
        offset = offset + digit * step[level, block]
        on_wire += digit * gap[level, block]
    on_wire = blocks.wire[block] + on_wire * itemsize[block]
    return [block, offset, extent[1, block], extent[0, block], step[1, block], on_wire, gap[1, block]]


def copies_of(pairs: Sequence[StridedPair], dtypes: Sequence[torch.dtype]) -> tuple[Ints, Copies] | None:
    """Convert pairs of views to one table of direct copies; None without pairs, or if the table would be too long.

    Returns:
        The tensors that the table refers to, and the table.
    """
    used = sorted({pair.tensor for pair in pairs})
    rows: list[Segment] = []
    for tensor, size, stride, offset, target_stride, target_offset in pairs:
        itemsize = dtypes[tensor].itemsize
        rows += strided_segments(
            used.index(tensor), size, stride, offset, itemsize, target_offset * itemsize, target_stride
        )
        if len(rows) > MOST_SEGMENTS:
            return None
    return (tuple(used), Copies(rows, [dtypes[i] for i in used])) if rows else None


def pairs_of(blocks: StayingBlocks, strides: tuple[Strides, Strides]) -> list[StridedPair]:
    """Convert blocks that stay to pairs of strided views; strides are those before and after."""
    pairs: list[StridedPair] = []
    starts = zip(blocks.source.T.tolist(), blocks.target.T.tolist(), strict=True)
    for tensor, extent, start in zip(blocks.tensor.tolist(), blocks.size.T.tolist(), starts, strict=True):
        first = len(extent) - len(strides[0][tensor])  # dims before it are leading ones of a smaller tensor
        views: list[Any] = []
        for at, steps in zip(start, (strides[0][tensor], strides[1][tensor]), strict=True):
            views += [steps, sum(a * step for a, step in zip(at[first:], steps, strict=True))]
        pairs.append(StridedPair(tensor, tuple(extent[first:]), *views))
    return pairs
