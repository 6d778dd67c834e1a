"""Concatenation, splitting and indexing along dims that are not sharded."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.box import box_of, refuse_graph, write_shard
from tritoncomm.tensor.layout import is_colo, plain, shape_of, shares_storage
from tritoncomm.tensor.rules.engine import (
    Operand,
    OperatorCall,
    broadcast_labels,
    from_front,
    is_legal,
    local_operand,
    replicated,
)
from tritoncomm.tensor.rules.table import rule

__all__ = ["set_by_mask", "set_item", "without_leading_ones"]

_OTHER = "any sharding of another dim"


def _labels_except(x: Tensor, dim: int) -> tuple[Any, ...]:
    """Return a label for every dim but ``dim``, whose None says that it must not be sharded."""
    return tuple(None if d == dim else d for d in range(len(shape_of(x))))


def _along(input: Tensor, dim: int, local: Any, results: int | None = 1, drops: bool = False) -> OperatorCall | None:
    """Describe an operator ``local(x, dim)`` that works along one dim, so that this dim must not be sharded.

    Args:
        results: number of results. None if it depends on the size of the dim: then ``local`` is run on a tensor without
            data, and its results are counted.
        drops: whether the results lack the dim.
    """
    if not shape_of(input):
        return None
    dim = from_front(dim, len(shape_of(input)))
    labels = _labels_except(input, dim)
    if results is None:
        results = len(local(torch.empty(shape_of(input)[dim], device="meta"), 0))
    if not results:
        return None  # replicas have no results, too
    # The label of the dim is None, which means that it is never sharded.
    result_labels = tuple(label for label in labels if label is not None) if drops else labels
    return OperatorCall([Operand(input, labels)], [result_labels] * results, lambda _, x: local(x, dim))


@rule(torch.cat, torch.concat, torch.concatenate, named="cat", accepts=_OTHER)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> OperatorCall | None:
    """Describe a concatenation; shapes of different numbers of dims run on replicas (None), where torch decides."""
    count = len(shape_of(tensors[0]))
    if not count or any(len(shape_of(x)) != count for x in tensors):
        return None
    dim = from_front(dim, count)
    labels = _labels_except(tensors[0], dim)
    return OperatorCall([Operand(x, labels) for x in tensors], [labels], lambda _, *shards: torch.cat(shards, dim))


@rule(torch.stack, named="stack", result="same sharding, dim renumbered")
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> OperatorCall | None:
    """Describe a stack; the new dim has no label. Different shapes run on replicas (None), where torch rejects them."""
    count = len(shape_of(tensors[0]))
    if any(shape_of(x) != shape_of(tensors[0]) for x in tensors):
        return None
    dim = from_front(dim, count + 1)
    labels = tuple(range(count))
    operands = [Operand(x, labels) for x in tensors]
    return OperatorCall(operands, [(*labels[:dim], None, *labels[dim:])], lambda _, *shards: torch.stack(shards, dim))


@rule("split", accepts=_OTHER)
def _split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> OperatorCall | None:
    return _along(tensor, dim, lambda x, d: torch.split(x, split_size_or_sections, d), results=None)


@rule("chunk", accepts=_OTHER)
def _chunk(input: Tensor, chunks: int, dim: int = 0) -> OperatorCall | None:
    return _along(input, dim, lambda x, d: torch.chunk(x, chunks, d), results=None)


@rule("unbind", accepts=_OTHER)
def _unbind(input: Tensor, dim: int = 0) -> OperatorCall | None:
    return _along(input, dim, torch.unbind, results=None, drops=True)


def _parse_index(index: Any, count: int) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the index by dim, labels of dims taken in full, and labels of the result; None for advanced indexing."""
    entries = list(index) if isinstance(index, tuple) else [index]
    kinds = (int, slice, type(None), type(Ellipsis))
    if any(isinstance(i, bool) or not isinstance(i, kinds) for i in entries):
        return None
    used = sum(i is not None and i is not Ellipsis for i in entries)
    if used > count:
        return None
    if not any(i is Ellipsis for i in entries):
        entries.append(Ellipsis)  # dims behind the index are taken in full
    dots = next(p for p, i in enumerate(entries) if i is Ellipsis)
    entries[dots : dots + 1] = [slice(None)] * (count - used)
    dims = iter(range(count))
    labels: list[Any] = [None] * count
    result: list[Any] = []
    for i in entries:
        if i is None:
            result.append(None)
            continue
        dim = next(dims)
        if isinstance(i, int):
            continue
        if i == slice(None):
            labels[dim] = dim
        result.append(labels[dim])
    return entries, tuple(labels), tuple(result)


@rule(
    Tensor.__getitem__, named="indexing by integers, slices, None",
    accepts="any sharding of dims that are taken in full", result="same sharding, dim renumbered",
)  # fmt: skip
def _getitem(input: Tensor, index: Any) -> OperatorCall | None:
    """Describe an index of integers, slices and None; other indices run on replicas (None)."""
    parsed = _parse_index(index, len(shape_of(input)))
    if parsed is None or not is_colo(input):
        return None
    entries, labels, result = parsed
    return OperatorCall([Operand(input, labels)], [result], lambda _, x: x[tuple(entries)])


