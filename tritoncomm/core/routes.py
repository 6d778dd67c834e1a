"""What a movement's shapes decide, worked out once: result and wire shapes, bytes, whether the wire is the result."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.core.plan import Ints, Plan
from tritoncomm.errors import ShapeError

__all__ = [
    "Route",
    "even_sizes",
    "exchanged",
    "flat",
    "gathered",
    "joined",
    "located",
    "piece",
    "piece_of",
    "resolved",
    "rows_exchanged",
    "scattered",
    "sized",
]


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of movement.

    Attributes:
        shape: of the result (for a row exchange None when it is the input's).
        wire_bytes: bytes this rank sends.
        is_view: the wire holds the result's bytes in the result's order.
        lazy: the input may carry a lazy conjugate or negative bit.
        stacked: shape of the wire where it is not the result's; None where it is.
        out_rows: rows from each rank, empty when even.
        in_rows: rows to each rank, empty when even.
        special: the backend has to see another dtype (only told for reductions).
    """

    shape: Any
    wire_bytes: int
    is_view: bool
    lazy: bool
    stacked: Ints | None = None
    out_rows: Ints = ()
    in_rows: Ints = ()
    special: bool = False


def flat(x: Tensor, route: Route) -> tuple[Tensor, int]:
    """x contiguous and without lazy bits, and the bytes moved for it."""
    if route.lazy and (x.is_neg() or x.is_conj()):
        return resolved(x).contiguous(), 2 * x.nbytes
    return (x, 0) if x.is_contiguous() else (x.contiguous(), 2 * x.nbytes)


def resolved(x: Tensor) -> Tensor:
    """x without lazy conjugate and negative bits."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def located(error: ShapeError, shape: Ints, name: str, group: ProcessGroup) -> ShapeError:
    """The error with the function, the shape, the number of ranks and the rank in front of a caller."""
    return ShapeError(f"{name}: {error} (rank {group.rank()} of {group.size()} ranks, shape {tuple(shape)})")


def piece(shape: Ints, dim: int, size: int) -> Ints:
    """``shape`` with ``dim`` of another size."""
    dim %= len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _dim(shape: Ints, dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim {dim} is out of range")
    return dim % len(shape)


def _divided(shape: Ints, dim: int, world: int) -> int:
    if shape[dim] % world:
        raise ShapeError(f"dim {dim} of size {shape[dim]} does not divide over {world} ranks")
    return shape[dim] // world


def _lazy(shape: Ints, dtype: torch.dtype) -> bool:
    """A contiguous real tensor of more than one element never carries the negative bit of an imaginary part."""
    return dtype.is_complex or math.prod(shape) <= 1


@lru_cache(maxsize=8192)
def gathered(shape: Ints, dtype: torch.dtype, dim: int, world: int) -> Route:
    """Join ``dim`` of equal tensors; the wire has the ranks in dim 0."""
    dim = _dim(shape, dim)
    joined = piece(shape, dim, shape[dim] * world)
    stacked = piece(shape, 0, shape[0] * world)
    sent = math.prod(shape) * dtype.itemsize * (world - 1)
    is_view = math.prod(shape[:dim]) == 1
    return Route(joined, sent, is_view, _lazy(shape, dtype), None if stacked == joined else stacked)


@lru_cache(maxsize=8192)
def scattered(shape: Ints, dtype: torch.dtype, dim: int, world: int) -> Route:
    """Cut ``dim`` evenly; ``stacked`` is set where input and result do not match dim by dim."""
    dim = _dim(shape, dim)
    mine = piece(shape, dim, _divided(shape, dim, world))
    sent = math.prod(mine) * dtype.itemsize * (world - 1)
    is_view = math.prod(shape[:dim]) == 1
    stacked = None if dim == 0 else shape
    return Route(mine, sent, is_view, _lazy(shape, dtype), stacked, special=dtype in backend.special)


@lru_cache(maxsize=8192)
def piece_of(shape: Ints, dim: int, world: int, rank: int, sizes: Ints | None) -> tuple[int, int, bool]:
    """Start and end of a rank's piece of ``dim``, and whether that is dim 0."""
    dim = _dim(shape, dim)
    if sizes is None:
        size = _divided(shape, dim, world)
        return rank * size, (rank + 1) * size, dim == 0
    Plan.along(shape, dim, world, sizes)
    return sum(sizes[:rank]), sum(sizes[: rank + 1]), dim == 0


@lru_cache(maxsize=8192)
def rows_exchanged(
    shape: Ints, dtype: torch.dtype, world: int, rank: int, out_sizes: Ints | None, in_sizes: Ints | None
) -> Route:
    """All-to-all of rows, by split sizes as soon as this rank was given a list.

    Equal sizes of this rank say nothing about those of the others, and NCCL has another call for the even exchange.
    """
    if not shape:
        raise ShapeError("a 0-dim tensor has no rows to exchange")
    rows, row = shape[0], math.prod(shape[1:]) * dtype.itemsize
    given = in_sizes if in_sizes is not None else (_divided(shape, 0, world),) * world
    Plan.along(shape, 0, world, given)
    if out_sizes is not None and (len(out_sizes) != world or min(out_sizes) < 0):
        raise ShapeError(f"output split sizes {list(out_sizes)} need {world} entries of 0 or more")
    taken = out_sizes if out_sizes is not None else (_divided(shape, 0, world),) * world
    result = None if sum(taken) == rows else (sum(taken), *shape[1:])
    sent, lazy = (rows - given[rank]) * row, _lazy(shape, dtype)
    if out_sizes is None and in_sizes is None:
        return Route(result, sent, True, lazy)
    return Route(result, sent, True, lazy, None, taken, given)


@lru_cache(maxsize=8192)
def exchanged(shape: Ints, dtype: torch.dtype, scatter_dim: int, gather_dim: int, world: int) -> Route:
    """Cut one dim, join another."""
    scatter_dim, gather_dim = _dim(shape, scatter_dim), _dim(shape, gather_dim)
    block = piece(shape, scatter_dim, _divided(shape, scatter_dim, world))
    joined = piece(block, gather_dim, block[gather_dim] * world)
    sent = math.prod(block) * dtype.itemsize * (world - 1)
    return Route(joined, sent, math.prod(block[:gather_dim]) == 1, _lazy(shape, dtype))


def sized(shape: Ints, dim: int, world: int, sizes: Ints, name: str, group: ProcessGroup) -> Plan:
    """The plan of explicit sizes."""
    try:
        return Plan.along(shape, _dim(shape, dim), world, sizes)
    except ShapeError as error:
        raise located(error, shape, name, group) from None


def joined(shape: Ints, dim: int, sizes: Ints, world: int, rank: int) -> int:
    """``dim`` counted from the front; this rank's entry of ``sizes`` has to be its size."""
    dim = _dim(shape, dim)
    if len(sizes) != world or min(sizes) < 0 or sizes[rank] != shape[dim]:
        raise ShapeError(
            f"split sizes {list(sizes)} need {world} entries, mine being {shape[dim]}, the size of dim {dim}"
        )
    return dim


def even_sizes(shape: Ints, dim: int, world: int, name: str, group: ProcessGroup) -> Ints:
    """Equal pieces of ``dim``, as explicit sizes."""
    try:
        return (_divided(shape, _dim(shape, dim), world),) * world
    except ShapeError as error:
        raise located(error, shape, name, group) from None
