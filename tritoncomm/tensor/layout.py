"""The base class of ColoTensor: a local tensor with its layout, and functions that need no operator of it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.tensor.compute_spec import ComputeSpec
from tritoncomm.tensor.const import TensorType
from tritoncomm.tensor.distspec import _DistSpec
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["LocalShard", "is_colo", "is_view", "plain", "refuse_sharing", "shape_of", "shares_storage"]


class LocalShard(Tensor):
    """Local tensor with its layout; ``ColoTensor``, the only direct subclass, adds the operators.

    Attributes:
        has_initialized: whether the caller gave a spec.
        partitions: (dim, number of shards) of every sharded dim, in the order of the spec; empty for a replica.
        _elsewhere: text about a shard that was loaded on a rank that holds another one; empty for all others.
    """

    dist_spec: _DistSpec
    compute_spec: ComputeSpec | None
    process_group: ProcessGroup
    has_initialized: bool
    _type: TensorType
    global_shape: tuple[int, ...]
    partitions: tuple[tuple[int, int], ...]
    _is_gathered: ClassVar[bool] = False
    _with_views: ClassVar[Callable[..., Any]]
    """``gathered_view.of_gathered``, which that module sets: it makes tensors of this class itself."""
    _elsewhere: str = ""
    _wrap: Callable[[Tensor, ProcessGroup, _DistSpec, Sequence[int]], Any]
    _wrap_like: Callable[[Tensor], Any]
    _rebuild: Callable[..., Any]
    _state: Callable[[], tuple[Any, ...]]
    redistribute: Callable[..., Any]
    is_sharded: Callable[[], bool]
    numel_global: Callable[[], int]


def is_colo(x: Any) -> TypeGuard[LocalShard]:
    """Whether ``x`` is a ColoTensor."""
    return isinstance(x, LocalShard)


def is_view(x: Any) -> bool:
    """Whether ``x`` is a view of a sharded dim, whose memory is a gathered copy."""
    return isinstance(x, LocalShard) and x._is_gathered


def plain(x: Tensor) -> Tensor:
    """Return the local tensor as a plain tensor, connected to the same autograd graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def shares_storage(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]


def shape_of(x: Tensor) -> tuple[int, ...]:
    """Return the global shape."""
    return x.global_shape if is_colo(x) else tuple(x.shape)


def refuse_sharing(name: str, x: Any) -> None:
    """Reject a view, whose memory is a gathered copy, and a shard of another rank's file."""
    if isinstance(x, LocalShard) and x._elsewhere:
        raise MismatchError(f"{name}: {x._elsewhere}")
    if is_view(x):
        raise UnsupportedError(f"{name}: this is a view of a sharded dim, whose memory is a copy; clone() it first")
