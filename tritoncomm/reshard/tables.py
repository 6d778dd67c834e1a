"""Tables of the copy kernels: boxes of local tensors, on the wire and from a tensor to its result."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tritoncomm_kernels import Segments

from tritoncomm.core.blocks import Block, Blocks, copies_of
from tritoncomm.core.passes import TablePass
from tritoncomm.core.plan import Ints
from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.plan import Side, StayingBlocks

__all__ = [
    "PlacedBoxes", "Strides", "blocks_of", "concatenated", "copies_between", "pass_of", "staying_blocks",
]  # fmt: skip

Strides = tuple[Ints, ...]
"""Strides of all tensors of a plan, in elements."""


class PlacedBoxes(NamedTuple):
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

    def pick(self, index: Any) -> "PlacedBoxes":
        """Return the blocks that an index array or a boolean mask selects."""
        return PlacedBoxes(*(array[..., index] for array in self))

    def cut(self, block: Array, start: Array, size: Array, dtypes: Sequence[torch.dtype]) -> "PlacedBoxes":
        """Return pieces ``[dims, pieces]`` of the blocks ``block`` as blocks, at their places on the wire."""
        whole = self.pick(block)
        itemsize = np.array([dtype.itemsize for dtype in dtypes], np.int64)[whole.tensor]
        wire = whole.wire + ((start - whole.start) * whole.gaps).sum(0) * itemsize
        return PlacedBoxes(whole.tensor, start, size, wire, whole.gaps)


def blocks_of(side: Side | StayingBlocks, start: Array, shift: int = 0) -> PlacedBoxes:
    """Return the blocks of a side, or blocks that stay, each contiguous on the wire, ``shift`` bytes further."""
    # The strides of a contiguous block: the number of elements of all dims behind.
    gaps = np.ones_like(side.size)
    gaps[:-1] = side.size[:0:-1].cumprod(0)[::-1]
    return PlacedBoxes(side.tensor, start, side.size, side.wire + shift, gaps)


def concatenated(*groups: PlacedBoxes) -> PlacedBoxes:
    """Concatenate several groups of blocks into one, in order."""
    return PlacedBoxes(*(np.concatenate(arrays, -1) for arrays in zip(*groups, strict=True)))


def pass_of(
    blocks: PlacedBoxes, strides: Strides, dtypes: Sequence[torch.dtype], *, sums: bool = False
) -> TablePass | None:
    """Return the pass between tensors of a plan and a wire, with segments in the order of the blocks; None without any.

    Args:
        strides: strides of all tensors, in elements.
        dtypes: dtypes of all tensors on the wire.
        sums: an unpack adds up equal pieces.
    """
    if not len(blocks.tensor):
        return None
    # A launch takes the addresses of its tensors as arguments, so a table has indices into ``used``, not the plan's.
    tensors, tensor_place = np.unique(blocks.tensor, return_inverse=True)
    used = tuple(tensors.tolist())
    # Blocks have leading dims of size 1 where their tensor has fewer, whose strides do not matter.
    padded = [(0,) * (len(blocks.size) - len(strides[i])) + tuple(strides[i]) for i in used]
    itemsizes = np.array([dtypes[i].itemsize for i in used], np.int64)
    steps = np.array(padded, np.int64).reshape(len(used), -1)[tensor_place].T
    rows = Blocks(tensor_place, blocks.size, steps, (blocks.start * steps).sum(0), blocks.wire, blocks.gaps)
    table = Segments(rows.segments(itemsizes[tensor_place]) or (), [dtypes[i] for i in used])
    return TablePass(table, used, sums=sums)


def staying_blocks(
    blocks: StayingBlocks, strides: tuple[Strides, Strides], dtypes: Sequence[torch.dtype]
) -> list[Block]:
    """Convert blocks that stay to strided copies into the results; strides are those before and after."""
    result: list[Block] = []
    starts = zip(blocks.source.T.tolist(), blocks.target.T.tolist(), strict=True)
    for tensor, extent, start in zip(blocks.tensor.tolist(), blocks.size.T.tolist(), starts, strict=True):
        before, after = (tuple(side[tensor]) for side in strides)
        first = len(extent) - len(before)  # dims before it are leading ones of a smaller tensor
        source_offset, target_offset = (
            sum(index * step for index, step in zip(indices[first:], steps, strict=True))
            for indices, steps in zip(start, (before, after), strict=True)
        )
        target_byte = target_offset * dtypes[tensor].itemsize  # a block counts elements in a tensor, bytes in a wire
        result.append(Block(tensor, tuple(extent[first:]), before, source_offset, target_byte, after))
    return result


def copies_between(blocks: Sequence[Block], dtypes: Sequence[torch.dtype]) -> TablePass | None:
    """Return the pass of strided copies into results; None without any, or if its table would be too long."""
    used = tuple(sorted({block.tensor for block in blocks}))
    table = copies_of([block._replace(tensor=used.index(block.tensor)) for block in blocks], [dtypes[i] for i in used])
    return TablePass(table, used) if table is not None and table.segments else None
