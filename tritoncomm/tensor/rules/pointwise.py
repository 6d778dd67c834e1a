"""Element-wise operators, including broadcasting."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import UnsupportedError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.distspec import ReplicaSpec
from tritoncomm.tensor.elementwise import writes
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import (
    Operand,
    OperatorCall,
    Parts,
    broadcast_labels,
    broadcast_shapes,
    execute,
    is_legal,
    local_operand,
)
from tritoncomm.tensor.rules.table import rule

__all__ = ["broadcast_operands", "elementwise", "keep"]


@rule(
    named="element-wise, in place too",
    accepts="any sharding of the broadcast shape; a plain tensor of the local shape is a shard, any other is "
    "replicated",
    result="same sharding; in place: that of the tensor that is written",
    collectives="gradient of a replica: all-gather, or all-reduce if it is broadcast along the sharded dim",
)
def elementwise(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise operator on local tensors."""
    leaves, tree = tree_flatten((tuple(args), kwargs))
    positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = [leaves[i] for i in positions]
    if kwargs and is_colo(kwargs.get("out")):
        _refuse_resizing(name, kwargs["out"], tensors)
    if _same_layout(tensors):
        return keep(func, args, kwargs, next(x for x in tensors if is_colo(x)))

    def run(_: Any, *shards: Tensor) -> Any:
        filled = list(leaves)
        for position, shard in zip(positions, shards, strict=True):
            filled[position] = shard
        args, kwargs = tree_unflatten(filled, tree)
        return func(*args, **kwargs)

    operands, shape = broadcast_operands(tensors)
    is_in_place = writes(name)
    written = kwargs.get("out")
    if written is None and is_in_place and args:
        written = args[0]
    if written is not None or is_in_place:
        position = next((i for i, x in enumerate(tensors) if x is written), -1)  # -1: not among the operands
        return _into(position, operands, run, name)
    result_labels = tuple(range(-len(shape), 0))  # labels count dims from the last, as broadcasting does
    return execute(OperatorCall(operands, [result_labels], run))


def _refuse_resizing(name: str, out: Any, tensors: list[Any]) -> None:
    """Reject an ``out=`` that torch would resize."""
    shapes, _ = _shapes(tensors)
    position = next(i for i, x in enumerate(tensors) if x is out)
    result = broadcast_shapes([*shapes[:position], *shapes[position + 1 :]])
    if result != out.global_shape:
        raise UnsupportedError(f"{name}: out= of shape {list(out.global_shape)} cannot be resized to {list(result)}")


def _same_layout(tensors: list[Any]) -> bool:
    """Whether local tensors can be combined directly.

    A plain tensor beside shards can if it has no dims and needs no gradient, which would be a sum over the ranks.
    """
    first = next(x for x in tensors if is_colo(x))
    for x in tensors:
        if is_colo(x):
            if x is first:
                continue
            if x.partitions != first.partitions or (x.partitions and x.global_shape != first.global_shape):
                return False
            if x.process_group is not first.process_group and x.process_group != first.process_group:
                return False
        elif first.partitions and (x.dim() or wants_grad(x)):
            return False
    return True


def keep(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Run on local tensors; the result has the layout of ``like``."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if is_colo(result) or not isinstance(result, Tensor) or (args and result is args[0]):
        return result
    # A shard keeps its layout; a replica may get another shape, and keeps its spec while the dims are as many.
    if like.partitions:
        return like._wrap(result, like.process_group, like.dist_spec, like.global_shape)
    spec = like.dist_spec if result.dim() == len(like.global_shape) else ReplicaSpec()
    return like._wrap(result, like.process_group, spec, result.shape)


def _shapes(tensors: list[Any]) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Return the global shapes, and whether each tensor is a plain local shard."""
    sharded = next((x for x in tensors if is_colo(x) and x.partitions), None)
    are_local = [sharded is not None and not is_colo(x) and _is_local(x, sharded) for x in tensors]
    shapes = [
        sharded.global_shape if sharded is not None and is_local else shape_of(x)
        for x, is_local in zip(tensors, are_local, strict=True)
    ]
    return shapes, are_local


def broadcast_operands(tensors: list[Any]) -> tuple[list[Operand], tuple[int, ...]]:
    """Return the tensors as operands labelled from the last dim, and the broadcast shape."""
    shapes, are_local = _shapes(tensors)
    sizes = broadcast_shapes(shapes)
    described = zip(tensors, shapes, are_local, strict=True)
    return [Operand(x, broadcast_labels(shape, sizes), is_local) for x, shape, is_local in described], sizes


def _is_local(x: Tensor, sharded: Any) -> bool:
    """Whether a plain tensor is a local shard, decided identically on every rank."""
    if x.shape != sharded.shape:
        return False
    # Both readings agree without a gradient: a replica of the local shape broadcasts to equal values.
    if not wants_grad(x):
        return True
    shape = sharded.global_shape
    return all(not {1, shape[dim]} & set(chunk_sizes(shape[dim], count)) for dim, count in sharded.partitions)


def _into(position: int, operands: list[Operand], run: Callable[..., Any], name: str) -> Any:
    """Run in place or with ``out=``: operands are redistributed to the layout of the tensor that is written.

    ``position`` is the place of that tensor among the operands; -1 if it is none of them, which is rejected.
    """
    written: Any = operands[position].tensor if position >= 0 else None
    # The operand whose layout all get: the one that is written. Optimizers write into plain local shards, which have
    # the layout of the first sharded operand.
    model = operands[position] if position >= 0 else None
    if model is not None and model.is_local and not any(wants_grad(each.tensor) for each in operands):
        model = next(each for each in operands if is_colo(each.tensor) and each.tensor.partitions)
    if model is None or not is_colo(model.tensor):
        raise UnsupportedError(f"{name} writes into a plain tensor from a ColoTensor; make it a ColoTensor first")
    layout: Any = model.tensor
    parts = tuple((model.labels[dim], count) for dim, count in layout.partitions)
    if writes(name):
        operands = [each if each.tensor is written else _broadcast_ones(each, parts) for each in operands]
    if not is_legal(OperatorCall(operands, [], run), parts):
        shapes = [list(shape_of(each.tensor)) for each in operands]
        raise UnsupportedError(
            f"{name}: {shapes} cannot be sharded like {list(layout.global_shape)}, {layout.dist_spec}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        shards = [
            written if each.tensor is written else local_operand(each, parts, layout.process_group) for each in operands
        ]
        run(None, *shards)
    return written


def _broadcast_ones(each: Operand, parts: Parts) -> Operand:
    """Drop the labels of an operand that has only some of several sharded dims, all of size 1."""
    shared = [label for label, _ in parts if label in each.labels]
    if each.is_local or len(shared) in (0, len(parts)) or any(shape_of(each.tensor)[label] != 1 for label in shared):
        return each
    # Without labels it is a replica, which broadcasts to every shard, including empty ones.
    return Operand(each.tensor, tuple(None if label in shared else label for label in each.labels))
