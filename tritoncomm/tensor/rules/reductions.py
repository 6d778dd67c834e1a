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
from tritoncomm.core.autograd import direct, once_differentiable
from tritoncomm.core.call import compare_arguments
from tritoncomm.errors import ShapeError
from tritoncomm.mappings.tensor_parallel import reduce_from
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding, dtype_of_result, from_front
from tritoncomm.tensor.rules.pointwise import broadcast_operands
from tritoncomm.tensor.rules.table import rule

__all__ = ["extremum_over_ranks", "sum_over_ranks"]

_UNORDERED = (torch.uint16, torch.uint32, torch.uint64)


def sum_over_ranks(x: Tensor, group: ProcessGroup, shared: bool = False) -> Tensor:
    """All-reduce ``x``, a temporary, in place; ``shared``: its gradient too, for ranks that use it for other shards."""
    total = reduce_from(x, group, in_place=True)
    return mappings.copy_to_tensor_model_parallel_region(total, group) if shared else total


def extremum_over_ranks(x: Tensor, dims: tuple[int, ...], group: ProcessGroup, smallest: bool = False) -> Tensor:
    """Maximum (or minimum) over dims of a tensor that is sharded along them, which are kept; NaN wins. No gradient."""
    local, x = torch.amin if smallest else torch.amax, x.detach()
    if x.numel():
        extremum = local(x, dims, keepdim=True)
    else:
        extremum = x.new_full([1 if d in dims else s for d, s in enumerate(x.shape)], _identity(x.dtype, smallest))
    values = eager.all_gather(extremum.unsqueeze(0), 0, group, "amin" if smallest else "amax")
    return local(values, 0)


def _identity(dtype: torch.dtype, smallest: bool) -> float | int | bool:
    """Return the maximum (or minimum) of no elements: the least (greatest) value of the dtype."""
    if dtype is torch.bool:
        return smallest
    if dtype.is_floating_point:
        return math.inf if smallest else -math.inf
    return torch.iinfo(dtype).max if smallest else torch.iinfo(dtype).min


def _has_order(dtype: torch.dtype) -> bool:
    """Whether torch compares elements of the dtype, on every device."""
    # Tensors of other dtypes are gathered, and compared or rejected by torch on all ranks. Torch looks at the dtype
    # only if there are several elements, so a rank with an empty shard would wait for ranks that raise.
    return dtype not in _UNORDERED and not dtype.is_complex and (dtype.itemsize > 1 or not dtype.is_floating_point)


def _dims_of(dim: Any, input: Tensor) -> tuple[int, ...]:
    """Return the reduced dims counted from the front; all by default."""
    count = len(shape_of(input))
    if dim is None or dim == () or dim == []:
        return tuple(range(count))
    return tuple(from_front(d, count) for d in ((dim,) if isinstance(dim, int) else dim))


def _reduce(
    input: Tensor, dims: Sequence[int], keepdim: bool, local: Callable[[Tensor], Any],
    across: Callable[[Sharding, Tensor], Any] | None = None, results: int = 1,
) -> OperatorCall:  # fmt: skip
    """Describe a reduction by ``local``.

    Of a reduced dim that is sharded ``across`` runs instead; without one ``local`` and an all-reduce.
    """
    labels = tuple(range(len(shape_of(input))))
    # A kept dim has size 1 and no label.
    left = tuple(None if d in dims else d for d in labels if keepdim or d not in dims)

    def run(sharding: Sharding, x: Tensor) -> Any:
        return local(x) if across is None or not any(map(sharding.has, dims)) else across(sharding, x)

    return OperatorCall(
        [Operand(input, labels)], [left] * results, run, own=frozenset(dims if across is not None else ())
    )


_MAX, _MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN


@rule("sum", result="same sharding; summed dim: partial, all-reduced", collectives="summed dim: all-reduce")
def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> OperatorCall:
    dims = _dims_of(dim, input)
    return _reduce(input, dims, keepdim, lambda x: x.sum(dims, keepdim, dtype=dtype))


