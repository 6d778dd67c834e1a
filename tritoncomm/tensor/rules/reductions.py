"""Sums, means, norms and logical reductions, including sharded dims."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.errors import ShapeError
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.across_ranks import dims_of, result_labels, sum_call
from tritoncomm.tensor.rules.call import Call, Operand, Sharding
from tritoncomm.tensor.rules.min_max import MinMax
from tritoncomm.tensor.rules.pointwise import broadcast_operands
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


_MAX, _MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN


@rule(
    torch.sum, Tensor.sum, named="sum", accepts="any sharding",
    result="same sharding; summed dim: partial, all-reduced", collectives="summed dim: all-reduce",
)  # fmt: skip
def _sum(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Any = None,
    out: Any = None,
) -> Call | None:  # fmt: skip
    dim = axis if dim is None else dim
    if out is not None:
        return None
    count = len(shape_of(input))
    dims = dims_of(dim, count)
    return sum_call(input, dim, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype) if count else x.sum(dtype=dtype))


@rule(torch.mean, Tensor.mean, named="mean", accepts="any sharding", result="as sum", collectives="as sum")
def _mean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Any = None,
    out: Any = None,
) -> Call | None:  # fmt: skip
    dim = axis if dim is None else dim
    shape = shape_of(input)
    if out is not None or not shape or not (dtype or input.dtype).is_floating_point:
        return None
    dims = dims_of(dim, len(shape))
    size = math.prod(shape[d] for d in dims)
    return sum_call(input, dim, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype) / size)


def _logical(input: Tensor, dim: Any, keepdim: bool, local: Any, op: Any) -> Call | None:
    count = len(shape_of(input))
    dims = dims_of(dim, count)

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        result = local(x, dims, keepdim) if count else local(x)
        if not any(sharding.has(d) for d in dims):
            return result
        assert sharding.group is not None
        return eager.all_reduce(result.to(torch.uint8), sharding.group, "any", op).to(result.dtype)

    left = result_labels(count, dims, keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], run, own=frozenset(dims))


@rule(
    torch.all, Tensor.all, named="all", accepts="any sharding", result="as sum", collectives="reduced dim: all-reduce"
)
def _all(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.all, _MIN)


@rule(
    torch.any, Tensor.any, named="any", accepts="any sharding", result="as sum", collectives="reduced dim: all-reduce"
)
def _any(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.any, _MAX)


def _on_all_ranks(input: Any, other: Any, local: Callable[[Tensor, Tensor], bool], broadcasts: bool) -> Call | None:
    """Whether ``local`` holds for the operands, with the same answer on every rank.

    Different shapes do not return early: a plain tensor may have the wrong shape on one rank only, and the others would
    wait in the all-reduce.
    """
    shard = next((x for x in (input, other) if is_colo(x) and x.partitions), None)
    if shard is None or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    try:
        operands, shape = broadcast_operands([input.detach(), other.detach()])
        comparable = broadcasts or all(each.labels == tuple(range(-len(shape), 0)) for each in operands)
    except ShapeError:
        if broadcasts:
            raise
        shape, comparable = shape_of(shard), False
        operands = [Operand(shard.detach(), tuple(range(-len(shape), 0)))]

    def run(sharding: Sharding, *shards: Tensor) -> bool:
        holds = comparable and local(*shards)
        if sharding.group is None:
            return holds
        result = torch.tensor([holds], dtype=torch.uint8, device=shards[0].device)
        return bool(eager.all_reduce(result, sharding.group, "equal", _MIN))

    return Call(operands, [tuple(range(-len(shape), 0))], run)


@rule(
    torch.equal, Tensor.equal,
    accepts="any sharding; a plain tensor of the local shape is a shard, any other is replicated",
    result="a bool, the same on every rank", collectives="all-reduce of one number",
)  # fmt: skip
def _equal(input: Tensor, other: Tensor) -> Call | None:
    return _on_all_ranks(input, other, torch.equal, False)


@rule(torch.allclose, Tensor.allclose, accepts="as equal", result="as equal", collectives="as equal")
def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Call | None:
    return _on_all_ranks(input, other, partial(torch.allclose, rtol=rtol, atol=atol, equal_nan=equal_nan), True)


@rule(
    torch.count_nonzero, Tensor.count_nonzero, named="count_nonzero", accepts="any sharding", result="as sum",
    collectives="as sum",
)  # fmt: skip
def _count(input: Tensor, dim: Any = None) -> Call:
    dims = dims_of(dim, len(shape_of(input)))
    return sum_call(input, dim, False, lambda x: torch.count_nonzero(x, dims) if x.dim() else torch.count_nonzero(x))


@rule(
    torch.norm, Tensor.norm, torch.linalg.vector_norm, named="norm, linalg.vector_norm",
    accepts="any sharding", result="as sum", collectives="reduced dim: all-gather of the local norms",
)  # fmt: skip
def _norm(
    input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None,
    dtype: torch.dtype | None = None, ord: Any = None,
) -> Call | None:  # fmt: skip
    power = p if ord is None else ord
    power = 2 if power in (None, "fro") else power
    shape = shape_of(input)
    if out is not None or isinstance(power, str) or not shape or not input.is_floating_point() or power == 0:
        return None
    power, dims = float(power), dims_of(dim, len(shape))

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        if not any(sharding.has(d) for d in dims):
            return torch.linalg.vector_norm(x, power, dims, keepdim, dtype=dtype)
        assert sharding.group is not None
        x = x if dtype is None else x.to(dtype)
        if math.isinf(power):
            return MinMax.apply(x.abs(), dims, keepdim, power < 0, sharding.group)
        wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
        part = torch.linalg.vector_norm(wide, power, dims, keepdim)
        # The norm of the vector of local norms is the global norm; gradients flow through the own element.
        result = mappings.all_gather_dim(part.unsqueeze(0), 0, sharding.group, tensor_parallel_output_grad=False)
        return torch.linalg.vector_norm(result, power, 0).to(x.dtype)

    left = result_labels(len(shape), dims, keepdim)
    return Call([Operand(input, tuple(range(len(shape))))], [left], run, own=frozenset(dims))
