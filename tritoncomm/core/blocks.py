"""Blocks: strided boxes of tensors, each with its place in a flat wire, or in another tensor."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tritoncomm_kernels import PADDING, Copies, Segment, Segments

from tritoncomm.core.memory import PLAIN
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["MOST_SEGMENTS", "Array", "Block", "Blocks", "check_cover", "copies_of", "table_of"]

Array = np.ndarray[Any, np.dtype[Any]]
_MOST_ROWS = 1 << 14  # that `check_cover` looks at, in less than a millisecond
_UNITS = "wire_byte counts bytes, and the strides and the size of the wire count elements"
MOST_SEGMENTS = 8192  # more than that many small segments take longer than one launch for every tensor


class Block(NamedTuple):
    """``wire[wire_byte + sum(i*wire_stride)*itemsize] <-> tensor[offset + sum(i*stride)]`` for each index i of the box.

    ``wire_byte`` alone counts bytes, as a wire may hold several dtypes.

    Attributes:
        tensor: index of the tensor, or ``PADDING``: bytes of the wire that are zero.
        size: extent of the box.
        stride, offset: strides, and distance from the tensor's data pointer, in elements.
        wire_byte: byte of the wire, or of the target, at which the box starts.
        wire_stride: strides there, in elements.
    """

    tensor: int
    size: Ints
    stride: Ints
    offset: int
    wire_byte: int
    wire_stride: Ints

    @classmethod
    def of_box(
        cls,
        tensor: int,
        shape: Sequence[int],
        stride: Sequence[int],
        start: Sequence[int],
        extent: Ints,
        wire_byte: int,
    ) -> "Block":
        """Return a box of a tensor of this shape, contiguous in the wire.

        Example:
            Rows 2 to 4 and columns 3 to 8 of a contiguous ``[6, 10]`` are ``Block(0, (2, 5), (10, 1), 23, 0, (5, 1))``.
        """
        if len({len(shape), len(stride), len(start), len(extent)}) > 1 or any(
            at < 0 or count < 0 or at + count > size for size, at, count in zip(shape, start, extent, strict=True)
        ):
            raise ShapeError(
                f"block: {list(extent)} elements from {list(start)} on are not inside a tensor {list(shape)}"
            )
        first = sum(at * step for at, step in zip(start, stride, strict=True))
        dense = tuple([math.prod(extent[i + 1 :]) for i in range(len(extent))])
        return cls(tensor, tuple(extent), tuple(stride), first, wire_byte, dense)

    def at(self, index: int, itemsize: int) -> "Block":
        """Return the block of one index of dim 0; ``itemsize`` is that of the wire."""
        offset, wire = self.offset + index * self.stride[0], self.wire_byte + index * self.wire_stride[0] * itemsize
        return Block(self.tensor, self.size[1:], self.stride[1:], offset, wire, self.wire_stride[1:])

    def view(self, x: Tensor) -> Tensor:
        """Return the box as a view of its tensor."""
        if type(x) in PLAIN:
            return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)
        # A wrapper may have its data in another tensor, with another offset: only relative views are right.
        end = 1 + self.offset + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))
        return x.as_strided((end,), (1,)).narrow(0, self.offset, end - self.offset).as_strided(self.size, self.stride)

    def in_wire(self, wire: Tensor) -> Tensor:
        """Return the box as a view of the wire, which has the box's dtype."""
        return wire.as_strided(self.size, self.wire_stride, wire.storage_offset() + self.wire_byte // wire.itemsize)


class Blocks(NamedTuple):
    """Many blocks, a column of each array for every one; ``size`` and the strides are ``[dims, blocks]``."""

    tensor: Array
    size: Array
    stride: Array
    offset: Array
    wire: Array
    wire_stride: Array

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "Blocks":
        """Return the blocks as columns; those of fewer dims get leading ones of size 1."""
        dims = max([len(block.size) for block in blocks], default=0)
        missing = [(1,) * (dims - len(block.size)) for block in blocks]
        size, stride, wire_stride = (
            np.array([one + each for one, each in zip(missing, rows, strict=True)], np.int64)
            .reshape(len(blocks), dims)
            .T
            for rows in zip(*((b.size, b.stride, b.wire_stride) for b in blocks), strict=True)
        )
        tensor, offset, wire = np.array([(b.tensor, b.offset, b.wire_byte) for b in blocks], np.int64).T
        return cls(tensor, size, stride, offset, wire, wire_stride)

    def segments(self, itemsize: Array, most: int | None = None) -> list[Segment] | None:
        """Return the fewest segments of equidistant rows, block by block; None if there are more than ``most``.

        Args:
            itemsize: bytes of an element in the wire, of every block.

        Example:
            A box ``[2, 3, 4]`` by ``(24, 8, 1)``, dense in the wire, has merged dims of 6 rows and 4 columns: one
            segment of 6 rows of 4 elements, 8 apart in the tensor.
        """
        dims, count = self.size.shape
        columns = np.arange(count)
        # Merged dims, called levels, from the innermost out: extent, and strides in the tensor and in the wire. Level 0
        # is contiguous on both sides; ``top`` is a block's outermost level.
        extent, tensor_step, wire_step = np.ones((3, dims + 2, count), np.int64)
        top = np.zeros(count, np.int64)
        for length, stride, wire_stride in zip(self.size[::-1], self.stride[::-1], self.wire_stride[::-1], strict=True):
            inner = extent[top, columns]
            walks = (stride == inner * tensor_step[top, columns]) & (wire_stride == inner * wire_step[top, columns])
            joins = (length == 1) | walks
            extent[top, columns] *= np.where(joins, length, 1)
            opens = np.nonzero(~joins)[0]
            top[opens] += 1
            outermost = top[opens], opens
            extent[outermost], tensor_step[outermost] = length[opens], stride[opens]
            wire_step[outermost] = wire_stride[opens]
        # The longest level but 0 becomes the rows of the segments, in place 1; each index of the others gets a segment.
        longest = 1 + extent[1:].argmax(0)
        level = np.arange(dims + 2)[:, None]
        # Place 1 takes level ``longest``, and the levels below that one, 1 to ``longest - 1``, move up by one.
        order = np.where(level == 1, longest, np.where((level > 1) & (level <= longest), level - 1, level))
        extent, tensor_step, wire_step = (
            np.take_along_axis(each, order, 0) for each in (extent, tensor_step, wire_step)
        )
        outer = np.where((self.size == 0).any(0), 0, extent[2:].prod(0))
        if most is not None and outer.sum() > most:
            return None
        # One segment for each index of the outer levels: its block, and that index, whose digits are those of the
        # levels.
        block = np.repeat(columns, outer)
        index = np.arange(len(block)) - np.repeat(np.cumsum(outer) - outer, outer)
        offset, in_wire = self.offset[block], np.zeros_like(block)
        for each in range(2, dims + 2):
            index, digit = np.divmod(index, extent[each, block])
            offset = offset + digit * tensor_step[each, block]
            in_wire += digit * wire_step[each, block]
        rows, row = extent[1, block], extent[0, block]
        wire = self.wire[block] + in_wire * itemsize[block]
        row_stride, row_wire_stride = (np.where(rows == 1, 0, each[1, block]) for each in (tensor_step, wire_step))
        row_wire_stride = np.where(row_wire_stride == row, 0, row_wire_stride)  # as ``Segment`` has it
        fields = (self.tensor[block], offset, rows, row, row_stride, wire, row_wire_stride)
        return list(map(Segment, *(field.tolist() for field in fields)))


def check_cover(blocks: Sequence[Block], elements: int, itemsize: int, limit: int = _MOST_ROWS) -> None:
    """Check that blocks have every element of a wire of one dtype, and each once.

    Args:
        limit: number of rows beyond which nothing is checked.

    Raises:
        ArgumentError: they overlap, leave a part, or lie outside.
    """
    starts, lengths, owners, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for index, block in enumerate(blocks):
        unit = 1 if block.tensor == PADDING else itemsize
        if block.wire_byte % unit:
            raise ArgumentError(f"pass: block {index} begins inside of an element, at byte {block.wire_byte}; {_UNITS}")
        run, outer = unit, []  # bytes in one piece, and the dims outside of it
        for length, step in reversed([*zip(block.size, block.wire_stride, strict=True)]):
            if step * unit == run and not outer:
                run *= length
            elif length > 1:
                outer.append((length, step * unit))
        rows += math.prod(length for length, _ in outer)
        if rows > limit:
            return
        places = np.array([block.wire_byte], np.int64)
        for length, step in outer:
            places = (places[:, None] + np.arange(length) * step).reshape(-1)
        starts.append(places)
        lengths.append(np.full_like(places, run))
        owners.append(np.full_like(places, index))
    start, length, owner = map(np.concatenate, (starts, lengths, owners))
    order = np.argsort(start, kind="stable")
    begins, ends, owner = start[order], (start + length)[order], owner[order]
    # Runs in order of their bytes: the first begins at 0, each one where the one before ends, and the last ends at
    # total.
    total, expected = elements * itemsize, np.concatenate([[0], ends])
    wrong = np.nonzero(np.concatenate([begins, [total]]) != expected)[0]
    if not len(wrong):
        return
    first = int(wrong[0])
    if first < len(begins) and begins[first] < expected[first]:
        pair = f"{owner[max(first - 1, 0)]} and {owner[first]}"
        problem = f"blocks {pair} overlap at element {begins[first] // itemsize}"
    elif first == len(begins) and expected[first] > total:
        problem = f"block {owner[-1]} ends at element {ends[-1] // itemsize}"
    else:
        problem = f"no block has element {expected[first] // itemsize}"
    raise ArgumentError(f"pass: {problem} of a wire of {elements}; {_UNITS}")


def table_of(blocks: Sequence[Block], dtypes: Sequence[torch.dtype]) -> Segments | None:
    """Return the table that copies blocks to and from a wire, in order; None if it would have too many segments.

    Args:
        dtypes: of every tensor's elements in the wire.
    """
    segments = _segments(blocks, dtypes)
    return None if segments is None else Segments(segments, dtypes)


def copies_of(blocks: Sequence[Block], dtypes: Sequence[torch.dtype]) -> Copies | None:
    """Return the table that copies blocks into as many other tensors; None as for ``table_of``."""
    segments = _segments(blocks, dtypes)
    return None if segments is None else Copies(segments, dtypes)


def _segments(blocks: Sequence[Block], dtypes: Sequence[torch.dtype]) -> list[Segment] | None:
    """Return the segments of blocks; None if there are more than a table takes."""
    if not blocks:
        return []
    sizes = [1 if block.tensor == PADDING else dtypes[block.tensor].itemsize for block in blocks]
    return Blocks.of(blocks).segments(np.array(sizes, np.int64), MOST_SEGMENTS)
