"""Pieces and ColoTensors: from one to the other without looking twice."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check

__all__ = ["check_cut", "colour", "is_colo", "plain", "register", "shape_of", "shares_storage", "wrap"]

T = TypeVar("T")

_colo: Any = ()


def register(cls: type[T]) -> type[T]:
    """Class decorator of ColoTensor, which lives above this module."""
    global _colo
    _colo = cls
    return cls


def is_colo(x: Any) -> bool:
    """Whether ``x`` is a ColoTensor."""
    return isinstance(x, _colo)


def plain(x: Tensor) -> Tensor:
    """The piece as an ordinary tensor, in the same place of the autograd graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def shares_storage(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def shape_of(x: Tensor) -> tuple[int, ...]:
    """Shape of the whole."""
    return x._global_shape if is_colo(x) else tuple(x.shape)  # type: ignore[attr-defined]


def wrap(x: Tensor, pg: ProcessGroup, dist_spec: _DistSpec, global_shape: Sequence[int]) -> Any:
    """A plain tensor as a ColoTensor of this layout."""
    with torch._C.DisableTorchFunctionSubclass():
        made = x.as_subclass(_colo)
    return colour(made, pg, dist_spec, tuple(global_shape))


def colour(made: Any, pg: ProcessGroup, dist_spec: _DistSpec, global_shape: tuple[int, ...]) -> Any:
    """Attributes of a piece that is known to fit."""
    made.has_initialized, made._type = True, _colo._kind
    made.process_group, made.dist_spec, made.compute_spec = pg, dist_spec, None
    made._global_shape = global_shape
    made._parts = tuple(partitions(dist_spec, len(global_shape)).items())
    return made


def check_cut(parts: dict[int, int], pg: ProcessGroup) -> None:
    """Refuse a cut into another number of pieces than there are ranks."""
    check(tuple(parts.items()), pg.tp_world_size(), "ColoTensor")
