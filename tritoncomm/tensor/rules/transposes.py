"""Transposes: permutations of the dims and their sharding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.call import Call, Operand
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


def _getter(name: str) -> Any:
    """The function that ``__torch_function__`` receives for an attribute."""
    return getattr(Tensor, name).__get__


def _ordered(input: Tensor, order: Sequence[int]) -> Call:
    labels = tuple(range(len(shape_of(input))))
    return Call([Operand(input, labels)], [tuple(order)], lambda _, x: x.permute(tuple(order)))


def _swapped(input: Tensor, first: int, second: int) -> Call:
    order = list(range(len(shape_of(input))))
    if order:
        order[first], order[second] = order[second], order[first]
    return _ordered(input, order)


@rule(
    torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims,
    accepts="any sharding", result="same sharding, dim renumbered", collectives="none",
)  # fmt: skip
def _transpose(input: Tensor, dim0: int | None = None, dim1: int | None = None, **names: Any) -> Call | None:
    first = dim0 if dim0 is not None else names.get("axis0")
    second = dim1 if dim1 is not None else names.get("axis1")
    return None if not isinstance(first, int) or not isinstance(second, int) else _swapped(input, first, second)


@rule(
    torch.t, Tensor.t, _getter("T"), named="t, .T", accepts="any sharding", result="same sharding, dim renumbered",
    collectives="none",
)  # fmt: skip
def _t(input: Tensor, *_: Any) -> Call:
    return _ordered(input, tuple(reversed(range(len(shape_of(input))))))


@rule(
    torch.adjoint, Tensor.adjoint, _getter("mT"), _getter("mH"), _getter("H"),
    named="adjoint, .mT, .mH, .H", accepts="any sharding", result="same sharding, dim renumbered", collectives="none",
)  # fmt: skip
def _adjoint(input: Tensor, *_: Any) -> Call | None:
    return None if input.is_complex() or len(shape_of(input)) < 2 else _swapped(input, -2, -1)


@rule(torch.permute, Tensor.permute, accepts="any sharding", result="same sharding, dim renumbered", collectives="none")
def _permute(input: Tensor, *dims: Any, **names: Any) -> Call:
    order = names.get("dims", dims)
    order = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
    return _ordered(input, [dim % len(shape_of(input)) for dim in order])


@rule(
    torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis, accepts="any sharding",
    result="same sharding, dim renumbered", collectives="none",
)  # fmt: skip
def _movedim(input: Tensor, source: Any, destination: Any) -> Call:
    count = len(shape_of(input))
    sources = [dim % count for dim in ((source,) if isinstance(source, int) else source)]
    targets = [dim % count for dim in ((destination,) if isinstance(destination, int) else destination)]
    rest = iter(dim for dim in range(count) if dim not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return _ordered(input, [placed[dim] if dim in placed else next(rest) for dim in range(count)])
