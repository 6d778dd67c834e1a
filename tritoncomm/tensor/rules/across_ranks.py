"""What reductions share: labels of what is left, sums and maxima over the ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.call import Call, Operand

__all__ = ["dims_of", "edge", "largest_over_ranks", "left_of", "sum_over_ranks", "summing"]


def sum_over_ranks(x: Tensor, group: ProcessGroup, shared: bool = False) -> Tensor:
    """Sum of the ranks' tensors; ``shared``: the ranks use it for different pieces, so its gradients are summed too."""
    total = mappings.reduce_from_tensor_model_parallel_region(x, group)
    return mappings.copy_to_tensor_model_parallel_region(total, group) if shared else total


def largest_over_ranks(x: Tensor, group: ProcessGroup, smallest: bool = False) -> Tensor:
    """Element-wise maximum (or minimum) of the ranks' tensors; NaN wins. No gradient."""
    found = eager.all_gather(x.detach().unsqueeze(0), 0, group, None, "amin" if smallest else "amax")
    return found.amin(0) if smallest else found.amax(0)


def edge(dtype: torch.dtype, smallest: bool) -> float | int | bool:
    """What a piece without elements says: nothing is smaller (larger)."""
    if dtype is torch.bool:
        return not smallest
    if dtype.is_floating_point:
        return -math.inf if smallest else math.inf
    return torch.iinfo(dtype).min if smallest else torch.iinfo(dtype).max


def dims_of(dim: Any, count: int) -> tuple[int, ...]:
    """Reduced dims from the front; all when none is given."""
    if dim is None or dim == () or dim == []:
        return tuple(range(count))
    return tuple(d % count for d in ((dim,) if isinstance(dim, int) else dim))


def left_of(count: int, dims: Sequence[int], keepdim: bool) -> tuple[Any, ...]:
    """Labels of what is left."""
    if keepdim:
        return tuple(None if d in dims else d for d in range(count))
    return tuple(d for d in range(count) if d not in dims)


def summing(input: Tensor, dim: Any, keepdim: bool, local: Callable[[Tensor], Tensor]) -> Call:
    """A reduction that is a sum over the ranks where a reduced dim is cut."""
    count = len(shape_of(input))
    left = left_of(count, dims_of(dim, count), keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], lambda _, x: local(x))
