"""Plans of eager calls, looked up by shape and dtype: on small tensors the host decides, and arithmetic would show."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm.core import backend, plan
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import CollectivePlan, Ints

__all__ = [
    "EvenPlan",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "contiguous",
    "reduce_scatter",
    "resolved",
    "split",
    "uneven_all_gather",
    "uneven_all_to_all",
    "uneven_reduce_scatter",
]

_cached = lru_cache(maxsize=8192)
split = _cached(plan.split)
uneven_all_gather, uneven_reduce_scatter = _cached(plan.all_gather), _cached(plan.reduce_scatter)
uneven_all_to_all = _cached(plan.all_to_all)


class EvenPlan(NamedTuple):
    """A collective of equal shards.

    Attributes:
        shape: of the result.
        stride: of the result, contiguous.
        bytes_sent: to the other ranks.
        in_order: the receive buffer (reduce-scatter: the input) is in rank order as it stands.
        may_be_lazy: the input may carry a lazy conjugate or negative bit.
        stacked: shape of the buffer with the ranks in dim 0, where it is not the result's; None where it is.
        needs_cast: the backend does not support this dtype; reinterpret it (set for reductions only).
    """

    shape: Ints
    stride: Ints
    bytes_sent: int
    in_order: bool
    may_be_lazy: bool
    stacked: Ints | None = None
    needs_cast: bool = False


def _may_be_lazy(shape: Ints, dtype: torch.dtype) -> bool:
    """A contiguous real tensor of more than one element never carries the negative bit of an imaginary part."""
    return dtype.is_complex or math.prod(shape) <= 1


def _even(shape: Ints, dtype: torch.dtype, planned: CollectivePlan, stacked: Ints | None, cast: bool) -> EvenPlan:
    lazy = _may_be_lazy(shape, dtype)
    stride = contiguous_stride(planned.shape)
    return EvenPlan(planned.shape, stride, planned.bytes_sent, planned.in_order, lazy, stacked, cast)


@_cached
def all_gather(shape: Ints, dtype: torch.dtype, dim: int, world: int) -> EvenPlan:
    """``plan.all_gather`` of equal shards; ``stacked`` has the ranks in dim 0."""
    planned = plan.all_gather(shape, dtype.itemsize, dim, world, 0)
    stacked = plan.resized(shape, 0, shape[0] * world)
    return _even(shape, dtype, planned, None if stacked == planned.shape else stacked, False)


@_cached
def reduce_scatter(shape: Ints, dtype: torch.dtype, dim: int, world: int) -> EvenPlan:
    """``plan.reduce_scatter`` of equal shards; ``stacked`` is set where input and result do not match dim by dim."""
    planned = plan.reduce_scatter(shape, dtype.itemsize, dim, world, 0)
    return _even(shape, dtype, planned, None if dim in (0, -len(shape)) else shape, dtype in backend.not_summed)


@_cached
def all_to_all(shape: Ints, dtype: torch.dtype, scatter_dim: int, gather_dim: int, world: int) -> EvenPlan:
    """``plan.all_to_all`` of equal shards."""
    planned = plan.all_to_all(shape, dtype.itemsize, scatter_dim, gather_dim, world, 0)
    return _even(shape, dtype, planned, None, False)


@_cached
def all_to_all_single(
    shape: Ints, dtype: torch.dtype, world: int, rank: int, out_sizes: Ints | None, in_sizes: Ints | None
) -> tuple[CollectivePlan, Ints, bool]:
    """``plan.all_to_all_single``, strides of the result, and whether the input may be lazy."""
    planned = plan.all_to_all_single(shape, dtype.itemsize, world, rank, out_sizes, in_sizes)
    return planned, contiguous_stride(planned.shape), _may_be_lazy(shape, dtype)


def contiguous(x: Tensor, may_be_lazy: bool = True) -> tuple[Tensor, int]:
    """x contiguous and without lazy bits, and the bytes copied for it."""
    if may_be_lazy and (x.is_neg() or x.is_conj()):
        return resolved(x).contiguous(), 2 * x.nbytes
    return (x, 0) if x.is_contiguous() else (x.contiguous(), 2 * x.nbytes)


def resolved(x: Tensor) -> Tensor:
    """x without lazy conjugate and negative bits."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
