"""Reductions, including sharded dims: sums, means, norms, logical reductions, comparisons, minima and maxima."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.errors import ShapeError
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import Call, Operand, Sharding
from tritoncomm.tensor.rules.pointwise import broadcast_operands
from tritoncomm.tensor.rules.table import rule

__all__ = ["MinMax", "dims_of", "max_over_ranks", "reduction_identity", "result_labels", "sum_call", "sum_over_ranks"]


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


_MAX, _MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN


@rule(
    torch.sum, Tensor.sum, named="sum", result="same sharding; summed dim: partial, all-reduced",
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
    return sum_call(input, dim, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype) if count else x.sum(dtype=dtype))


@rule(torch.mean, Tensor.mean, named="mean", result="as sum", collectives="as sum")
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


@rule(torch.all, Tensor.all, named="all", result="as sum", collectives="reduced dim: all-reduce")
def _all(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _logical(input, dim, keepdim, torch.all, _MIN)


@rule(torch.any, Tensor.any, named="any", result="as sum", collectives="reduced dim: all-reduce")
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


@rule(torch.count_nonzero, Tensor.count_nonzero, named="count_nonzero", result="as sum", collectives="as sum")
def _count(input: Tensor, dim: Any = None) -> Call:
    dims = dims_of(dim, len(shape_of(input)))
    return sum_call(input, dim, False, lambda x: torch.count_nonzero(x, dims) if x.dim() else torch.count_nonzero(x))


@rule(
    torch.norm, Tensor.norm, torch.linalg.vector_norm, named="norm, linalg.vector_norm", result="as sum",
    collectives="reduced dim: all-gather of the local norms",
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


def _compare(input: Tensor, dim: Any, keepdim: bool, smallest: bool) -> Call | None:
    """amax and amin; ties share the gradient equally."""
    count = len(shape_of(input))
    dims = dims_of(dim, count)
    local = torch.amin if smallest else torch.amax

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        if not any(sharding.has(d) for d in dims):
            return local(x, dims, keepdim)
        assert sharding.group is not None
        return MinMax.apply(x, dims, keepdim, smallest, sharding.group)

    if not count or not all(shape_of(input)[d] for d in dims):
        return None
    left = result_labels(count, dims, keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], run, own=frozenset(dims))


class MinMax(torch.autograd.Function):
    """Forward: the maximum (minimum) over all ranks. Backward: shared equally by ties."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], keepdim: bool, smallest: bool, group: ProcessGroup
    ) -> Tensor:
        if x.numel():
            local = (torch.amin if smallest else torch.amax)(x, dims, True)
        else:
            local = x.new_full(
                [1 if d in dims else s for d, s in enumerate(x.shape)], reduction_identity(x.dtype, not smallest)
            )
        extremum = max_over_ranks(local, group, smallest)
        ctx.save_for_backward(x, extremum)
        ctx.dims, ctx.group = dims, group
        return extremum if keepdim else extremum.squeeze(dims)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, extremum = ctx.saved_tensors
        is_extremum = (x == extremum) | (x.isnan() & extremum.isnan())
        count = eager.all_reduce(is_extremum.sum(ctx.dims, keepdim=True), ctx.group, "max.backward")
        return is_extremum * (grad.view(extremum.shape) / count), None, None, None, None


class _MinMaxWithIndex(torch.autograd.Function):
    """Forward: the maximum (minimum) along a sharded dim and its global index. Backward: to that element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, local: Any, identity: Any, start: int, group: ProcessGroup) -> Any:
        if x.shape[dim]:
            value, index = local(x, dim)
        else:
            shape = [s for d, s in enumerate(x.shape) if d != dim]
            value, index = x.new_full(shape, identity), torch.zeros(shape, dtype=torch.int64, device=x.device)
        values = eager.all_gather(value.unsqueeze(0), 0, group, None, "max")
        indices = eager.all_gather((index + start).unsqueeze(0), 0, group, None, "max")
        best, rank = local(values, 0)
        global_index = indices.gather(0, rank.unsqueeze(0)).squeeze(0)
        ctx.save_for_backward(global_index)
        ctx.dim, ctx.start, ctx.shape = dim, start, x.shape
        ctx.mark_non_differentiable(global_index)
        return best, global_index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (global_index,) = ctx.saved_tensors
        is_local = (global_index >= ctx.start) & (global_index < ctx.start + ctx.shape[ctx.dim])
        out = grad.new_zeros(ctx.shape)
        if out.numel():
            index = (global_index - ctx.start).masked_fill(~is_local, 0).unsqueeze(ctx.dim)
            out.scatter_add_(ctx.dim, index, (grad * is_local).unsqueeze(ctx.dim))
        return out, None, None, None, None, None


def _min_max(input: Tensor, dim: Any, keepdim: bool, smallest: bool, which: str) -> Call | None:
    """max and min along one dim; ``which``: both, or the index only."""
    shape = shape_of(input)
    if not isinstance(dim, int) or isinstance(dim, bool) or not shape or 0 in shape:
        return None
    dim %= len(shape)
    local = torch.min if smallest else torch.max

    def run(sharding: Sharding, x: Tensor) -> Any:
        if sharding.has(dim):
            assert sharding.group is not None
            start, _ = sharding.shard(dim)
            value, index = _MinMaxWithIndex.apply(
                x, dim, local, reduction_identity(x.dtype, not smallest), start, sharding.group
            )
            value, index = (value.unsqueeze(dim), index.unsqueeze(dim)) if keepdim else (value, index)
        else:
            value, index = local(x, dim, keepdim)
        if which == "index":
            return index
        kind = torch.return_types.min if smallest else torch.return_types.max
        return kind((value, index))

    left = result_labels(len(shape), (dim,), keepdim)
    operands = [Operand(input, tuple(range(len(shape))))]
    return Call(operands, [left] * (1 if which == "index" else 2), run, own=frozenset({dim}))


def _add_rules(smallest: bool) -> None:
    """Add the rules of amax, max and argmax, or of amin, min and argmin."""
    m = "min" if smallest else "max"
    ties = "reduced dim: all-gather of the local maxima; backward: all-reduce of the number of ties"
    indices = "reduced dim: all-gather of the local maxima and indices"

    def both(name: str) -> tuple[Any, Any]:
        return getattr(torch, name), getattr(Tensor, name)

    @rule(*both(f"a{m}"), named=f"a{m}", result="as sum", collectives="as amax" if smallest else ties)
    def describe_values(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Any = None) -> Call | None:
        return None if out is not None else _compare(input, dim, keepdim, smallest)

    @rule(*both(m), named=m, result="as sum", collectives="as max" if smallest else indices)
    def describe(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
        if out is not None:
            return None
        return (
            _compare(input, None, False, smallest) if dim is None else _min_max(input, dim, keepdim, smallest, "both")
        )

    accepts = "any sharding; without dim: 1-D only"  # with several dims, ties would need the global order

    @rule(*both(f"arg{m}"), named=f"arg{m}", accepts=accepts, result="as sum", collectives="as max")
    def describe_index(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
        if dim is None:
            return _min_max(input, 0, False, smallest, "index") if len(shape_of(input)) == 1 else None
        return _min_max(input, dim, keepdim, smallest, "index")


_add_rules(False)
_add_rules(True)
