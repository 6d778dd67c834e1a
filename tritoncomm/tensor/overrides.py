"""Operators with global semantics."""

from typing import Any

from torch import Tensor

from tritoncomm.tensor.op_wrapper import colo_op_impl

__all__ = ["length", "size"]


@colo_op_impl(Tensor.size)
def size(self: Any, dim: int | None = None) -> Any:
    """Global shape, or the global size of one dim."""
    return self.size_global() if dim is None else self.size_global(dim)


@colo_op_impl(Tensor.__len__)
def length(self: Any) -> int:
    """Global size of dim 0."""
    return self.size_global(0)
