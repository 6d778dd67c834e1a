"""Copies that leave nothing to choose: the plain even one, prepared, which almost every call is, and strided ones.

The strided ones are torch's, for layouts that no kernel reads.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import TooLargeError

from tritoncomm.core.address_map import AddressMap, rows_layout
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from tritoncomm_kernels.launch import Launch

__all__ = ["pack_blocks", "plain_copy", "unpack_blocks"]


def plain_copy(name: str, x: Tensor, wire: Tensor, shape: Ints, stride: Ints, dim: int, world: int) -> int:
    """Launch the kernel of a plain even copy between ``x`` and its contiguous wire; the bytes copied, 0 if none fits.

    The short way for what almost every call is: nothing is looked up but one launch, and no view is made.
    """
    alignment = (x.data_ptr() | wire.data_ptr()) & 15
    launch, copied = _prepared(name, x.get_device(), x.dtype, alignment, shape, stride, dim, world)
    if launch is not None:
        launch(x, wire, 1.0)
    return copied


@lru_cache(maxsize=8192)
def _prepared(
    name: str, device: int, dtype: torch.dtype, alignment: int, shape: Ints, stride: Ints, dim: int, world: int
) -> "tuple[Launch | None, int]":
    layout = rows_layout(shape, stride, dim)
    if layout is None or 0 in shape:
        return None, 0
    try:
        return kernels.plain_copy(name, device, dtype, alignment, *layout, world)
    except TooLargeError:
        return None, 0


def pack_blocks(wire: Tensor, x: Tensor, plan: AddressMap, dim: int, sizes: Ints | None, scale: float | None) -> int:
    """A layout no kernel reads: one strided torch copy per rank, together one pass (a scale costs another)."""
    if scale is not None and not (x.dtype.is_floating_point and wire.dtype.is_floating_point):
        raise ArgumentError(f"pack: a scale needs floating point tensors, not {x.dtype} and {wire.dtype}")
    for block, shard in _blocks(wire, x, plan, dim, sizes):
        if scale is None:
            block.copy_(shard)
        else:
            wide = torch.promote_types(torch.promote_types(x.dtype, wire.dtype), torch.float32)
            value = shard.to(wide) * scale  # not in place: shard may be of that type already, and is the caller's
            block.copy_(value.float() if wide is torch.float64 and wire.itemsize == 2 else value)
    return x.nbytes + wire.nbytes


def unpack_blocks(
    wire: Tensor, out: Tensor, plan: AddressMap, dim: int, sizes: Ints | None, scale: float | None, accumulate: bool
) -> int:
    """The inverse of ``pack_blocks``, without arithmetic."""
    if scale is not None or accumulate:
        raise UnsupportedError("unpack: scale and accumulate need a result whose split dims one stride can walk")
    for block, shard in _blocks(wire, out, plan, dim, sizes):
        shard.copy_(block)
    return out.nbytes + out.numel() * wire.element_size()


def _blocks(wire: Tensor, x: Tensor, plan: AddressMap, dim: int, sizes: Ints | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a rank's part of the wire and the same shard of ``x``; padding on the wire is zeroed."""
    dim %= x.dim()
    lead, tail = x.shape[:dim], x.shape[dim + 1 :]
    step, start = -(-x.shape[dim] // plan.world), 0
    for w in range(plan.world):
        size = sizes[w] if sizes is not None else max(0, min(step, x.shape[dim] - start))
        shard = x.narrow(dim, start, size)
        if sizes is not None:
            inner = plan.row // max(x.shape[dim], 1)
            at = plan.outer * start * inner
            yield wire[at : at + shard.numel()].view(shard.shape), shard
        else:
            block = wire[w].view(*lead, step, *tail)
            if size < step:
                block.narrow(dim, size, step - size).zero_()
            yield block.narrow(dim, 0, size), shard
        start += size
