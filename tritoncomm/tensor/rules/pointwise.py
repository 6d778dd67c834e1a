"""Operators that work element by element, broadcasting included."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import ShapeError, UnsupportedError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.distspec import ReplicaSpec
from tritoncomm.tensor.elementwise import writes
from tritoncomm.tensor.layout import is_colo, shape_of, wrap
from tritoncomm.tensor.rules.call import Call, Operand, Parts
from tritoncomm.tensor.rules.engine import execute, is_legal, piece_of
from tritoncomm.tensor.rules.table import ROWS, Row

__all__ = ["broadcast_operands", "elementwise", "keep"]

ROWS.append(
    Row(
        "element-wise, in place too",
        "every cut of the broadcast shape; a plain tensor of the piece's shape is a piece, any other is whole",
        "the cut; in place: as the tensor that is written",
        "a replica's gradient: gather, or all-reduce where it was broadcast over the cut",
        "elementwise",
    )
)


def elementwise(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise operator on pieces."""
    leaves, tree = tree_flatten((tuple(args), kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = [leaves[i] for i in places]
    if kwargs and is_colo(kwargs.get("out")):
        _refuse_resizing(name, kwargs["out"], tensors)
    if _one_layout(tensors):
        return keep(func, args, kwargs, next(x for x in tensors if is_colo(x)))

    def run(_: Any, *pieces: Tensor) -> Any:
        filled = list(leaves)
        for place, piece in zip(places, pieces, strict=True):
            filled[place] = piece
        args, kwargs = tree_unflatten(filled, tree)
        return func(*args, **kwargs)

    operands, shape = broadcast_operands(tensors)
    target = kwargs.get("out", args[0] if writes(name) and args else None)
    if target is not None or writes(name):
        return _into(next((i for i, x in enumerate(tensors) if x is target), -1), operands, run, name)
    return execute(Call(operands, [tuple(range(-len(shape), 0))], run))


def _refuse_resizing(name: str, out: Any, tensors: list[Any]) -> None:
    """Refuse ``out=`` of another shape than the result's, which torch would resize."""
    shapes, _ = _shapes(tensors)
    place = next(i for i, x in enumerate(tensors) if x is out)
    result = _broadcast([*shapes[:place], *shapes[place + 1 :]])
    if result != out._global_shape:
        raise UnsupportedError(f"{name}: out= of shape {list(out._global_shape)} cannot be resized to {list(result)}")


def _one_layout(tensors: list[Any]) -> bool:
    """Whether pieces can be combined as they are."""
    first = next(x for x in tensors if is_colo(x))
    for x in tensors:
        if is_colo(x):
            if x is first:
                continue
            if x._parts != first._parts or (x._parts and x._global_shape != first._global_shape):
                return False
            if x.process_group is not first.process_group and x.process_group != first.process_group:
                return False
        elif first._parts and (x.dim() or wants_grad(x)):
            return False
    return True


def keep(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Run on the pieces; what comes out is laid out like ``like``."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if is_colo(result) or not isinstance(result, Tensor) or (args and result is args[0]):
        return result
    if like._parts:
        return wrap(result, like.process_group, like.dist_spec, like._global_shape)
    spec = like.dist_spec if result.dim() == len(like._global_shape) else ReplicaSpec()
    return wrap(result, like.process_group, spec, result.shape)


def _shapes(tensors: list[Any]) -> tuple[list[tuple[int, ...]], list[bool]]:
    """The global shapes, and which of the tensors are plain pieces."""
    cut = next((x for x in tensors if is_colo(x) and x._parts), None)
    pieces = [cut is not None and not is_colo(x) and _is_piece(x, cut) for x in tensors]
    shapes = [
        tuple(cut._global_shape) if piece else shape_of(x)  # type: ignore[union-attr]
        for x, piece in zip(tensors, pieces, strict=True)
    ]
    return shapes, pieces


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    ndim = max(map(len, shapes), default=0)
    sizes = [1] * ndim
    for shape in shapes:
        for dim in range(-len(shape), 0):
            if shape[dim] != 1 and sizes[dim] not in (1, shape[dim]):
                raise ShapeError(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
            sizes[dim] = sizes[dim] if shape[dim] == 1 else shape[dim]
    return tuple(sizes)


def broadcast_operands(tensors: list[Any]) -> tuple[list[Operand], tuple[int, ...]]:
    """The tensors, labelled from the last dim, and the broadcast shape."""
    shapes, pieces = _shapes(tensors)
    sizes = _broadcast(shapes)
    found = []
    for x, shape, piece in zip(tensors, shapes, pieces, strict=True):
        labels = tuple(dim if shape[dim] == sizes[dim] else None for dim in range(-len(shape), 0))
        found.append(Operand(x, labels, piece))
    return found, sizes


def _is_piece(x: Tensor, cut: Any) -> bool:
    """Whether a plain tensor is a piece, and no rank could take it for a whole one.

    Without a gradient it is all the same: a whole tensor of the piece's shape is broadcast to the same values.
    """
    if x.shape != cut.shape:
        return False
    if not wants_grad(x):
        return True
    shape = cut._global_shape
    return all(not {1, shape[dim]} & set(chunk_sizes(shape[dim], count)) for dim, count in cut._parts)


def _into(place: int, operands: list[Operand], run: Callable[..., Any], name: str) -> Any:
    """In place, or with ``out=``: everything is brought to the layout of the operand that is written."""
    target: Any = operands[place].tensor if place >= 0 else None
    if not is_colo(target):
        raise UnsupportedError(f"{name} writes into a plain tensor from a ColoTensor; make it a ColoTensor first")
    parts = tuple((operands[place].labels[dim], count) for dim, count in target._parts)
    if writes(name):
        operands = [each if each.tensor is target else _broadcast_ones(each, parts) for each in operands]
    if not is_legal(Call(operands, [], run), parts):
        others = [list(shape_of(each.tensor)) for each in operands]
        raise UnsupportedError(f"{name}: {others} cannot be cut like {list(target._global_shape)}, {target.dist_spec}")
    with torch._C.DisableTorchFunctionSubclass():
        pieces = [target if each.tensor is target else piece_of(each, parts, target.process_group) for each in operands]
        run(None, *pieces)
    return target


def _broadcast_ones(each: Operand, parts: Parts) -> Operand:
    """An operand that has some of several sharded dims, all of size 1, without their labels.

    It is broadcast to every shard, to an empty one too; a rank whose local tensor has that shape takes it for a shard.
    """
    shared = [label for label, _ in parts if label in each.labels]
    if each.is_piece or len(shared) in (0, len(parts)) or any(shape_of(each.tensor)[label] != 1 for label in shared):
        return each
    return Operand(each.tensor, tuple(None if label in shared else label for label in each.labels))