@rule("mean", result="as sum", collectives="as sum")
def _mean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> OperatorCall | None:
    """Describe a mean as a sum divided by the global size; dtypes other than floats run on replicas (None)."""
    shape, dims = shape_of(input), _dims_of(dim, input)
    if not shape or not (dtype or input.dtype).is_floating_point:
        return None
    size, target = math.prod(shape[d] for d in dims), dtype or input.dtype
    wide = torch.float32 if target.itemsize < 4 else target  # the sum may be beyond the dtype of the mean
    return _reduce(input, dims, keepdim, lambda x: (x.sum(dims, keepdim, dtype=wide) / size).to(target))


def _logical(input: Tensor, dim: Any, keepdim: bool, local: Any, op: Any) -> OperatorCall:
    """Describe ``all`` (``op`` is MIN of 0 and 1) or ``any`` (MAX); ``local`` is torch's function."""
    dims = () if dim in ((), []) else _dims_of(dim, input)  # of no dims: of every element by itself

    def across(sharding: Sharding, x: Tensor) -> Tensor:
        result = local(x, dims, keepdim)
        return eager.all_reduce(result.to(torch.uint8), sharding.group, "any", op).to(result.dtype)

    return _reduce(input, dims, keepdim, lambda x: local(x, dims, keepdim), across)


@rule("all", result="as sum", collectives="reduced dim: all-reduce")
def _all(input: Tensor, dim: Any = None, keepdim: bool = False) -> OperatorCall:
    return _logical(input, dim, keepdim, torch.all, _MIN)


@rule("any", result="as sum", collectives="reduced dim: all-reduce")
def _any(input: Tensor, dim: Any = None, keepdim: bool = False) -> OperatorCall:
    return _logical(input, dim, keepdim, torch.any, _MAX)


def _on_all_ranks(
    input: Any, other: Any, local: Callable[[Tensor, Tensor], bool], broadcasts: bool
) -> OperatorCall | None:
    """Describe a call that returns whether ``local`` holds on all ranks, with one answer for all of them."""
    shard = next((x for x in (input, other) if is_colo(x) and x.partitions), None)
    if shard is None or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    try:
        operands, shape = broadcast_operands([input.detach(), other.detach()])
        comparable = broadcasts or all(each.labels == tuple(range(-len(shape), 0)) for each in operands)
    except ShapeError:
        if broadcasts:
            raise
        # Different shapes do not return early: a plain tensor may have the wrong shape on one rank only, and the others
        # would wait in the all-reduce.
        shape, comparable = shape_of(shard), False
        operands = [Operand(shard.detach(), tuple(range(-len(shape), 0)))]

    def run(sharding: Sharding, *shards: Tensor) -> bool:
        holds = comparable and local(*shards)
        if not sharding.parts:
            return holds
        result = torch.tensor([holds], dtype=torch.uint8, device=shards[0].device)
        return bool(eager.all_reduce(result, sharding.group, "equal", _MIN))

    return OperatorCall(operands, [tuple(range(-len(shape), 0))], run)


@rule(
    "equal",
    accepts="any sharding; a plain tensor of the local shape is a shard, any other is replicated",
    result="a bool, the same on every rank", collectives="all-reduce of one number",
)  # fmt: skip
def _equal(input: Tensor, other: Tensor) -> OperatorCall | None:
    return _on_all_ranks(input, other, torch.equal, broadcasts=False)


