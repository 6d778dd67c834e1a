"""Helpers of reductions: result labels, sums and maxima over the ranks."""

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

__all__ = ["dims_of", "max_over_ranks", "reduction_identity", "result_labels", "sum_call", "sum_over_ranks"]


def sum_over_ranks(x: Tensor, group: ProcessGroup, shared: bool = False) -> Tensor:
    """All-reduce; ``shared``: the ranks use the sum for different shards, so its gradients are all-reduced as well."""
    total = mappings.reduce_from_tensor_model_parallel_region(x, group)
    return mappings.copy_to_tensor_model_parallel_region(total, group) if shared else total


def max_over_ranks(x: Tensor, group: ProcessGroup, smallest: bool = False) -> Tensor:
    """Element-wise maximum (or minimum) of the ranks' tensors; NaN wins. No gradient."""
    values = eager.all_gather(x.detach().unsqueeze(0), 0, group, None, "amin" if smallest else "amax")
    return values.amin(0) if smallest else values.amax(0)


def reduction_identity(dtype: torch.dtype, smallest: bool) -> float | int | bool:
    """The result for an empty shard: the smallest (largest) value of the dtype."""
    if dtype is torch.bool:
        return not smallest
    if dtype.is_floating_point:
        return -math.inf if smallest else math.inf
    return torch.iinfo(dtype).min if smallest else torch.iinfo(dtype).max


def dims_of(dim: Any, count: int) -> tuple[int, ...]:
    """Reduced dims counted from the front; all by default."""
    if dim is None or dim == () or dim == []:
        return tuple(range(count))
    return tuple(d % count for d in ((dim,) if isinstance(dim, int) else dim))


def result_labels(count: int, dims: Sequence[int], keepdim: bool) -> tuple[Any, ...]:
    """Labels of the result of a reduction."""
    if keepdim:
        return tuple(None if d in dims else d for d in range(count))
    return tuple(d for d in range(count) if d not in dims)


def sum_call(input: Tensor, dim: Any, keepdim: bool, local: Callable[[Tensor], Tensor]) -> Call:
    """A reduction that is all-reduced if a reduced dim is sharded."""
    count = len(shape_of(input))
    left = result_labels(count, dims_of(dim, count), keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], lambda _, x: local(x))
