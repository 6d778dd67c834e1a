"""Wrap and unwrap ColoTensors without validation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["is_colo", "plain", "register", "shape_of", "shares_storage", "wrap", "wrap_like"]

if TYPE_CHECKING:
    from tritoncomm.tensor.colo_tensor import ColoTensor

T = TypeVar("T")

_colo: Any = ()


def register(cls: type[T]) -> type[T]:
    """Class decorator of ColoTensor, whose module imports this one."""
    global _colo
    _colo = cls
    return cls


def is_colo(x: Any) -> "TypeGuard[ColoTensor]":
    """Whether ``x`` is a ColoTensor."""
    return isinstance(x, _colo)


def plain(x: Tensor) -> Tensor:
    """The local tensor as a plain tensor, connected to the same autograd graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def shares_storage(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def shape_of(x: Tensor) -> tuple[int, ...]:
    """Global shape."""
    return x.global_shape if is_colo(x) else tuple(x.shape)


def wrap(x: Tensor, pg: ProcessGroup, dist_spec: _DistSpec, global_shape: Sequence[int]) -> Any:
    """A plain local tensor as a ColoTensor of this layout, which is known to match."""
    with torch._C.DisableTorchFunctionSubclass():
        result = x.as_subclass(_colo)
    result.has_initialized, result._type = True, _colo._kind
    result.process_group, result.dist_spec, result.compute_spec = pg, dist_spec, None
    result.global_shape, result.partitions = tuple(global_shape), partitions(dist_spec, len(global_shape))
    return result


def wrap_like(x: Tensor, like: "ColoTensor") -> Any:
    """A plain local tensor as a ColoTensor of the layout of ``like``, which has the same local shape.

    A tensor without a graph is no view of ``x``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        result = x.as_subclass(_colo) if x.requires_grad else Tensor._make_subclass(_colo, x)
    result.has_initialized, result._type = True, _colo._kind
    result.process_group, result.dist_spec, result.compute_spec = like.process_group, like.dist_spec, None
    result.global_shape, result.partitions = like.global_shape, like.partitions
    return result
