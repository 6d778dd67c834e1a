"""Many blocks of several tensors and one flat wire, in one call: the path it takes, and tables of blocks."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import Segment, Segments, reference

from tritoncomm import record
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ShapeError

__all__ = [
    "MOST_SEGMENTS", "block_segments", "full_tensors", "gather", "scatter", "strided_segments",
]  # fmt: skip

MOST_SEGMENTS = 8192  # of a table that is made for a layout instead of a launch for every tensor


def gather(
    tensors: Sequence[Tensor], wire: Tensor, segments: Segments, *, scale: float | None = None
) -> tuple[record.CopyPath, int]:
    """Copy the table's segments from the tensors into the wire; see ``tritoncomm_kernels.Segments``.

    Args:
        tensors: those of the table, in its order, any shapes and strides.
        wire: contiguous, of any dtype, at least ``segments.wire_bytes`` long. Bytes of no segment stay as they are.
        segments: the table; plans are cached by it.
        scale: factor applied before the one rounding, of floating point tensors only.

    Returns:
        The path (torch or triton) and the bytes read plus written.

    Raises:
        ValueError: the table does not fit the tensors or the wire.
        TypeError: a cast or scale of a dtype that has no arithmetic here.

    Traffic: reads and writes every segment once; one launch on a GPU, and one for every other pair of dtypes.
    """
    _range = record.profiler_range("gather")
    if path_for(wire, "segments") == "triton":
        return "triton", kernels.gather_segments(tensors, wire, segments, scale=scale)
    return "torch", reference.gather_segments(tensors, wire, segments, scale=scale)


def scatter(
    wire: Tensor,
    tensors: Sequence[Tensor],
    segments: Segments,
    *,
    scale: float | None = None,
    accumulate: bool = False,
    sums: bool = False,
) -> tuple[record.CopyPath, int]:
    """The inverse of ``gather``: copy the table's segments from the wire into the tensors, or add them.

    Arguments, result and traffic as there; adding reads the segments of the tensors, too. With ``sums`` segments of the
    same rows are added up, in the order of the table, with one rounding.
    """
    _range = record.profiler_range("scatter")
    if path_for(wire, "segments") == "triton":
        return "triton", kernels.scatter_segments(
            wire, tensors, segments, scale=scale, accumulate=accumulate, sums=sums
        )
    return "torch", reference.scatter_segments(wire, tensors, segments, scale=scale, accumulate=accumulate, sums=sums)


def block_segments(
    tensor: int,
    shape: Sequence[int],
    stride: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    itemsize: int,
    wire: int,
) -> list[Segment]:
    """The rows of a table for one n-d block of a tensor, contiguous from byte ``wire`` of the wire on.

    As few segments as ``strided_segments`` can make of it.

    Args:
        tensor: index of the tensor in the table.
        shape, stride: of the tensor, in elements.
        start, extent: first index and number of indices of the block, for every dim.
        itemsize: bytes of an element in the wire.
        wire: byte offset of the block in the wire.

    Returns:
        The segments; none for an empty block.

    Raises:
        ShapeError: the block is not inside the tensor.

    Example:
        Rows 2 to 4 and columns 3 to 8 of a contiguous ``[6, 10]`` are ``Segment(tensor, 23, 2, 5, 10, wire)``.
    """
    if len({len(shape), len(stride), len(start), len(extent)}) > 1 or any(
        at < 0 or count < 0 or at + count > size for size, at, count in zip(shape, start, extent, strict=True)
    ):
        raise ShapeError(f"block: {list(extent)} elements from {list(start)} on are not inside a tensor {list(shape)}")
    first = sum(at * step for at, step in zip(start, stride, strict=True))
    dense = [math.prod(extent[i + 1 :]) for i in range(len(extent))]
    return list(strided_segments(tensor, extent, stride, first, itemsize, wire, dense))


def strided_segments(
    tensor: int,
    size: Sequence[int],
    stride: Sequence[int],
    first: int,
    itemsize: int,
    wire: int,
    wire_stride: Sequence[int],
) -> Iterator[Segment]:
    """The rows of a table for one n-d block that is strided in the tensor and in the wire.

    Dims that one stride can walk on both sides are coalesced. The longest of the outer dims becomes the rows of the
    segments, and there is one segment for each index of the others.

    Args:
        tensor: index of the tensor in the table.
        size: of the block.
        stride, wire_stride: of the block in the tensor and in the wire, in elements.
        first: elements from the tensor's data pointer to the block.
        itemsize: bytes of an element in the wire.
        wire: byte offset of the block in the wire.

    Example:
        ``[2, 3, 4]`` by ``(12, 4, 1)`` at strides ``(24, 8, 1)`` in the wire is ``Segment(tensor, first, 6, 4, 4, wire,
        8)``.
    """
    if 0 in size:
        return
    dims: list[tuple[int, int, int]] = []
    for count, step, wire_step in zip(size, stride, wire_stride, strict=True):
        if count == 1:
            continue
        if dims and dims[-1][1:] == (count * step, count * wire_step):
            dims[-1] = dims[-1][0] * count, step, wire_step
        else:
            dims.append((count, step, wire_step))
    row = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    rows, step, gap = 1, 0, 0
    if dims:
        rows, step, gap = dims.pop(max(range(len(dims)), key=lambda i: (dims[i][0], i)))
    for index in itertools.product(*(range(count) for count, _, _ in dims)):
        at = first + sum(i * by for i, (_, by, _) in zip(index, dims, strict=True))
        in_wire = wire + itemsize * sum(i * by for i, (_, _, by) in zip(index, dims, strict=True))
        yield Segment(tensor, at, rows, row, step, in_wire, 0 if gap == row else gap)


@lru_cache(maxsize=1024)
def full_tensors(
    layouts: tuple[tuple[Ints, Ints, torch.dtype], ...], starts: Ints, dtypes: tuple[torch.dtype, ...] | None = None
) -> Segments | None:
    """The table of full tensors, each contiguous in the wire; None where there would be too many segments.

    Args:
        layouts: shape, stride and dtype of every tensor.
        starts: byte offset of each in the wire.
        dtypes: of their elements in the wire; their own by default.
    """
    rows: list[Segment] = []
    carried = dtypes or tuple(dtype for _, _, dtype in layouts)
    for i, ((shape, stride, _), start, dtype) in enumerate(zip(layouts, starts, carried, strict=True)):
        rows += block_segments(i, shape, stride, (0,) * len(shape), shape, dtype.itemsize, start)
        if len(rows) > MOST_SEGMENTS:
            return None
    return Segments(rows, carried)
