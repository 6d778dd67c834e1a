"""Transposes and views: elements under permuted dims or another shape, with the sharding carried over."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import ShapeError
from tritoncomm.tensor.layout import shape_of, shares_storage
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding, broadcast_labels
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []

_renumbered = partial(rule, result="same sharding, dim renumbered")
_reshaped = partial(
    _renumbered,
    accepts="Shard(d) of a dim that keeps its size, or is the first of its merged or split dims and divides",
)


def _getter(name: str) -> Any:
    """Return the function that ``__torch_function__`` receives for an attribute."""
    return getattr(Tensor, name).__get__


def _ordered(input: Tensor, permuted: Callable[[Tensor], Tensor]) -> OperatorCall:
    """Describe a permutation of dims; the sizes of a tensor whose dims have the sizes 1, 2, 3, ... show it."""
    labels = tuple(range(len(shape_of(input))))
    sizes = permuted(torch.empty([label + 1 for label in labels], device="meta")).shape
    return OperatorCall([Operand(input, labels)], [tuple(size - 1 for size in sizes)], lambda _, x: permuted(x))


@_renumbered("transpose", "swapaxes", "swapdims")
def _transpose(input: Tensor, dim0: int, dim1: int) -> OperatorCall:
    return _ordered(input, lambda x: x.transpose(dim0, dim1))


@_renumbered("t", _getter("T"), named="t, .T")
def _t(input: Tensor, *_: Any) -> OperatorCall | None:
    return _ordered(input, torch.t) if len(shape_of(input)) <= 2 else None


@_renumbered("adjoint", _getter("mT"), _getter("mH"), _getter("H"), named="adjoint, .mT, .mH, .H")
def _adjoint(input: Tensor, *_: Any) -> OperatorCall | None:
    return None if input.is_complex() or len(shape_of(input)) < 2 else _ordered(input, lambda x: x.mT)


@_renumbered("permute")
def _permute(input: Tensor, *dims: Any, **names: Any) -> OperatorCall:
    return _ordered(input, lambda x: x.permute(*dims, **names))


@_renumbered("movedim", "moveaxis")
def _movedim(input: Tensor, source: Any, destination: Any) -> OperatorCall:
    return _ordered(input, lambda x: x.movedim(source, destination))


def _sizes(arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return sizes that are separate arguments or one sequence; None for anything else (a dtype)."""
    sizes = arguments[0] if len(arguments) == 1 and not isinstance(arguments[0], int) else arguments
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    return tuple(sizes)


