"""Planner of one wire for several tensors: every rank's part holds its shards of all of them, one after the other."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from tritoncomm_kernels import PADDING

from tritoncomm.core.blocks import Block
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints, resized

__all__ = ["FusedPlan", "FusedShard", "plan_fused"]


class FusedShard(NamedTuple):
    """One tensor's shard in a rank's part of the wire: elements ``start`` to ``stop``, as ``shape``.

    Attributes:
        dim: dim that is split.
        size: of the dim on this rank, if it is smaller than in ``shape``, where padding follows; else None.
    """

    start: int
    stop: int
    shape: Ints
    dim: int
    size: int | None


class FusedPlan(NamedTuple):
    """Plan of a wire ``[world, total]``: the pass that packs it, and this rank's shards in its part."""

    pack: Pass
    shards: tuple[FusedShard, ...]


@lru_cache(maxsize=1024)
def plan_fused(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], dims: Ints, world: int, rank: int, dtype: torch.dtype
) -> FusedPlan:
    """Plan the wire of tensors, split along ``dims`` as ``torch.chunk`` splits, in this dtype.

    Example:
        Gradients ``[5, 8]`` and ``[16]``, dims 1 and 0, over 4 ranks have a wire ``[4, 5*2 + 4]``.
    """
    shards, start = [], 0
    for shape, dim in zip(shapes, dims, strict=True):
        chunk_size = -(-shape[dim] // world)
        padded_shape = resized(shape, dim, chunk_size)  # of every rank's shard, so that all parts of the wire are equal
        own_size = max(0, min(chunk_size, shape[dim] - rank * chunk_size))
        stop = start + math.prod(padded_shape)
        size = None if own_size == chunk_size else own_size  # None: without padding
        shards.append(FusedShard(start, stop, shape=padded_shape, dim=dim, size=size))
        start = stop
    total = start  # elements of a rank's part of the wire
    blocks = [
        block
        for i, (shape, stride, shard) in enumerate(zip(shapes, strides, shards, strict=True))
        for block in _blocks(i, shape, stride, shard, world, total, dtype.itemsize)
    ]
    return FusedPlan(Pass(blocks, [dtype] * len(shapes), elements=total * world), tuple(shards))


def _blocks(
    tensor: int, shape: Ints, stride: Ints, shard: FusedShard, world: int, total: int, itemsize: int
) -> Iterator[Block]:
    """Yield the full shards of a tensor as one block, then a shorter one, and the padding behind it.

    Args:
        total: elements of a rank's part of the wire.
    """
    # Along the dim a full shard has ``step`` indices. The first ``num_full`` ranks have full shards, the next one has
    # the ``remainder``, and the ranks behind it have only padding.
    dim, step = shard.dim, shard.shape[shard.dim]
    num_full, remainder = divmod(shape[dim], step) if step else (0, 0)
    shard_stride, shard_bytes = contiguous_stride(shard.shape), (shard.stop - shard.start) * itemsize
    yield _joined(
        Block(
            tensor,
            size=(num_full, *shard.shape),
            stride=(step * stride[dim], *stride),
            offset=0,
            wire_byte=shard.start * itemsize,
            wire_stride=(total, *shard_stride),
        )
    )
    if remainder:
        at = (num_full * total + shard.start) * itemsize
        yield Block(tensor, resized(shape, dim, remainder), stride, num_full * step * stride[dim], at, shard_stride)
        # In the wire a row of this shard is as long as a row of a full one, so that each row ends with padding.
        index_bytes = math.prod(shape[dim + 1 :]) * itemsize
        row_bytes, kept_bytes = step * index_bytes, remainder * index_bytes
        num_rows = shard_bytes // row_bytes if row_bytes else 0
        yield _padding((num_rows, row_bytes - kept_bytes), at + kept_bytes, row_bytes)
    num_empty = world - num_full - bool(remainder)
    at = ((world - num_empty) * total + shard.start) * itemsize
    yield _padding((num_empty, shard_bytes), at, total * itemsize)


def _padding(size: Ints, wire: int, wire_step: int) -> Block:
    """Return rows of zeros in the wire, ``wire_step`` bytes from one to the next; sizes of padding are bytes."""
    return Block(PADDING, size, (0, 1), 0, wire, (wire_step, 1))


def _joined(block: Block) -> Block:
    """Merge the dims of a block behind its first one, where one stride walks two of them on both sides."""
    size, stride, wire_stride = [1], [1], [1]  # a dim of 1 that the first longer one replaces
    for length, step, wire_step in zip(block.size[:0:-1], block.stride[:0:-1], block.wire_stride[:0:-1], strict=True):
        if length == 1:
            continue
        if size[0] == 1:
            size[0], stride[0], wire_stride[0] = length, step, wire_step
        elif step == size[0] * stride[0] and wire_step == size[0] * wire_stride[0]:
            size[0] *= length
        else:
            size.insert(0, length)
            stride.insert(0, step)
            wire_stride.insert(0, wire_step)
    return block._replace(
        size=(block.size[0], *size), stride=(block.stride[0], *stride), wire_stride=(block.wire_stride[0], *wire_stride)
    )
