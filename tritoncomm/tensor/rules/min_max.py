"""Maxima and minima, and where they are."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import eager
from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.across_ranks import dims_of, edge, largest_over_ranks, left_of
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.table import rule

__all__ = ["Extreme"]


def _compare(input: Tensor, dim: Any, keepdim: bool, smallest: bool) -> Call | None:
    """amax and amin; their gradient is shared equally by all elements that are as large."""
    count = len(shape_of(input))
    dims = dims_of(dim, count)
    local = torch.amin if smallest else torch.amax

    def run(cut: Cut, x: Tensor) -> Tensor:
        if not any(cut.has(d) for d in dims):
            return local(x, dims, keepdim)
        assert cut.group is not None
        return Extreme.apply(x, dims, keepdim, smallest, cut.group)

    if not count or not all(shape_of(input)[d] for d in dims):
        return None
    left = left_of(count, dims, keepdim)
    return Call([Operand(input, tuple(range(count)))], [left], run, own=frozenset(dims))


class Extreme(torch.autograd.Function):
    """Forward: the largest (smallest) over all ranks. Backward: shared by all elements that are as large."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], keepdim: bool, smallest: bool, group: ProcessGroup
    ) -> Tensor:
        if x.numel():
            here = (torch.amin if smallest else torch.amax)(x, dims, True)
        else:
            here = x.new_full([1 if d in dims else s for d, s in enumerate(x.shape)], edge(x.dtype, not smallest))
        found = largest_over_ranks(here, group, smallest)
        ctx.save_for_backward(x, found)
        ctx.dims, ctx.group = dims, group
        return found if keepdim else found.squeeze(dims)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, found = ctx.saved_tensors
        same = (x == found) | (x.isnan() & found.isnan())
        many = eager.all_reduce(same.sum(ctx.dims, keepdim=True), ctx.group, "max.backward")
        return same * (grad.view(found.shape) / many), None, None, None, None


@rule(
    torch.amax, Tensor.amax, named="amax", accepts="every cut", result="as sum",
    collectives="reduced dim: all-gather of the pieces' maxima; all-reduce of how many there are for the gradient",
)  # fmt: skip
def _amax(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _compare(input, dim, keepdim, False)


@rule(torch.amin, Tensor.amin, named="amin", accepts="every cut", result="as sum", collectives="as amax")
def _amin(input: Tensor, dim: Any = (), keepdim: bool = False, *, out: Any = None) -> Call | None:
    return None if out is not None else _compare(input, dim, keepdim, True)


class _ExtremeAt(torch.autograd.Function):
    """Forward: the largest (smallest) along one cut dim and its index in the whole. Backward: to that element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, local: Any, edge: Any, start: int, group: ProcessGroup) -> Any:
        if x.shape[dim]:
            value, index = local(x, dim)
        else:
            shape = [s for d, s in enumerate(x.shape) if d != dim]
            value, index = x.new_full(shape, edge), torch.zeros(shape, dtype=torch.int64, device=x.device)
        values = eager.all_gather(value.unsqueeze(0), 0, group, None, "max")
        places = eager.all_gather((index + start).unsqueeze(0), 0, group, None, "max")
        best, rank = local(values, 0)
        place = places.gather(0, rank.unsqueeze(0)).squeeze(0)
        ctx.save_for_backward(place)
        ctx.dim, ctx.start, ctx.shape = dim, start, x.shape
        ctx.mark_non_differentiable(place)
        return best, place

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (place,) = ctx.saved_tensors
        here = (place >= ctx.start) & (place < ctx.start + ctx.shape[ctx.dim])
        out = grad.new_zeros(ctx.shape)
        if out.numel():
            index = (place - ctx.start).masked_fill(~here, 0).unsqueeze(ctx.dim)
            out.scatter_add_(ctx.dim, index, (grad * here).unsqueeze(ctx.dim))
        return out, None, None, None, None, None


def _extreme(input: Tensor, dim: Any, keepdim: bool, smallest: bool, which: str) -> Call | None:
    """max and min: of everything, or along one dim with the indices; ``which``: both, index."""
    shape = shape_of(input)
    if not isinstance(dim, int) or isinstance(dim, bool) or not shape or 0 in shape:
        return None
    dim %= len(shape)
    local = torch.min if smallest else torch.max

    def run(cut: Cut, x: Tensor) -> Any:
        if cut.has(dim):
            assert cut.group is not None
            start, _ = cut.piece(dim)
            value, index = _ExtremeAt.apply(x, dim, local, edge(x.dtype, not smallest), start, cut.group)
            value, index = (value.unsqueeze(dim), index.unsqueeze(dim)) if keepdim else (value, index)
        else:
            value, index = local(x, dim, keepdim)
        if which == "index":
            return index
        kind = torch.return_types.min if smallest else torch.return_types.max
        return kind((value, index))

    left = left_of(len(shape), (dim,), keepdim)
    operands = [Operand(input, tuple(range(len(shape))))]
    return Call(operands, [left] * (1 if which == "index" else 2), run, own=frozenset({dim}))


def _flat_index(input: Tensor, smallest: bool) -> Call | None:
    """argmax and argmin of everything: the piece's own, counted in the whole, the first of equals."""
    shape = shape_of(input)
    if len(shape) != 1:
        return None  # several dims: ties would have to be counted in the order of the whole
    return _extreme(input, 0, False, smallest, "index")


@rule(
    torch.max, Tensor.max, named="max", accepts="every cut", result="as sum",
    collectives="reduced dim: all-gather of the pieces' maxima and indices",
)  # fmt: skip
def _max(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    if out is not None:
        return None
    return _compare(input, None, False, False) if dim is None else _extreme(input, dim, keepdim, False, "both")


@rule(torch.min, Tensor.min, named="min", accepts="every cut", result="as sum", collectives="as max")
def _min(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    if out is not None:
        return None
    return _compare(input, None, False, True) if dim is None else _extreme(input, dim, keepdim, True, "both")


@rule(
    torch.argmax, Tensor.argmax, named="argmax", accepts="every cut; of everything: 1-D only", result="as sum",
    collectives="as max",
)  # fmt: skip
def _argmax(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return _flat_index(input, False) if dim is None else _extreme(input, dim, keepdim, False, "index")


@rule(
    torch.argmin, Tensor.argmin, named="argmin", accepts="every cut; of everything: 1-D only", result="as sum",
    collectives="as max",
)  # fmt: skip
def _argmin(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Call | None:
    return _flat_index(input, True) if dim is None else _extreme(input, dim, keepdim, True, "index")
