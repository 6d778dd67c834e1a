"""Sums over a 16-bit wire by hand: the wire's values in fp32, in rank order, rounded once."""

import torch
from torch import Tensor

__all__ = ["FLOATS", "by_hand", "shard", "values"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """Values of a rank, which every rank can make."""
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=made, dtype=torch.float64) * 10 ** torch.randint(-3, 3, shape, generator=made)
    x = x.to(dtype)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        wide = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "columns":
        wide = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)
        wide[..., 3:] = x
        return wide[..., 3:]
    return x


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round once; fp64 reaches 16 bits through fp32."""
    return (x.float() if x.dtype is torch.float64 and dtype.itemsize == 2 else x).to(dtype)


def by_hand(
    parts: list[Tensor], wire: torch.dtype, result: torch.dtype, scale: float | None = None, to: Tensor | None = None,
    node: int | None = None, between: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The sum of all ranks, part by part: of each node first, where nodes have ``node`` ranks."""
    parts = [narrowed(x, wire) for x in parts]
    if node is not None:
        parts = [narrowed(in_order(parts[i : i + node], between), between) for i in range(0, len(parts), node)]
    total = in_order(parts, result)
    if scale is not None:
        total = total * torch.tensor(scale, dtype=total.dtype)
    if to is not None:
        total = to.to(total.dtype) + total
    return narrowed(total, result)


def in_order(parts: list[Tensor], result: torch.dtype) -> Tensor:
    wide = torch.float64 if torch.float64 in (parts[0].dtype, result) else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def shard(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])
