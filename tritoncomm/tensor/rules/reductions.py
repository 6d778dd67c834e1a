"""Sums, means, norms and truth over dims that are cut as well."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm import engine, mappings
from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.extremes import Extreme
from tritoncomm.tensor.rules.over_ranks import dims_of, left_of, summing
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


_MAX, _MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN


@rule(
    torch.sum, Tensor.sum, named="sum", accepts="every cut", result="the cut; a replica where a summed dim is cut",
    collectives="summed dim: all-reduce",
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
    return summing(input, dim, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype) if count else x.sum(dtype=dtype))


@rule(torch.mean, Tensor.mean, named="mean", accepts="every cut", result="as sum", collectives="as sum")
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
    return summing(input, dim, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype) / size)


def _logical(input: Tensor, dim: Any, keepdim: bool, local: Any, op: Any) -> Call | None:
    count = len(shape_of(input))
    dims = dims_of(dim, count)

    def run(cut: Cut, x: Tensor) -> Tensor:
        found = local(x, dims, keepdim) if count else local(x)
        if not any(cut.has(d) for d in dims):
            return found
        assert cut.group is not None
        return engine.all_reduce(found.to(torch.uint8), cut.group, "any", op).to(found.dtype)

    left = left_of(count, dims, keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], run, own=frozenset(dims))


@rule(torch.all, Tensor.all, named="all", accepts="every cut", result="as sum", collectives="reduced dim: all-reduce")
def _all(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.all, _MIN)


@rule(torch.any, Tensor.any, named="any", accepts="every cut", result="as sum", collectives="reduced dim: all-reduce")
def _any(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.any, _MAX)


@rule(
    torch.count_nonzero, Tensor.count_nonzero, named="count_nonzero", accepts="every cut", result="as sum",
    collectives="as sum",
)  # fmt: skip
def _count(input: Tensor, dim: Any = None) -> Call:
    dims = dims_of(dim, len(shape_of(input)))
    return summing(input, dim, False, lambda x: torch.count_nonzero(x, dims) if x.dim() else torch.count_nonzero(x))


@rule(
    torch.norm, Tensor.norm, torch.linalg.vector_norm, named="norm, linalg.vector_norm",
    accepts="every cut", result="as sum", collectives="reduced dim: all-gather of the pieces' norms",
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

    def run(cut: Cut, x: Tensor) -> Tensor:
        if not any(cut.has(d) for d in dims):
            return torch.linalg.vector_norm(x, power, dims, keepdim, dtype=dtype)
        assert cut.group is not None
        x = x if dtype is None else x.to(dtype)
        if math.isinf(power):
            return Extreme.apply(x.abs(), dims, keepdim, power < 0, cut.group)
        wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
        part = torch.linalg.vector_norm(wide, power, dims, keepdim)
        # Each rank's norm, scaled: a vector of W numbers whose norm is the whole one. Gradients go through the own.
        found = mappings.all_gather_dim(part.unsqueeze(0), 0, cut.group, tensor_parallel_output_grad=False)
        return torch.linalg.vector_norm(found, power, 0).to(x.dtype)

    left = left_of(len(shape), dims, keepdim)
    return Call([Operand(input, tuple(range(len(shape))))], [left], run, own=frozenset(dims))
