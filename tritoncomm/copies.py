"""What almost every call is, prepared: a plain even copy between a tensor and its wire."""

from functools import lru_cache

import torch
from torch import Tensor
from tritoncomm_kernels import copy as kernels_copy
from tritoncomm_kernels.launch import Launch, TooLargeError
from tritoncomm_kernels.numerics import INTERPRETED

from tritoncomm.plan import Ints, rows_layout

__all__ = ["plain_copy"]


def plain_copy(name: str, x: Tensor, wire: Tensor, shape: Ints, stride: Ints, dim: int, world: int) -> int:
    """Launch the kernel of a plain even copy between ``x`` and its contiguous wire; the bytes moved, 0 if none fits.

    The short way for what almost every call is: nothing is looked up but one launch, and no view is made.
    """
    alignment = (x.data_ptr() | wire.data_ptr()) & 15
    launch, moved = _prepared(name, x.get_device(), x.dtype, alignment, shape, stride, dim, world)
    if launch is not None:
        launch(x, wire, 1.0)
    return moved


@lru_cache(maxsize=8192)
def _prepared(
    name: str, device: int, dtype: torch.dtype, alignment: int, shape: Ints, stride: Ints, dim: int, world: int
) -> tuple[Launch | None, int]:
    layout = rows_layout(shape, stride, dim)
    if layout is None or 0 in shape or (device < 0 and not INTERPRETED):
        return None, 0
    try:
        return kernels_copy.plain_copy(name, device, dtype, alignment, *layout, world)
    except TooLargeError:
        return None, 0
