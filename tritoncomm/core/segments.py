"""Copies that follow a table of segments: between several tensors and one flat wire."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import Segments, torch_path

from tritoncomm import record
from tritoncomm.core.blocks import Block, table_of
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints

__all__ = ["full_tensors", "gather", "scatter"]


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
    return "torch", torch_path.gather_segments(tensors, wire, segments, scale=scale)


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
    return "torch", torch_path.scatter_segments(wire, tensors, segments, scale=scale, accumulate=accumulate, sums=sums)


@lru_cache(maxsize=1024)
def full_tensors(layouts: tuple[tuple[Ints, Ints, torch.dtype], ...], starts: Ints) -> Segments | None:
    """Return the table of whole tensors, each contiguous in the wire; None if it would have too many segments.

    Args:
        layouts: shape, strides and dtype of every tensor.
        starts: byte offset of each tensor in the wire.
    """
    blocks = [
        Block.of_box(i, shape, stride, (0,) * len(shape), shape, start)
        for i, ((shape, stride, _), start) in enumerate(zip(layouts, starts, strict=True))
    ]
    return table_of(blocks, [dtype for _, _, dtype in layouts])
