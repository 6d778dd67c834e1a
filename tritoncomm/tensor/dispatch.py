"""What an operator does to the layout of its ColoTensors: keeps it, or gets whole tensors.

In this order: an implementation registered with ``op_wrapper.colo_op_impl``; attributes and methods that only look;
element-wise operators, which run on the pieces and keep the layout; everything else runs on replicas, and says so once.
A result never carries a layout that it does not have.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.elementwise import ELEMENTWISE, LOOKS, MOVES_ONLY
from tritoncomm.tensor.op_wrapper import implementation
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.transitions import check

__all__ = ["check_cut", "plain", "run", "wrap"]

_told: set[str] = set()


def plain(x: Tensor) -> Tensor:
    """The piece as an ordinary tensor, in the same place of the autograd graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def wrap(x: Tensor, pg: ProcessGroup, dist_spec: _DistSpec, global_shape: Sequence[int]) -> Any:
    """A plain tensor as a ColoTensor of this layout."""
    from tritoncomm.tensor.colo_tensor import ColoTensor

    with torch._C.DisableTorchFunctionSubclass():
        made = x.as_subclass(ColoTensor)
    made.has_initialized, made._type = True, ColoTensor._kind
    return made._lay_out(pg, dist_spec, None, global_shape)


def check_cut(parts: dict[int, int], pg: ProcessGroup) -> None:
    """Refuse a cut into another number of pieces than there are ranks."""
    check(tuple(parts.items()), pg.tp_world_size(), "ColoTensor")


def _coloured(*trees: Any) -> Iterator[Any]:
    from tritoncomm.tensor.colo_tensor import ColoTensor

    return (x for x in tree_leaves(trees) if isinstance(x, ColoTensor))


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` with ColoTensors among the arguments."""
    impl = implementation(func)
    if impl is not None:
        return impl(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func is Tensor.backward or func is torch.autograd.backward or func is torch.autograd.grad:
        return _look(func, args, kwargs)
    if name in LOOKS or name in ("__get__", "__set__", "__delete__"):
        return _look(func, args, kwargs)
    tensors = list(_coloured(args, kwargs))
    if name in MOVES_ONLY or (name in ELEMENTWISE and _agree(tensors, args, kwargs)):
        return _keep(func, args, kwargs, tensors[0])
    if name in ELEMENTWISE and _writes(name, kwargs):
        return _into_first(func, args, kwargs, tensors)
    if name in ELEMENTWISE and _one_whole(tensors, args, kwargs):
        return _aligned(func, args, kwargs, tensors)
    return _on_replicas(func, name, args, kwargs, tensors)


def _is_colo(x: Any) -> bool:
    return next(_coloured(x), None) is x and x is not None


def _look(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Attributes and questions; what is not the tensor itself comes back plain."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _layout(x: Any) -> tuple[Any, ...]:
    return x._global_shape, partitions(x.dist_spec, len(x._global_shape)), x.process_group._identity()


def _agree(tensors: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether pieces can be combined as they are: one layout for all, and nothing else but numbers.

    A plain tensor beside shards is a piece when it has the piece's shape and all pieces are equal; beside replicas it
    is whole, like they are.
    """
    first = _layout(tensors[0])
    if not first[1]:
        return all(not _layout(x)[1] and x.process_group == tensors[0].process_group for x in tensors)
    if any(_layout(x) != first for x in tensors):
        return False
    even = all(first[0][dim] % parts == 0 for dim, parts in first[1].items()) and 0 not in first[0]
    return all(x.dim() == 0 or (even and x.shape == tensors[0].shape) for x in _others(tensors, args, kwargs))


def _others(tensors: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The plain tensors among the arguments."""
    coloured = {id(x) for x in tensors}
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) not in coloured]


def _one_whole(tensors: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether all ColoTensors are pieces of tensors of one shape over the same ranks, beside numbers."""
    first = tensors[0]
    alike = all(x._global_shape == first._global_shape and x.process_group == first.process_group for x in tensors)
    return alike and all(x.dim() == 0 for x in _others(tensors, args, kwargs))


def _aligned(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """Element by element over different layouts: all are laid out like the first that is cut."""
    like = next(x for x in tensors if _layout(x)[1])

    def moved(x: Any) -> Any:
        return x.redistribute(like.dist_spec) if _is_colo(x) and _layout(x) != _layout(like) else x

    return _keep(func, tree_map(moved, tuple(args)), tree_map(moved, kwargs), like)


def _keep(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Run on the pieces; what comes out is laid out like what went in."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    replicated = not _layout(like)[1]

    def coloured(x: Any) -> Any:
        if not isinstance(x, Tensor) or _is_colo(x):
            return x
        shape = tuple(x.shape) if replicated else like._global_shape
        return wrap(x, like.process_group, like.dist_spec, shape)

    return tree_map(coloured, result)


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    return (name.endswith("_") and not name.startswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _into_first(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """An operator that writes into its first argument: the others are laid out as that one is."""
    target = tensors[0]
    if args[0] is not target:
        return _refuse(func, "writes into a plain tensor from a ColoTensor")
    shape = target._global_shape

    def like_target(x: Any) -> Any:
        if x is target or not isinstance(x, torch.Tensor) or x.dim() == 0:
            return x
        if not _is_colo(x):
            if _layout(target)[1]:
                return _refuse(func, f"takes a plain tensor of shape {list(x.shape)} beside pieces of {list(shape)}")
            return x
        return plain(_laid_out_like(x, target, func))

    return _keep(func, tree_map(like_target, tuple(args)), tree_map(like_target, kwargs), target)


def _laid_out_like(x: Any, target: Any, func: Callable[..., Any]) -> Any:
    if x._global_shape != target._global_shape:
        return _refuse(func, f"would broadcast {list(x._global_shape)} into pieces of {list(target._global_shape)}")
    return x.redistribute(target.dist_spec, target.process_group)


def _refuse(func: Callable[..., Any], why: str) -> Any:
    name = getattr(func, "__name__", str(func))
    raise UnsupportedError(f"{name} {why}; make it a ColoTensor of the same layout, or redistribute first")


def _on_replicas(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """No rule: every rank computes on whole tensors."""
    from tritoncomm.tensor.distspec import ReplicaSpec

    sharded = [x for x in tensors if _layout(x)[1]]
    if sharded and (_writes(name, kwargs) or any(x is y for x in _coloured(kwargs.get("out")) for y in sharded)):
        return _refuse(func, "has no rule for writing into a shard")
    if sharded and name not in _told:
        _told.add(name)
        warnings.warn(f"{name} has no rule for shards: it runs on whole tensors, gathered on every rank", stacklevel=4)
    pg = (sharded or tensors)[0].process_group

    def whole(x: Any) -> Any:
        if not _is_colo(x):
            return x
        return plain(x.redistribute(ReplicaSpec())) if _layout(x)[1] else plain(x)

    result = func(*tree_map(whole, tuple(args)), **tree_map(whole, kwargs))

    def coloured(x: Any) -> Any:
        return wrap(x, pg, ReplicaSpec(), x.shape) if isinstance(x, Tensor) else x

    if _writes(name, kwargs):
        return args[0]
    return tree_map(coloured, result)
