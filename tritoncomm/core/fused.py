"""Several tensors packed into one wire."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncomm.core.address_map import AddressMap
from tritoncomm.core.ops import pack, pack_into
from tritoncomm.core.plan import Ints
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
    shards: list[tuple[int, Ints]] = []
    offset, copied, path = 0, 0, "torch"
    for x, dim, plan in zip(tensors, dims, plans, strict=True):
        dim %= x.dim()
        part = wire[:, offset : offset + plan.outer * plan.run].unflatten(1, (plan.outer, plan.run))
        path, bytes_copied = pack_into(part, x, plan, dim, None, scale)
        shards.append((offset, (*x.shape[:dim], -(-x.shape[dim] // world), *x.shape[dim + 1 :])))
        offset, copied = offset + plan.outer * plan.run, copied + bytes_copied
    return wire, shards, path, copied


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    kinds = {x.dtype for x in tensors}
    if len(kinds) != 1:
        raise ArgumentError(f"pack_many: tensors of different dtypes {sorted(map(str, kinds))} need an explicit dtype")
    return kinds.pop()
