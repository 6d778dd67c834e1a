"""The address map of one call in integers, checked: shared by pack and unpack on every path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Ints = tuple[int, ...]
MAX_PARTS = 64


class TooLargeError(ValueError):
    """More units than the kernels' 32-bit integers can count; plain torch has no such limit."""


@dataclass(frozen=True)
class Geometry:
    """``rows[o, starts[w] + k] <-> block w of the wire[o, k]``; all numbers in elements.

    Attributes:
        outer: number of rows.
        row: elements of a row.
        run: elements of a row that go to one rank (0 when sizes are given).
        world: number of ranks.
        starts: where each rank's part of a row starts, and the end of the row; None without sizes.
        dims: sizes of the outer dims after neighbours that one stride can walk were coalesced; at least one.
        strides: their strides.
        stride_element: stride inside a row.
        stride_rank: stride between ranks (0 when sizes are given).
        cells: elements of the wire.
    """

    outer: int
    row: int
    run: int
    world: int
    starts: Ints | None
    dims: Ints
    strides: Ints
    stride_element: int
    stride_rank: int
    cells: int


@lru_cache(maxsize=4096)
def geometry_of(
    name: str, shape: Ints, stride: Ints, wire_shape: Ints, wire_stride: Ints, sizes: Ints | None, target: str
) -> Geometry:
    """Check that rows and wire describe one split and return it; ``target`` names the side that is written.

    Raises:
        ValueError: the shapes do not describe one split, a block of the wire is not contiguous, or the target
            overlaps itself.
    """
    if not shape:
        raise ValueError(f"{name}: rows must have a dim")
    outer, row = math.prod(shape[:-1]), shape[-1]
    if sizes is None:
        world, run, starts = *_even(name, outer, row, wire_shape, wire_stride, target), None
        stride_rank = wire_stride[0] if world > 1 else 0
    else:
        world, run, stride_rank = len(sizes), 0, 0
        starts = _uneven(name, outer, row, wire_shape, wire_stride, sizes)
    if target == "rows" and any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)):
        raise ValueError(f"{name}: rows {tuple(shape)} with strides {stride} overlap and cannot be written")
    dims, strides = coalesce(shape[:-1], stride[:-1])
    step = stride[-1] if row > 1 else 1
    return Geometry(outer, row, run, world, starts, dims, strides, step, stride_rank, math.prod(wire_shape))


def _even(name: str, outer: int, row: int, shape: Ints, stride: Ints, target: str) -> tuple[int, int]:
    if len(shape) != 3 or shape[0] < 1 or shape[1] != outer or shape[0] * shape[2] < row:
        raise ValueError(f"{name}: wire {tuple(shape)} is no [world, outer, run] for {outer} rows of {row} elements")
    world, _, run = shape
    if (run > 1 and stride[2] != 1) or (outer > 1 and run and stride[1] != run):
        raise ValueError(f"{name}: every [outer, run] block of wire must be contiguous, not {tuple(shape)} by {stride}")
    if target == "wire" and world > 1 and outer and stride[0] < outer * run:
        raise ValueError(f"{name}: ranks {stride[0]} elements apart overlap in wire {tuple(shape)}")
    return world, run


def _uneven(name: str, outer: int, row: int, shape: Ints, stride: Ints, sizes: Ints) -> Ints:
    if not sizes or min(sizes) < 0 or sum(sizes) != row:
        raise ValueError(f"{name}: sizes {list(sizes)} do not add up to rows of {row} elements")
    if len(shape) != 1 or shape[0] != outer * row or (shape[0] > 1 and stride[0] != 1):
        raise ValueError(f"{name}: wire with sizes must be flat and contiguous with {outer}*{row} elements")
    return tuple(accumulate(sizes, initial=0))


def coalesce(shape: Sequence[int], stride: Sequence[int]) -> tuple[Ints, Ints]:
    """Coalesce neighbouring dims that one stride can walk; at least one dim remains.

    Example:
        shape (2, 3, 4) by (36, 12, 1) gives (6, 4) by (12, 1).
    """
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, 0)]
    return tuple(size for size, _ in merged), tuple(step for _, step in merged)


def check_parts(shape: Ints, stride: Ints, out_shape: Ints, out_stride: Ints) -> None:
    """Raise ValueError unless the shapes are ``[world, n]`` and ``[n]`` with contiguous parts."""
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_PARTS or tuple(out_shape) != (shape[1],):
        raise ValueError(f"reduce: wire {tuple(shape)} is no [1..{MAX_PARTS}, n] for out {tuple(out_shape)}")
    if shape[1] > 1 and (stride[1] != 1 or out_stride[0] != 1):
        raise ValueError(
            f"reduce: the parts of wire and out must be contiguous, not strided by {stride} and {out_stride}"
        )
