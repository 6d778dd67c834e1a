"""Tensors that travel between stages."""

import torch
from torch import Tensor

__all__ = ["SHAPES", "made", "strided"]

SHAPES: list[tuple[int, ...]] = [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (2, 1, 2, 1, 3), (0, 4)]


def made(rank: int, shape: tuple[int, ...], dtype: str = "float32", sign: int = 1) -> Tensor:
    seed = torch.Generator().manual_seed(17 * rank + sign)
    return (torch.randint(0, 2, shape, generator=seed) * sign + rank * (dtype not in ("bool",))).to(
        getattr(torch, dtype)
    )


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0] if x.dim() else x
