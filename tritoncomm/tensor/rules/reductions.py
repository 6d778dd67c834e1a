"""Sums, means, norms and truth over dims that are cut as well."""

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
from tritoncomm.tensor.rules.across_ranks import dims_of, left_of, summing
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.min_max import Extreme
from tritoncomm.tensor.rules.pointwise import broadcast_operands
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
        return eager.all_reduce(found.to(torch.uint8), cut.group, "any", op).to(found.dtype)

    left = left_of(count, dims, keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], run, own=frozenset(dims))


@rule(torch.all, Tensor.all, named="all", accepts="every cut", result="as sum", collectives="reduced dim: all-reduce")
def _all(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.all, _MIN)


@rule(torch.any, Tensor.any, named="any", accepts="every cut", result="as sum", collectives="reduced dim: all-reduce")
def _any(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.any, _MAX)


def _on_all_ranks(input: Any, other: Any, local: Callable[[Tensor, Tensor], bool], broadcasts: bool) -> Call | None:
    """Whether ``local`` holds of the operands, the same answer on every rank.

    Shapes that differ are no reason to answer at once: a plain tensor may have the wrong shape on one rank only, for
    which the others wait in the all-reduce.
    """
    shard = next((x for x in (input, other) if is_colo(x) and x._parts), None)
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

    def run(cut: Cut, *pieces: Tensor) -> bool:
        mine = comparable and local(*pieces)
        if cut.group is None:
            return mine
        found = torch.tensor([mine], dtype=torch.uint8, device=pieces[0].device)
        return bool(eager.all_reduce(found, cut.group, "equal", _MIN))

    return Call(operands, [tuple(range(-len(shape), 0))], run)


@rule(
    torch.equal, Tensor.equal, accepts="every cut; a plain tensor of the piece's shape is a piece, any other is whole",
    result="a bool, the same on every rank", collectives="cut: all-reduce of one number",
)  # fmt: skip
def _equal(input: Tensor, other: Tensor) -> Call | None:
    return _on_all_ranks(input, other, torch.equal, False)


@rule(torch.allclose, Tensor.allclose, accepts="as equal", result="as equal", collectives="as equal")
def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Call | None:
    return _on_all_ranks(input, other, partial(torch.allclose, rtol=rtol, atol=atol, equal_nan=equal_nan), True)


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
