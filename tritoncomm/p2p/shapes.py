"""What travels between two stages, in shapes and dtypes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["Shape", "Spec", "as_shape", "as_shapes", "describe", "is_single_shape", "spec_of"]

Shape = list[int] | torch.Size
Spec = tuple[tuple[int, ...], torch.dtype]

_SHOWN = 8  # tensors in an error message


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape and not a list of shapes.

    True for any ``torch.Size``, even an empty one, and for a non-empty list or tuple of ints.
    """
    if isinstance(x, torch.Size):
        return True
    if not isinstance(x, (list, tuple)) or not x:
        return False
    for size in x:  # noqa: SIM110
        if not isinstance(size, int):
            return False
    return True


def as_shape(x: Any, name: str) -> tuple[int, ...]:
    """One shape as a tuple; ``()`` is a tensor of no dims.

    Raises:
        ArgumentError: not a sequence of whole numbers.
        ShapeError: a negative size.
    """
    if type(x) is tuple or type(x) is list:
        for size in x:
            if type(size) is not int or size < 0:
                break
        else:
            return tuple(x)
    try:
        shape = tuple(int(size.__index__()) for size in x)
    except (TypeError, AttributeError):
        raise ArgumentError(f"{name}: a shape must be a sequence of ints, not {x!r}") from None
    if any(size < 0 for size in shape):
        raise ShapeError(f"{name}: shape {list(shape)} has a negative size")
    return shape


def as_shapes(x: Any, name: str) -> list[tuple[int, ...]]:
    """A list of shapes."""
    if not isinstance(x, list | tuple):
        raise ArgumentError(f"{name}: expected a shape or a list of shapes, not {x!r}")
    return [as_shape(shape, name) for shape in x]


def spec_of(x: Tensor) -> Spec:
    """Shape and dtype of a tensor."""
    return tuple(x.shape), x.dtype


def describe(specs: Sequence[Spec]) -> str:
    """Words for an error message: ``[2, 3] float32, [4] int64``."""
    shown = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in specs[:_SHOWN]]
    more = [f"and {len(specs) - _SHOWN} more"] if len(specs) > _SHOWN else []
    return ", ".join(shown + more) or "nothing"
