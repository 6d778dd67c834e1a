"""One wire of several tensors: every rank's part holds its shards of all of them, one after the other."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from tritoncomm_kernels import PADDING, Segments

from tritoncomm.core.blocks import Block, table_of
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.ops import pack, pack_into, path_for
from tritoncomm.core.plan import Ints, resized
from tritoncomm.core.segments import gather
from tritoncomm.core.split import Split, split_of
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
    splits = [split_of(x.shape, x.stride(), dim, world) for x, dim in zip(tensors, dims, strict=True)]
    sizes = [each.outer * each.run for each in splits]
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
    elif scale is None and all(x.dtype is wire_dtype and each.is_wire for x, each in zip(tensors, splits, strict=True)):
        torch.cat([x.view(world, each.run) for x, each in zip(tensors, splits, strict=True)], 1, out=wire)
        return wire, shards, "torch", 2 * wire.nbytes
    copied, path = 0, "torch"
    for x, each, part in zip(tensors, splits, wire.split(sizes, 1), strict=True):
        path, bytes_copied = pack_into(part.unflatten(1, (each.outer, each.run)), x, each, scale)
        copied += bytes_copied
    return wire, shards, path, copied


@lru_cache(maxsize=1024)
def _table(layouts: tuple[tuple[Ints, Ints, int], ...], world: int, dtype: torch.dtype) -> Segments | None:
    """Return the segment table of ``pack_many``; None if it would have too many segments.

    Args:
        layouts: (shape, strides, split dim) of every tensor.
    """
    splits = [split_of(*layout, world) for layout in layouts]
    starts = [0, *itertools.accumulate(each.outer * each.run for each in splits)]
    blocks = [
        block
        for i, split in enumerate(splits)
        for rank in range(world)
        for block in _shard(i, split, rank, dtype.itemsize, (rank * starts[-1] + starts[i]) * dtype.itemsize)
    ]
    return table_of(blocks, [dtype] * len(layouts))


def _shard(tensor: int, split: Split, rank: int, itemsize: int, at: int) -> Iterator[Block]:
    """Yield one rank's shard of a tensor, ``[outer, run]`` from byte ``at`` of the wire on, and the padding behind it.

    A shard that is shorter than others is padded in each of its rows.
    """
    lead, (whole, *tail) = split.shape[: split.dim], split.shape[split.dim :]
    step = -(-whole // split.world)
    size = max(0, min(step, whole - rank * step))
    offset, wire_stride = rank * step * split.stride[split.dim], contiguous_stride((*lead, step, *tail))
    yield Block(tensor, (*lead, size, *tail), split.stride, offset, at, wire_stride)
    run, row = split.run * itemsize, size * math.prod(tail) * itemsize
    yield Block(PADDING, (split.outer, run - row), (0, 1), 0, at + row, (run, 1))


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of all tensors; reject tensors of several dtypes."""
    kinds = {x.dtype for x in tensors}
    if len(kinds) != 1:
        raise ArgumentError(f"pack_many: tensors of different dtypes {sorted(map(str, kinds))} need an explicit dtype")
    return kinds.pop()
