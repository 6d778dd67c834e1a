"""Maxima and minima, and their indices."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import eager
from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.across_ranks import dims_of, max_over_ranks, reduction_identity, result_labels
from tritoncomm.tensor.rules.call import Call, Operand, Sharding
from tritoncomm.tensor.rules.table import rule

__all__ = ["MinMax"]


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


@rule(
    torch.amax, Tensor.amax, named="amax", accepts="any sharding", result="as sum",
    collectives="reduced dim: all-gather of the local maxima; backward: all-reduce of the number of ties",
)  # fmt: skip
def _amax(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _compare(input, dim, keepdim, False)


@rule(torch.amin, Tensor.amin, named="amin", accepts="any sharding", result="as sum", collectives="as amax")
def _amin(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _compare(input, dim, keepdim, True)


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


def _flat_index(input: Tensor, smallest: bool) -> Call | None:
    """argmax and argmin of all elements of a 1-D tensor; the first of ties."""
    shape = shape_of(input)
    if len(shape) != 1:
        return None  # with several dims, ties would need the global order
    return _min_max(input, 0, False, smallest, "index")


@rule(
    torch.max, Tensor.max, named="max", accepts="any sharding", result="as sum",
    collectives="reduced dim: all-gather of the local maxima and indices",
)  # fmt: skip
def _max(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    if out is not None:
        return None
    return _compare(input, None, False, False) if dim is None else _min_max(input, dim, keepdim, False, "both")


@rule(torch.min, Tensor.min, named="min", accepts="any sharding", result="as sum", collectives="as max")
def _min(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    if out is not None:
        return None
    return _compare(input, None, False, True) if dim is None else _min_max(input, dim, keepdim, True, "both")


@rule(
    torch.argmax, Tensor.argmax, named="argmax", accepts="any sharding; without dim: 1-D only", result="as sum",
    collectives="as max",
)  # fmt: skip
def _argmax(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return _flat_index(input, False) if dim is None else _min_max(input, dim, keepdim, False, "index")


@rule(
    torch.argmin, Tensor.argmin, named="argmin", accepts="any sharding; without dim: 1-D only", result="as sum",
    collectives="as max",
)  # fmt: skip
def _argmin(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return _flat_index(input, True) if dim is None else _min_max(input, dim, keepdim, True, "index")