@rule("allclose", accepts="as equal", result="as equal", collectives="as equal")
def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> OperatorCall | None:
    local = partial(torch.allclose, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return _on_all_ranks(input, other, local, broadcasts=True)


@rule("count_nonzero", result="as sum", collectives="as sum")
def _count(input: Tensor, dim: Any = None) -> OperatorCall:
    dims = _dims_of(dim, input)
    return _reduce(input, dims, keepdim=False, local=lambda x: torch.count_nonzero(x, dims))


@rule(
    "norm", torch.linalg.vector_norm, named="norm, linalg.vector_norm", result="as sum",
    collectives="reduced dim: all-gather of the local norms",
)  # fmt: skip
def _norm(
    input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> OperatorCall | None:
    """Describe a norm of vectors, along sharded dims too; norms of matrices and of no elements run on replicas."""
    power = 2 if p in (None, "fro") else p
    if isinstance(power, str) or not shape_of(input) or not input.is_floating_point() or not _has_order(input.dtype):
        return None
    power, dims = float(power), _dims_of(dim, input)
    if power <= 0 and not math.isinf(power):
        return None  # torch would raise on the ranks whose shard is empty
    if math.isinf(power) and not all(shape_of(input)[d] for d in dims):
        return None  # of no elements, for which torch raises: on replicas it does so on every rank

    def across(sharding: Sharding, x: Tensor) -> Tensor:
        compare_arguments("norm", sharding.group, order=power)
        target = dtype or dtype_of_result(torch.linalg.vector_norm, x)
        x = x if target is x.dtype else x.to(target)
        if math.isinf(power):
            shares_nan = True  # as torch: with a NaN the gradient is 0 everywhere, which ``abs`` makes of it
            return _MinMax.apply(x.abs(), dims, keepdim, power < 0, shares_nan, sharding.group)
        wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
        part = torch.linalg.vector_norm(wide, power, dims, keepdim)
        # The norm of the vector of local norms is the global norm; gradients flow through the own element.
        result = mappings.all_gather_dim(part.unsqueeze(0), 0, sharding.group, tensor_parallel_output_grad=False)
        # The norm of order 1 is a sum of norms, whose gradient has no NaN where another rank has one.
        total = result.sum(0) if power == 1 else torch.linalg.vector_norm(result, power, 0)
        return total.to(x.dtype)

    local = partial(torch.linalg.vector_norm, ord=power, dim=dims, keepdim=keepdim, dtype=dtype)
    return _reduce(input, dims, keepdim, local, across)


def _compare(input: Tensor, dim: Any, keepdim: bool, smallest: bool, shares_nan: bool) -> OperatorCall | None:
    """Describe amax or amin; or max or min of all elements (``shares_nan``), where NaNs share the gradient.

    Ties share the gradient equally. Replicas take empty dims and dtypes without an order.
    """
    shape, dims = shape_of(input), _dims_of(dim, input)
    if not shape or not all(shape[d] for d in dims) or not _has_order(input.dtype):
        return None
    local = partial(torch.amin if smallest else torch.amax, dim=dims, keepdim=keepdim)
    if shares_nan:
        local = torch.min if smallest else torch.max

    def across(sharding: Sharding, x: Tensor) -> Tensor:
        return _MinMax.apply(x, dims, keepdim, smallest, shares_nan, sharding.group)

    return _reduce(input, dims, keepdim, local, across)


@direct
class _MinMax(torch.autograd.Function):
    """Forward: the maximum (minimum) over all ranks. Backward: shared equally by ties.

    If it is NaN the gradient is NaN everywhere, as of torch's amax; with ``shares_nan`` the NaNs share it, as of max.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
        smallest: bool,
        shares_nan: bool,
        group: ProcessGroup,
    ) -> Tensor:
        extremum = extremum_over_ranks(x, dims, group, smallest)
        ctx.save_for_backward(x, extremum)
        ctx.dims, ctx.shares_nan, ctx.group = dims, shares_nan, group
        return extremum if keepdim else extremum.squeeze(dims)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, extremum = ctx.saved_tensors
        is_extremum = x == extremum
        if ctx.shares_nan:
            is_extremum |= x.isnan() & extremum.isnan()
        count = eager.all_reduce(is_extremum.sum(ctx.dims, keepdim=True), ctx.group, "max.backward")
        return is_extremum * (grad.view(extremum.shape) / count), None, None, None, None, None


class _MinMaxWithIndex(torch.autograd.Function):
    """Forward: the maximum (minimum) along a sharded dim and its global index. Backward: to that element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, local: Any, identity: Any, start: int, group: ProcessGroup) -> Any:
        if x.shape[dim]:
            value, index = local(x, dim)
        else:
            shape = [s for d, s in enumerate(x.shape) if d != dim]
            value, index = x.new_full(shape, identity), torch.zeros(shape, dtype=torch.int64, device=x.device)
        # ``[world, ...]``: the best value of every rank, and its global index. The best of these is of rank ``rank``.
        values = eager.all_gather(value.unsqueeze(0), 0, group, "max")
        indices = eager.all_gather((index + start).unsqueeze(0), 0, group, "max")
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
            out.scatter_add_(ctx.dim, index, grad.masked_fill(~is_local, 0).unsqueeze(ctx.dim))
        return out, None, None, None, None, None


def _min_max(input: Tensor, dim: Any, keepdim: bool, smallest: bool, index_only: bool) -> OperatorCall | None:
    """Describe max or min along one dim, which return (values, indices), or the indices alone (``index_only``)."""
    shape = shape_of(input)
    if not isinstance(dim, int) or isinstance(dim, bool) or not shape or 0 in shape or not _has_order(input.dtype):
        return None
    if index_only and input.dtype is torch.bool:
        return None  # torch has no argmax of it
    dim = from_front(dim, len(shape))
    local = torch.min if smallest else torch.max
    kind = torch.return_types.min if smallest else torch.return_types.max

    def across(sharding: Sharding, x: Tensor) -> Any:
        start, _ = sharding.shard(dim)
        pair: Any = _MinMaxWithIndex.apply(x, dim, local, _identity(x.dtype, smallest), start, sharding.group)
        pair = [each.unsqueeze(dim) for each in pair] if keepdim else pair
        return pair[1] if index_only else kind(pair)

    def alone(x: Tensor) -> Any:
        return local(x, dim, keepdim)[1] if index_only else local(x, dim, keepdim)

    return _reduce(input, (dim,), keepdim, alone, across, results=1 if index_only else 2)


def _add_rules(smallest: bool) -> None:
    """Add the rules of amax, max and argmax, or of amin, min and argmin."""
    extreme = "min" if smallest else "max"
    ties = "reduced dim: all-gather of the local maxima; backward: all-reduce of the number of ties"
    indices = "reduced dim: all-gather of the local maxima and indices"

    # The texts of amin, min and argmin in the table of rules refer to those of amax, max and argmax.
    @rule(f"a{extreme}", result="as sum", collectives="as amax" if smallest else ties)
    def describe_values(input: Tensor, dim: Any = (), keepdim: bool = False) -> OperatorCall | None:
        return _compare(input, dim, keepdim, smallest, shares_nan=False)

    @rule(extreme, result="as sum", collectives="as max" if smallest else indices)
    def describe(input: Tensor, dim: Any = None, keepdim: bool = False) -> OperatorCall | None:
        if dim is None:
            return _compare(input, dim=None, keepdim=False, smallest=smallest, shares_nan=True)
        return _min_max(input, dim, keepdim, smallest, index_only=False)

    accepts = "any sharding; without dim: 1-D only"  # with several dims, ties would need the global order

    @rule(f"arg{extreme}", accepts=accepts, result="as sum", collectives="as max")
    def describe_index(input: Tensor, dim: Any = None, keepdim: bool = False) -> OperatorCall | None:
        if dim is None:
            return _min_max(input, 0, keepdim, smallest, index_only=True) if len(shape_of(input)) == 1 else None
        return _min_max(input, dim, keepdim, smallest, index_only=True)


_add_rules(smallest=False)
_add_rules(smallest=True)
