"""Operators that look at the whole tensor instead of the piece."""

from typing import Any

from torch import Tensor

from tritoncomm.tensor.op_wrapper import colo_op_impl

__all__ = ["length", "size"]


@colo_op_impl(Tensor.size)
def size(self: Any, dim: int | None = None) -> Any:
    """Shape of the whole, or the size of one dim."""
    return self.size_global() if dim is None else self.size_global(dim)


@colo_op_impl(Tensor.__len__)
def length(self: Any) -> int:
    """Size of dim 0 of the whole."""
    return self.size_global(0)
