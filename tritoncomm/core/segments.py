"""Segment tables: blocks of several tensors and where each lies in one flat wire; copies that follow a table."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
    "MOST_SEGMENTS", "block_segments", "full_tensors", "gather", "scatter", "strided_segments", "table_of",
]  # fmt: skip

MOST_SEGMENTS = 8192  # more than that many small segments take longer than one launch for every tensor


def gather(
    tensors: Sequence[Tensor], wire: Tensor, segments: Segments, *, scale: float | None = None
) -> tuple[record.CopyPath, int]:
    """Copy the segments of a table from the tensors into the wire; return the path and the bytes copied.

    Args:
        wire: contiguous buffer, at least ``segments.wire_bytes`` long. Bytes outside of segments are kept.
        segments: table, see ``tritoncomm_kernels.Segments``; the kernel's plan is cached by its content.
        scale: factor applied before the one rounding, of floating point tensors only.

    Traffic: reads and writes every segment once, in one launch on a GPU and one more for every further pair of dtypes.
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
    """Copy the segments of a table from the wire into the tensors, or add them: the inverse of ``gather``.

    Args:
        accumulate: add to the tensors instead of overwriting them, which reads their rows too.
        sums: add up segments that have the same rows of a tensor, in the order of the table, with one rounding.
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
    """Return the fewest segments of one n-d block of a tensor, which lies contiguous from byte ``wire`` of the wire on.

    Args:
        start, extent: first index and number of indices of the block, for every dim.

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
    """Yield the segments of one n-d block that is strided in the tensor and in the wire.

    Args:
        size: shape of the block.
        first: elements from the tensor's data pointer to the block.
        wire: byte offset of the block in the wire; ``itemsize`` is an element's size there.

    Example:
        ``[2, 3, 4]`` by ``(12, 4, 1)`` at strides ``(24, 8, 1)`` in the wire is ``Segment(tensor, first, 6, 4, 4, wire,
        8)``.
    """
    if 0 in size:
        return
    # A dim is (number of indices, stride in the tensor, stride in the wire). Neighbours that one stride walks on both
    # sides are merged.
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
    # The longest outer dim becomes the rows of the segments; each index of the others gets a segment.
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
    """Return the table of whole tensors, each contiguous in the wire; None if it would have too many segments.

    Args:
        layouts: shape, strides and dtype of every tensor.
        starts: byte offset of each tensor in the wire.
    """
    wire_dtypes = dtypes or tuple(dtype for _, _, dtype in layouts)
    blocks = (
        block_segments(i, shape, stride, (0,) * len(shape), shape, dtype.itemsize, start)
        for i, ((shape, stride, _), start, dtype) in enumerate(zip(layouts, starts, wire_dtypes, strict=True))
    )
    return table_of(blocks, wire_dtypes)


def table_of(blocks: Iterable[Iterable[Segment]], dtypes: Sequence[torch.dtype]) -> Segments | None:
    """Return the table with the segments of all ``blocks``, in order; None if it would have more than 8192 of them."""
    segments = list(itertools.islice(itertools.chain.from_iterable(blocks), MOST_SEGMENTS + 1))
    return None if len(segments) > MOST_SEGMENTS else Segments(segments, dtypes)
