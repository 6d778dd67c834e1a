"""The address map in integers: how one dim of a tensor is cut into the ranks' pieces of a wire."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["Plan", "chunk_sizes", "joined_layout", "normalize_sizes", "rows_layout", "unit_bytes", "wire_layout"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """``rows[o, w*run + k] <-> wire[w, o, k]`` where ``w*run + k < row``.

    ``outer = prod(shape[:dim])``, ``row = prod(shape[dim:])``,
    ``run = ceil(shape[dim] / world) * prod(shape[dim+1:])``.
    With explicit ``sizes`` the wire is flat and rank w's block ``[outer, lengths[w]]`` starts at ``outer*offsets[w]``.

    Attributes:
        outer: number of rows.
        row: elements of a row.
        run: elements of a row that go to one rank (the longest one when sizes are given).
        world: number of ranks.
        even: every rank gets the same number of elements.
        is_view: a contiguous tensor already is the wire, no copy is needed.
        lengths: elements of a row per rank, or None for the ceil cut.
    """

    outer: int
    row: int
    run: int
    world: int
    even: bool
    is_view: bool
    lengths: Ints | None = None

    @staticmethod
    def along(shape: Sequence[int], dim: int, world: int, sizes: Ints | None = None) -> "Plan":
        """The plan that cuts ``shape[dim]`` over ``world`` ranks; made once per argument set.

        Without ``sizes`` an uneven dim is cut as ``torch.chunk`` cuts it: 9 over 4 is 3, 3, 3, 0.

        Raises:
            ShapeError: no such dim, or sizes that do not add up to it.

        Example:
            ``Plan.along((2, 6), 1, 3)`` has outer 2, row 6, run 2, world 3.
        """
        return _along(tuple(shape), dim, world, sizes)


@lru_cache(maxsize=8192)
def _along(shape: Ints, dim: int, world: int, sizes: Ints | None) -> Plan:
    dim = _dim(shape, dim)
    inner = math.prod(shape[dim + 1 :])
    outer, row = math.prod(shape[:dim]), shape[dim] * inner
    if sizes is None:
        run = -(-shape[dim] // world) * inner
        even = run * world == row
        return Plan(outer, row, run, world, even, outer == 1 and even)
    if len(sizes) != world or sum(sizes) != shape[dim] or min(sizes, default=0) < 0:
        raise ShapeError(f"split sizes {list(sizes)} do not cut dim {dim} of size {shape[dim]} over {world} ranks")
    even = len(set(sizes)) <= 1
    return Plan(outer, row, max(sizes) * inner, world, even, outer == 1, tuple(size * inner for size in sizes))


def _dim(shape: Ints, dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim {dim} is out of range for shape {shape}")
    return dim % len(shape)


def chunk_sizes(size: int, world: int) -> Ints:
    """How ``torch.chunk`` cuts ``size`` over ``world`` ranks, empty pieces included: 9 over 4 is (3, 3, 3, 0)."""
    run = -(-size // world)
    return tuple(max(0, min(run, size - w * run)) for w in range(world))


def normalize_sizes(sizes: Any, name: str) -> Ints | None:
    """Split sizes as a tuple of ints; None stays None.

    Accepted are lists, tuples, numpy arrays and CPU tensors of integers.

    Raises:
        ArgumentError: anything else; a tensor on a device, because reading it would synchronise the device.
    """
    if sizes is None:
        return None
    if isinstance(sizes, torch.Tensor):
        if sizes.device.type != "cpu":
            raise ArgumentError(
                f"{name}: split sizes must be a list of ints or a CPU tensor, not a tensor on {sizes.device} "
                "(reading it would synchronise)"
            )
        sizes = sizes.tolist() if sizes.dim() == 1 else sizes
    try:
        return tuple(size if type(size) is int else size.__index__() for size in sizes)
    except (TypeError, AttributeError):
        raise ArgumentError(f"{name}: split sizes must be a list of ints, not {sizes!r}") from None


@lru_cache(maxsize=8192)
def wire_layout(shape: Ints, stride: Ints, dim: int, world: int) -> tuple[bool, tuple[Ints, Ints] | None]:
    """Whether the tensor is the wire as it lies; size and stride of an even cut in wire order, None when uneven.

    Wire order is ``[world, *shape[:dim], shape[dim]/world, *shape[dim+1:]]``.
    """
    dim = _dim(shape, dim)
    if shape[dim] % world:
        return False, None
    piece = shape[dim] // world
    layout = (world, *shape[:dim], piece, *shape[dim + 1 :]), (piece * stride[dim], *stride)
    return math.prod(shape[:dim]) == 1 and stride == _contiguous(shape, stride), layout


def _contiguous(shape: Ints, stride: Ints) -> Ints:
    """The strides of a contiguous tensor; dims of size 1, and empty tensors, keep theirs."""
    expected, step = list(stride), 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] != 1 and 0 not in shape:
            expected[i] = step
        step *= shape[i]
    return tuple(expected)


@lru_cache(maxsize=8192)
def joined_layout(shape: Ints, dim: int, world: int) -> tuple[Ints, Ints, Ints | None, int] | None:
    """Size and stride that read a contiguous even wire in the order of the joined tensor.

    The third value is the shape of the wire as one piece per rank where two dims still have to be merged, which copies;
    with one element per rank along ``dim`` there is nothing to merge, a reshape would only give a view, and it is None.
    The last is the elements of a row. None when the cut is uneven or nothing moves.
    """
    dim = _dim(shape, dim)
    each = shape[dim] // world
    if shape[dim] % world or world == 1 or math.prod(shape[:dim]) == 1:
        return None
    piece = (*shape[:dim], each, *shape[dim + 1 :])
    stride = [1] * len(piece)
    for i in range(len(piece) - 1, 0, -1):
        stride[i - 1] = stride[i] * piece[i]
    rank = stride[0] * piece[0]
    if each <= 1 or 0 in shape:
        return shape, (*stride[:dim], rank, *stride[dim + 1 :]), None, math.prod(shape[dim:])
    size, steps = (*piece[:dim], world, *piece[dim:]), (*stride[:dim], rank, *stride[dim:])
    return size, steps, (world, *piece), math.prod(shape[dim:])


@lru_cache(maxsize=8192)
def rows_layout(shape: Ints, stride: Ints, dim: int) -> tuple[Ints, Ints] | None:
    """Size and stride of a tensor seen as ``[*outer, row]`` with at most three outer dims; None when it cannot be."""
    dim %= len(shape)
    if 0 in shape:
        outer, row = math.prod(shape[:dim]), math.prod(shape[dim:])
        return (outer, row), (max(row, 1), 1)
    outer, row = _merged(shape[:dim], stride[:dim]), _merged(shape[dim:], stride[dim:])
    if len(outer) > 3 or len(row) > 1:
        return None
    dims = (outer or [(1, 0)]) + (row or [(1, 1)])
    return tuple(size for size, _ in dims), tuple(step for _, step in dims)


@lru_cache(maxsize=8192)
def unit_bytes(shape: Ints, stride: Ints | None, dim: int, world: int, sizes: Ints | None, itemsize: int) -> int:
    """Bytes per access with which a kernel copies between this tensor and its wire, both aligned to 16 bytes.

    Without strides the tensor is contiguous.
    """
    plan = Plan.along(shape, dim, world, sizes)
    layout = rows_layout(shape, stride, dim) if stride is not None else ((plan.outer, plan.row), (plan.row, 1))
    if layout is None:  # as rows of any length where the wire is the tensor in its own order
        any_rows = plan.outer == 1 and (plan.even or sizes is not None)
        return unit_bytes(shape, stride, -1, 1, None, itemsize) if any_rows else math.gcd(16, itemsize)
    size, step = layout
    if size[-1] > 1 and step[-1] != 1:
        return math.gcd(16, itemsize)
    cuts = plan.lengths or (plan.run, plan.outer * plan.run if world > 1 else 0)
    strides = [pitch for rows, pitch in zip(size[:-1], step[:-1], strict=True) if rows > 1]
    return math.gcd(16, *(itemsize * n for n in (plan.row, *cuts, *strides)))


def _merged(shape: Ints, stride: Ints) -> list[tuple[int, int]]:
    """Neighbouring dims that one stride can walk become one dim; dims of size 1 go away."""
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    return merged
