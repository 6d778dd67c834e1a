"""Autograd functions of lists of rows: the sum of a token's experts, and its gradients.

With ``y[j] = w[list, slot] * x[list]`` the product is linear in each factor, so that ``SumRows``, ``ScaleRows`` and
``DotRows`` are the gradients of each other. Nothing is added atomically, and every sum has a fixed order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tritoncomm import record
from tritoncomm.core.autograd import called, direct
from tritoncomm.core.ops import dense, resolved
from tritoncomm.core.rows import row_passes

__all__ = ["DotRows", "PairLists", "PairWeights", "ScaleRows", "SumRows", "dense_rows", "wide_of"]


class PairLists(NamedTuple):
    """The pairs of a rank, (row, expert), sorted by expert; each expert's pairs are in the order of the rows.

    Attributes:
        pairs: ``[pairs]``, ``row*slots + slot``; -1 for a row of padding.
        rows: ``[pairs]``, the row alone; -1 likewise.
        index: ``[rows, slots]``, position of each (row, slot) in ``pairs``; out of range if another rank has the
            expert.
    """

    pairs: Tensor
    rows: Tensor
    index: Tensor


@direct
class SumRows(Function):
    """Forward: ``x[list] = sum of w[list, slot] * y[index[list, slot]]``. Backward: the other two below."""

    @staticmethod
    def forward(ctx: Any, lists: PairLists, name: str, y: Tensor, weights: Tensor | None) -> Tensor:
        _save_lists(ctx, lists, name, [] if weights is None else [y if ctx.needs_input_grad[3] else None, weights])
        started, (path, passes), y = record.now(), row_passes(y), dense_rows(y)
        weights = None if weights is None else dense(weights)
        out = y.new_empty(lists.index.shape[0], y.shape[1])
        record.add(name, path, passes.sum_rows(y, lists.index, weights, out), 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, y, weights = _load_lists(ctx)
        if y is not None and not torch.is_grad_enabled():
            (grad,) = grads
            return None, None, *_scale_and_dot(lists, ctx.name, grad, y, weights)
        grad_weights = None if y is None else called(DotRows, lists, ctx.name, *grads, y)
        return None, None, called(ScaleRows, lists, ctx.name, *grads, weights), grad_weights


def _scale_and_dot(lists: PairLists, name: str, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the results of ``ScaleRows`` and ``DotRows``; each row of ``x`` is read once for both."""
    started, (path, passes), x, y = record.now(), row_passes(x), dense_rows(x), dense_rows(y)
    scaled, dots = y.new_empty(y.shape), y.new_zeros(lists.index.shape, dtype=wide_of(y.dtype))
    record.add(name, path, passes.scale_dot_rows(x, y, lists.pairs, dense(weights), scaled, dots), 0, started)
    return [scaled, dots]


@direct
class ScaleRows(Function):
    """Forward: ``y[j] = w[list, slot] * x[list]`` for each pair j, zeros for padding. Backward: the other two."""

    @staticmethod
    def forward(ctx: Any, lists: PairLists, name: str, x: Tensor, weights: Tensor | None) -> Tensor:
        _save_lists(ctx, lists, name, [] if weights is None else [x if ctx.needs_input_grad[3] else None, weights])
        started, (path, passes), x = record.now(), row_passes(x), dense_rows(x)
        out = x.new_empty(lists.pairs.shape[0], x.shape[1])
        if weights is None:
            copied = passes.gather_rows(x, lists.rows, out)
        else:
            copied = passes.scale_rows(x, lists.pairs, dense(weights), out)
        record.add(name, path, copied, 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, x, weights = _load_lists(ctx)
        grad_weights = None if x is None else called(DotRows, lists, ctx.name, x, *grads)
        return None, None, called(SumRows, lists, ctx.name, *grads, weights), grad_weights


@direct
class DotRows(Function):
    """Forward: ``w[list, slot] = x[list] . y[j]`` for each pair j. Backward: the two above."""

    @staticmethod
    def forward(ctx: Any, lists: PairLists, name: str, x: Tensor, y: Tensor) -> Tensor:
        _save_lists(ctx, lists, name, [x, y])
        started, (path, passes) = record.now(), row_passes(x)
        out = x.new_zeros(lists.index.shape, dtype=wide_of(x.dtype))
        record.add(name, path, passes.dot_rows(dense_rows(x), dense_rows(y), lists.pairs, out), 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, x, y = _load_lists(ctx)
        return None, None, called(SumRows, lists, ctx.name, y, *grads), called(ScaleRows, lists, ctx.name, x, *grads)


@direct
class PairWeights(Function):
    """Forward: ``out[i] = x.view(-1)[index[i]]``, 0 if that is out of range. Backward: likewise by ``inverse``."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, inverse: Tensor, name: str, x: Tensor) -> Tensor:
        ctx.group, ctx.name = None, _backward_of(name)
        ctx.save_for_backward(index, inverse)
        started, (path, passes), out = record.now(), row_passes(x), x.new_empty(index.shape)
        copied = passes.gather_rows(dense(x).view(-1, 1), index.view(-1), out.view(-1, 1))
        record.add(name, path, copied, 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return None, None, None, called(PairWeights, inverse, index, ctx.name, *grads)


def _save_lists(ctx: Any, lists: PairLists, name: str, tensors: Sequence[Tensor | None]) -> None:
    """Save the lists and the tensors, none or two, that a backward needs; None for one that it does not need."""
    ctx.group, ctx.name = None, _backward_of(name)
    ctx.save_for_backward(lists.pairs, lists.rows, lists.index, *tensors)


def _load_lists(ctx: Any) -> Sequence[Any]:
    """Return the lists and the tensors that ``_save_lists`` saved, or None for each."""
    pairs, rows, index, *tensors = ctx.saved_tensors
    return PairLists(pairs, rows, index), *(tensors or (None, None))


def _backward_of(name: str) -> str:
    """Return the name of the backward of a call; a backward's own gradient has its name."""
    return name if name.endswith(".backward") else f"{name}.backward"


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous rows, and without lazy bits."""
    x = resolved(x)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of routing weights and sums: fp32, or fp64 for rows of fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
