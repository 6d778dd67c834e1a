"""One wire of several tensors: every rank's part holds its shards of all of them, one after the other."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from tritoncomm_kernels import PADDING, Segment, Segments

from tritoncomm.core.address_map import AddressMap
from tritoncomm.core.ops import pack, pack_into, path_for
from tritoncomm.core.plan import Ints, resized
from tritoncomm.core.segments import block_segments, gather, table_of
from tritoncomm.errors import ArgumentError
from tritoncomm.record import CopyPath

__all__ = ["pack_many"]


def pack_many(
    tensors: Sequence[Tensor],
    dims: Sequence[int],
    world: int,
    *,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> tuple[Tensor, list[tuple[int, Ints]], CopyPath, int]:
    """Pack several tensors into one wire ``[world, total]``, in rank order, by one pass over each tensor.

    Returns the wire; for each tensor (offset of its shard in a rank's part, shape of the longest shard); the path; the
    bytes copied. Gradients ``[5, 8]`` and ``[16]``, dims 1 and 0, over 4 ranks give a wire ``[4, 5*2 + 4]``.
    """
    dims = [dim % x.dim() for x, dim in zip(tensors, dims, strict=True)]
    maps = [AddressMap.along(x.shape, dim, world) for x, dim in zip(tensors, dims, strict=True)]
    sizes = [each.outer * each.run for each in maps]
    offsets = itertools.accumulate(sizes[:-1], initial=0)
    shards = [
        (offset, resized(x.shape, dim, -(-x.shape[dim] // world)))
        for x, dim, offset in zip(tensors, dims, offsets, strict=True)
    ]
    wire_dtype = dtype or _common_dtype(tensors)
    if len(tensors) == 1:  # it may be the wire already
        wire, path, copied = pack(tensors[0], dims[0], world, dtype=wire_dtype, scale=scale)
        return wire.view(world, -1), shards, path, copied
    wire = tensors[0].new_empty((world, sum(sizes)), dtype=wire_dtype)
    if path_for(tensors[0], "segments") == "triton":
        # One launch, and one more for every further dtype that is cast. Without a table each tensor takes a launch of
        # its own.
        layouts = tuple([(x.shape, x.stride(), dim) for x, dim in zip(tensors, dims, strict=True)])
        segments = _table(layouts, world, wire_dtype)
        if segments is not None:
            return wire, shards, *gather(tensors, wire, segments, scale=scale)
    elif scale is None and all(_is_wire(x, each, wire_dtype) for x, each in zip(tensors, maps, strict=True)):
        torch.cat([x.view(world, each.run) for x, each in zip(tensors, maps, strict=True)], 1, out=wire)
        return wire, shards, "torch", 2 * wire.nbytes
    copied, path = 0, "torch"
    for x, dim, each, part in zip(tensors, dims, maps, wire.split(sizes, 1), strict=True):
        path, bytes_copied = pack_into(part.unflatten(1, (each.outer, each.run)), x, each, dim, None, scale)
        copied += bytes_copied
    return wire, shards, path, copied


def _is_wire(x: Tensor, plan: AddressMap, dtype: torch.dtype) -> bool:
    """Whether ``x`` already is its part of a wire of ``dtype``, in rank order."""
    return plan.is_view and x.dtype is dtype and x.is_contiguous()


@lru_cache(maxsize=1024)
def _table(layouts: tuple[tuple[Ints, Ints, int], ...], world: int, dtype: torch.dtype) -> Segments | None:
    """Return the segment table of ``pack_many``; None if it would have too many segments.

    Args:
        layouts: (shape, strides, split dim) of every tensor.
    """
    maps = [AddressMap.along(shape, dim, world) for shape, _, dim in layouts]
    sizes = [each.outer * each.run for each in maps]
    # A dim that does not divide has too many segments where each of many rows before it is padded.
    shards = (
        _shard(i, *layout, each, rank, dtype.itemsize, (rank * sum(sizes) + sum(sizes[:i])) * dtype.itemsize)
        for i, (layout, each) in enumerate(zip(layouts, maps, strict=True))
        for rank in range(world)
    )
    return table_of(shards, [dtype] * len(layouts))


def _shard(
    tensor: int, shape: Ints, stride: Ints, dim: int, plan: AddressMap, rank: int, itemsize: int, at: int
) -> Iterator[Segment]:
    """Yield the segments of one rank's shard of a tensor; rows of a shard that is shorter than others are padded.

    Args:
        tensor: index of the tensor in the table.
        at: byte of the wire at which the shard ``[outer, run]`` starts.
    """
    step = -(-shape[dim] // plan.world)
    start, size = rank * step, max(0, min(step, shape[dim] - rank * step))
    run, row = plan.run * itemsize, size * math.prod(shape[dim + 1 :]) * itemsize
    # ``step`` is the longest shard of the dim, ``size`` this rank's; ``run`` and ``row`` are their bytes per row.
    # A padding segment has no tensor: one row of so many bytes, at that byte of the wire.
    # The rows of the shard lie one after the other: one block, and one padding behind it.
    if size in (0, step) or plan.outer == 1:
        first, extent = [0] * len(shape), list(shape)
        first[dim], extent[dim] = start if size else 0, size
        yield from block_segments(tensor, shape, stride, first, extent, itemsize, at)
        if size < step:
            yield Segment(PADDING, 0, 1, plan.outer * run - row * plan.outer, 0, at + row * plan.outer)
        return
    tail = shape[dim + 1 :]
    for o, index in enumerate(itertools.product(*map(range, shape[:dim]))):
        first, extent = [*index, start, *(0 for _ in tail)], [*(1 for _ in index), size, *tail]
        yield from block_segments(tensor, shape, stride, first, extent, itemsize, at + o * run)
        yield Segment(PADDING, 0, 1, run - row, 0, at + o * run + row)


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of all tensors; reject tensors of several dtypes."""
    kinds = {x.dtype for x in tensors}
    if len(kinds) != 1:
        raise ArgumentError(f"pack_many: tensors of different dtypes {sorted(map(str, kinds))} need an explicit dtype")
    return kinds.pop()
