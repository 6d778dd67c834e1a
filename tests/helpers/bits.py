"""Tensors as bits."""

import torch
from torch import Tensor

__all__ = ["bits", "random_bits"]


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Any bits: NaN with payload, -0, Inf, denormals."""
    made = torch.Generator(device).manual_seed(seed)
    count = int(torch.Size(shape).numel())
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=made, device=device).bool().view(shape)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=made, device=device)
    return data.view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # stride 1 even where the last size is 1
    return x.view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)
