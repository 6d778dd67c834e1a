"""The values of a tensor in memory of another layout: odd strides, gaps, lazy bits."""

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "laid_out"]

LAYOUTS = ("plain", "odd", "transposed", "gaps", "negative", "odd and negative")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor of the same values; ``odd`` are the strides of dims of size 1, which hold no second element."""
    if layout.startswith("odd") and x.numel():
        x = x.contiguous()
        strides = [7 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
        x = x.as_strided(x.shape, strides)
    if layout.endswith("negative"):
        x = torch._neg_view(-x)  # which keeps strides
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps" and x.dim():
        x = torch.cat([x, x, x], -1).narrow(-1, x.shape[-1], x.shape[-1])
    return x