def _target(arguments: Sequence[Any], names: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the global shape that a call of view, reshape, view_as or reshape_as requests."""
    arguments = arguments or [names[name] for name in ("shape", "size", "other") if name in names]
    return shape_of(arguments[0]) if arguments and isinstance(arguments[0], Tensor) else _sizes(arguments)


def _dims_by_size_before(shape: Sequence[int]) -> dict[int, int]:
    """Return the dims of more than one element by the number of elements of all dims before them."""
    # Dims of two shapes with one key are the first of their merged or split dims. (2, 3, 4) has ``{1: 0, 2: 1, 6: 2}``
    # and (6, 2, 2) has ``{1: 0, 6: 1, 12: 2}``: dim 0 becomes dim 0, and dim 2 becomes dim 1.
    return {math.prod(shape[:dim]): dim for dim, size in enumerate(shape) if size > 1}


def _viewed(input: Tensor, target: Sequence[int] | None, copies: bool = False) -> OperatorCall | None:
    """Describe ``input`` in the global shape ``target``, which may have one -1; None runs on replicas.

    Args:
        copies: whether to copy if torch's view would fail.
    """
    if target is None:
        return None
    shape, sizes = shape_of(input), list(target)
    if -1 in sizes:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = math.prod(shape) // rest if rest else 0
    if math.prod(sizes) != math.prod(shape):
        raise ShapeError(f"view: {list(shape)} has another number of elements than {list(target)}")
    labels = tuple(range(len(shape)))
    # A dim goes on as the dim of the target that has as many elements before it, if there is one.
    old_starts, new_starts = _dims_by_size_before(shape), _dims_by_size_before(sizes)
    new_dims = {}
    if math.prod(shape):
        new_dims = {dim: new_starts[before] for before, dim in old_starts.items() if before in new_starts}
    old_dims = {new: old for old, new in new_dims.items()}

    def legal(label: Any, count: int, _: Any) -> bool:
        if label not in new_dims:
            return False
        before, after = shape[label], sizes[new_dims[label]]
        return before == after or (before % count == 0 and after % count == 0)

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        local = list(sizes)
        for label, count in sharding.parts:
            new = new_dims[label]
            local[new] = sharding.shard(label)[1] if shape[label] == sizes[new] else sizes[new] // count
        if not copies:
            return x.view(local)
        reshaped = x.reshape(local)
        single = tuple((label, new_dims[label]) for label, _ in sharding.parts if x.shape[label] == 1 < shape[label])
        if single and shares_storage(reshaped, x) and _hides_copy(x.shape, x.stride(), tuple(local), single):
            return reshaped.clone()
        return reshaped

    out = {old: sizes[new] for old, new in new_dims.items()}  # sizes in the result, by label
    return OperatorCall(
        [Operand(input, labels)], [tuple(map(old_dims.get, range(len(sizes))))], run, legal=legal, result_sizes=out
    )


@lru_cache(maxsize=1024)
def _hides_copy(
    shape: tuple[int, ...], stride: tuple[int, ...], target: tuple[int, ...], single: tuple[tuple[int, int], ...]
) -> bool:
    """Whether a local tensor reshapes without a copy only because sharded dims have size 1 locally.

    ``single`` has the sharded dims of local size 1, and their dims in ``target``, the local shape afterwards.
    """
    # Other ranks, and torch on the global tensor, copy in this case, so later writes must not be visible here either.
    # The trial: a tensor without memory in which each such dim has size 2 is viewed, and torch raises where that needs
    # a copy. Dims outside of a doubled one in memory, those whose stride is not smaller, then step twice as far.
    sizes, strides, new_sizes = list(shape), list(stride), list(target)
    for dim, new in single:
        inner = strides[dim]
        strides = [2 * step if i != dim and step >= inner else step for i, step in enumerate(strides)]
        sizes[dim], new_sizes[new] = 2, 2 * new_sizes[new]
    try:
        torch.empty_strided(sizes, strides, device="meta").view(new_sizes)
    except (RuntimeError, ValueError):  # with fake tensors
        return True
    return False


@_reshaped("view", "view_as")
def _view(input: Tensor, *arguments: Any, **names: Any) -> OperatorCall | None:
    return _viewed(input, _target(arguments, names))


@_reshaped("reshape", "reshape_as")
def _reshape(input: Tensor, *arguments: Any, **names: Any) -> OperatorCall | None:
    return _viewed(input, _target(arguments, names), copies=True)


def _shaped(input: Tensor, reshaped: Callable[[Tensor], Tensor], copies: bool = False) -> OperatorCall | None:
    """Describe ``input`` in the shape that ``reshaped`` gives the global tensor."""
    return _viewed(input, reshaped(torch.empty(shape_of(input), device="meta")).shape, copies)


@_reshaped("flatten")
def _flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> OperatorCall | None:
    return _shaped(input, lambda x: x.flatten(start_dim, end_dim), copies=True)


@_reshaped("unflatten")
def _unflatten(input: Tensor, dim: int, sizes: Any) -> OperatorCall | None:
    return None if _sizes((sizes,)) is None else _shaped(input, lambda x: x.unflatten(dim, sizes))


def _add_atleast(function: Any) -> None:
    """Add the rule of ``torch.atleast_1d``, ``atleast_2d`` or ``atleast_3d`` of one tensor."""

    @_renumbered(function)
    def describe(*tensors: Any) -> OperatorCall | None:
        return _shaped(tensors[0], function) if len(tensors) == 1 and isinstance(tensors[0], Tensor) else None


for _function in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
    _add_atleast(_function)


@_renumbered("squeeze")
def _squeeze(input: Tensor, dim: Any = None) -> OperatorCall | None:
    return _shaped(input, lambda x: x.squeeze() if dim is None else x.squeeze(dim))


@_renumbered("unsqueeze")
def _unsqueeze(input: Tensor, dim: int) -> OperatorCall | None:
    return _shaped(input, lambda x: x.unsqueeze(dim))


@_renumbered("expand", "expand_as", "broadcast_to", accepts="any sharding of a dim that is not expanded")
def _expand(input: Tensor, *arguments: Any, **names: Any) -> OperatorCall | None:
    """Describe an expansion to sizes, or to the shape of a tensor; other arguments run on replicas (None)."""
    arguments = arguments or tuple(names[name] for name in ("size", "other") if name in names)
    is_like = len(arguments) == 1 and isinstance(arguments[0], Tensor)
    requested = shape_of(arguments[0]) if is_like else _sizes(arguments)
    if requested is None:
        return None
    shape, sizes = shape_of(input), list(requested)
    for dim in range(-len(shape), 0):
        sizes[dim] = shape[dim] if sizes[dim] == -1 else sizes[dim]
    # Labels count dims from the end, as broadcasting does. An expanded dim, and a new one in front, has None instead,
    # and is not sharded. A sharded dim is expanded to the size of this rank's shard, ``shard(label)[1]``.
    labels = broadcast_labels(shape, sizes)
    result = (*[None] * (len(sizes) - len(shape)), *labels)

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        pairs = zip(result, sizes, strict=True)
        local = [sharding.shard(label)[1] if sharding.has(label) else size for label, size in pairs]
        return x.expand(local)

    return OperatorCall([Operand(input, labels)], [result], run)
