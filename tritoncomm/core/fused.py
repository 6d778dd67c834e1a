"""Several tensors packed into one wire."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from tritoncomm_kernels import PADDING, Segment, Segments

from tritoncomm.core.address_map import AddressMap
from tritoncomm.core.ops import pack, pack_into, path_for
from tritoncomm.core.plan import Ints
from tritoncomm.core.segments import MOST_SEGMENTS, block_segments, gather
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
    """Pack several tensors into one wire whose rank stride is the sum of their shards: one pass over each.

    One launch on a GPU, and one for every other dtype that is cast.

    Returns:
        The wire ``[world, total]``; for each tensor the offset of its shard in a rank's part and the shape of that
        shard (of the longest one when the dim is uneven); the path; the bytes read plus written.

    Example:
        Gradients ``[5, 8]`` and ``[16]`` split along dims 1 and 0 over 4 ranks give a wire ``[4, 5*2 + 4]``.
    """
    plans = [AddressMap.along(x.shape, dim, world) for x, dim in zip(tensors, dims, strict=True)]
    wire_dtype = dtype or _common_dtype(tensors)
    if len(tensors) == 1:  # which may be the wire already
        x, dim = tensors[0], dims[0] % tensors[0].dim()
        wire, path, copied = pack(x, dim, world, dtype=wire_dtype, scale=scale)
        shard = (*x.shape[:dim], -(-x.shape[dim] // world), *x.shape[dim + 1 :])
        return wire.view(world, -1), [(0, shard)], path, copied
    wire = tensors[0].new_empty((world, sum(p.outer * p.run for p in plans)), dtype=wire_dtype)
    if path_for(tensors[0], "segments") == "triton":
        layouts = tuple([(x.shape, x.stride(), dim % x.dim()) for x, dim in zip(tensors, dims, strict=True)])
        table = _table(layouts, world, wire_dtype)
        if table is not None:
            segments, parts = table
            return wire, list(parts), *gather(tensors, wire, segments, scale=scale)
    shards: list[tuple[int, Ints]] = []
    offset, copied, path = 0, 0, "torch"
    for x, dim, plan in zip(tensors, dims, plans, strict=True):
        dim %= x.dim()
        part = wire[:, offset : offset + plan.outer * plan.run].unflatten(1, (plan.outer, plan.run))
        path, bytes_copied = pack_into(part, x, plan, dim, None, scale)
        shards.append((offset, (*x.shape[:dim], -(-x.shape[dim] // world), *x.shape[dim + 1 :])))
        offset, copied = offset + plan.outer * plan.run, copied + bytes_copied
    return wire, shards, path, copied


@lru_cache(maxsize=1024)
def _table(
    layouts: tuple[tuple[Ints, Ints, int], ...], world: int, dtype: torch.dtype
) -> tuple[Segments, tuple[tuple[int, Ints], ...]] | None:
    """The segments of ``pack_many`` and its shards, for shape, stride and split dim of every tensor.

    None where a dim that does not divide has so many rows before it, each padded, that a launch for every tensor is
    better.
    """
    plans = [AddressMap.along(shape, dim, world) for shape, _, dim in layouts]
    total, offset = sum(plan.outer * plan.run for plan in plans), 0
    rows: list[Segment] = []
    shards = []
    for i, ((shape, stride, dim), plan) in enumerate(zip(layouts, plans, strict=True)):
        for rank in range(world):
            at = (rank * total + offset) * dtype.itemsize
            rows += itertools.islice(_shard(i, shape, stride, dim, plan, rank, dtype.itemsize, at), MOST_SEGMENTS + 1)
            if len(rows) > MOST_SEGMENTS:
                return None
        shards.append((offset, (*shape[:dim], -(-shape[dim] // world), *shape[dim + 1 :])))
        offset += plan.outer * plan.run
    return Segments(rows, [dtype] * len(layouts)), tuple(shards)


def _shard(
    tensor: int, shape: Ints, stride: Ints, dim: int, plan: AddressMap, rank: int, itemsize: int, at: int
) -> Iterator[Segment]:
    """One rank's shard ``[outer, run]`` from byte ``at`` of the wire on, every row of a shorter one padded."""
    step = -(-shape[dim] // plan.world)
    start, size = rank * step, max(0, min(step, shape[dim] - rank * step))
    run, row = plan.run * itemsize, size * math.prod(shape[dim + 1 :]) * itemsize
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
    kinds = {x.dtype for x in tensors}
    if len(kinds) != 1:
        raise ArgumentError(f"pack_many: tensors of different dtypes {sorted(map(str, kinds))} need an explicit dtype")
    return kinds.pop()