def set_item(target: Any, index: Any, value: Any) -> None:
    """Run ``target[index] = value`` on local tensors; a number at the true places of a mask by ``masked_fill_``."""
    if not is_colo(target):
        if (
            is_colo(index)
            and index.dtype is torch.bool
            and index.shape == target.shape
            and not isinstance(value, Tensor)
        ):
            target.masked_fill_(index, _number(value, target.dtype))  # of a local shard, as optimizers write
            return
        raise UnsupportedError(
            "a ColoTensor cannot be assigned to part of a plain tensor; make that a ColoTensor first"
        )
    parsed = _parse_index(index, len(shape_of(target)))
    if parsed is None:
        if target.partitions:
            if not set_by_mask(target, index, value):
                _set_part(target, index, value)
            return
        entries, labels, result = index, (), ()  # torch takes other indices of a replica on the local tensors
    else:
        entries, labels, result = parsed
    parts = tuple((labels[dim], count) for dim, count in target.partitions)
    operands = []
    if isinstance(value, Tensor) and parts:
        # By the global shapes, as shards of a value that does not fit could fit, or be broadcast.
        value = without_leading_ones(value, len(result))
        selected_shape = torch.empty(target.global_shape, device="meta")[tuple(entries)].shape
        operands = [Operand(value, broadcast_labels(shape_of(value), selected_shape, result))]
    elif isinstance(value, Tensor):
        operands = [Operand(value, (None,) * len(shape_of(value)))]
    # ``is_legal`` looks at the operands and their labels; it does not run the function.
    if not is_legal(OperatorCall(operands, [], set_item), parts):
        _set_part(target, tuple(entries), value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        local = local_operand(operands[0], parts, target.process_group) if operands else value
        target[tuple(entries) if isinstance(entries, list) else entries] = local


def set_by_mask(target: Any, index: Any, value: Any) -> bool:
    """Run ``target[index] = value`` of a number and a mask of the first dims, by ``masked_fill_``; False for others."""
    (mask,) = index if type(index) is tuple and len(index) == 1 else (index,)
    if isinstance(value, Tensor) or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return False
    shape, rest = shape_of(mask), target.dim() - mask.dim()
    if not shape or shape != tuple(shape_of(target))[: len(shape)]:
        return False
    mask = mask.view(*shape, *[1] * rest) if rest else mask
    target.masked_fill_(mask, _number(value, target.dtype))
    return True


def _number(value: Any, dtype: torch.dtype) -> Any:
    """Convert a number as torch converts it in an assignment."""
    return torch.full((), value, dtype=dtype).item()


def without_leading_ones(value: Tensor, ndim: int) -> Tensor:
    """Return a value for an assignment to ``ndim`` dims: torch drops leading dims of size 1 in excess."""
    shape, extra = shape_of(value), max(len(shape_of(value)) - ndim, 0)
    return value.reshape(shape[extra:]) if extra and math.prod(shape[:extra]) == 1 else value


def _selected(target: Any, index: Any) -> Tensor:
    """Return ``target[index]`` of a meta tensor of the global shape; reject advanced indexing."""
    base = torch.empty(target.global_shape, device="meta")
    try:
        view = base[index]
    except (NotImplementedError, RuntimeError):
        view = None  # a mask, whose result shape depends on its values
    if view is None or not shares_storage(view, base):
        raise UnsupportedError(f"{index!r:.80} has no rule for writing into {target.dist_spec}; redistribute it first")
    return view


def _set_part(target: Any, index: Any, value: Any) -> None:
    """Run ``target[index] = value`` for part of a sharded dim: each rank writes the elements that it holds."""
    selected = _selected(target, index)
    refuse_graph("__setitem__", (target, value))
    shape, pg = target.global_shape, target.process_group
    if isinstance(value, Tensor):
        source = without_leading_ones(replicated(value, pg), selected.dim()).broadcast_to(selected.shape)
    else:  # a number out of range of the dtype raises on every rank
        source = torch.full((), value, dtype=target.dtype, device=target.device).expand(selected.shape)
    memory, box = plain(target).detach(), box_of(shape, selected)
    write_shard("__setitem__", memory, shape, target.partitions, pg, box, lambda x, at: x.copy_(source[at]))


@rule("narrow", accepts=_OTHER)
def _narrow(input: Tensor, dim: int, start: Any, length: int) -> OperatorCall | None:
    return _along(input, dim, lambda x, d: x.narrow(d, start, length))


@rule("select", accepts=_OTHER)
def _select(input: Tensor, dim: int, index: int) -> OperatorCall | None:
    return _along(input, dim, lambda x, d: x.select(d, index), drops=True)


@rule("index_select", accepts=_OTHER)
def _index_select(input: Tensor, dim: int, index: Tensor) -> OperatorCall | None:
    """Describe a selection along a dim that is not sharded; each rank needs the full index, so that has no labels."""
    if not shape_of(input):
        return None
    dim = from_front(dim, len(shape_of(input)))
    labels = _labels_except(input, dim)
    operands = [Operand(input, labels), Operand(index, (None,) * len(shape_of(index)))]
    return OperatorCall(operands, [labels], lambda _, x, i: torch.index_select(x, dim, i))
