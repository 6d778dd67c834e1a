"""Address map of a split, in integers: where each element of a tensor lies in a buffer in rank order, the wire."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tritoncomm_kernels.geometry import coalesce

from tritoncomm.core.plan import Ints, check_split_sizes, normalize_dim

__all__ = ["AddressMap", "gathered_layout", "rows_layout", "unit_bytes", "wire_layout"]


@dataclass(frozen=True, slots=True)
class AddressMap:
    """``rows[o, w*run + k] <-> wire[w, o, k]`` where ``w*run + k < row``.

    ``outer = prod(shape[:dim])``, ``row = prod(shape[dim:])``,
    ``run = ceil(shape[dim] / world) * prod(shape[dim+1:])``.
    With explicit ``sizes`` the wire is flat and rank w's block ``[outer, lengths[w]]`` starts at ``outer*offsets[w]``.

    Attributes:
        outer: number of rows.
        row: number of elements of a row.
        run: number of elements of a row that go to one rank; with sizes, of the largest one.
        even: whether every rank gets the same number of elements.
        is_view: whether a contiguous tensor already is the wire, without a copy.
        lengths: number of elements of a row per rank; None where the dim is split as ``torch.chunk`` does.
    """

    outer: int
    row: int
    run: int
    world: int
    even: bool
    is_view: bool
    lengths: Ints | None = None

    @staticmethod
    def along(shape: Sequence[int], dim: int, world: int, sizes: Ints | None = None) -> "AddressMap":
        """Return the map that splits dim ``dim`` of a tensor of ``shape`` over ``world`` ranks.

        Example:
            ``AddressMap.along((2, 6), 1, 3)`` has outer 2, row 6, run 2, world 3.
        """
        # Sizes change from call to call: their maps would only evict the others. So __wrapped__ computes them past the
        # cache.
        return (_along if sizes is None else _along.__wrapped__)(tuple(shape), dim, world, sizes)


@lru_cache(maxsize=8192)
def _along(shape: Ints, dim: int, world: int, sizes: Ints | None) -> AddressMap:
    """Return the address map that ``AddressMap.along`` caches, for a shape that is a tuple."""
    dim = normalize_dim(shape, dim)
    inner = math.prod(shape[dim + 1 :])
    outer, row = math.prod(shape[:dim]), shape[dim] * inner
    if sizes is None:
        # The dim is split as torch.chunk does: 9 over 4 is 3, 3, 3, 0, and the last rank's part of the wire is padding.
        run = -(-shape[dim] // world) * inner
        even = run * world == row
        return AddressMap(outer, row, run, world, even, outer == 1 and even)
    check_split_sizes(shape, dim, world, sizes)
    even = len(set(sizes)) <= 1
    return AddressMap(outer, row, max(sizes) * inner, world, even, outer == 1, tuple(size * inner for size in sizes))


@lru_cache(maxsize=8192)
def wire_layout(shape: Ints, stride: Ints, dim: int, world: int) -> tuple[bool, tuple[Ints, Ints] | None]:
    """Return (whether the tensor already is the wire, layout of the wire) for an even split.

    The layout is a shape, ``[world, *shape[:dim], shape[dim]/world, *shape[dim+1:]]``, and strides that read the tensor
    in that order; None for an uneven split.
    """
    dim = normalize_dim(shape, dim)
    if shape[dim] % world:
        return False, None
    shard = shape[dim] // world
    layout = (world, *shape[:dim], shard, *shape[dim + 1 :]), (shard * stride[dim], *stride)
    rows = rows_layout(shape, stride, dim)
    return rows is not None and math.prod(rows[0][:-1]) == 1 and rows[1][-1] == 1, layout


@lru_cache(maxsize=8192)
def gathered_layout(shape: Ints, dim: int, world: int) -> tuple[Ints, Ints, Ints | None, int] | None:
    """Return (size, strides, shards, row): how to read a contiguous, even wire as a gathered tensor of ``shape``.

    None if the dim does not divide, or the wire already is in that order. ``size`` and ``strides`` are a view of the
    wire, and ``shards`` is ``[world, *shape of a shard]``. ``row`` is the elements of a row of the gathered tensor.
    """
    dim = normalize_dim(shape, dim)
    each = shape[dim] // world
    if shape[dim] % world or world == 1 or math.prod(shape[:dim]) == 1:
        return None
    shard = (*shape[:dim], each, *shape[dim + 1 :])
    stride = [1] * len(shard)
    for i in range(len(shard) - 1, 0, -1):
        stride[i - 1] = stride[i] * shard[i]
    rank = stride[0] * shard[0]
    # Each rank has one index of the dim, so no two dims of the view have to be merged: shards is None then.
    if each <= 1 or 0 in shape:
        return shape, (*stride[:dim], rank, *stride[dim + 1 :]), None, math.prod(shape[dim:])
    # The rank's dim stands before the shard's: the result is this view with both merged into one.
    size, steps = (*shard[:dim], world, *shard[dim:]), (*stride[:dim], rank, *stride[dim:])
    return size, steps, (world, *shard), math.prod(shape[dim:])


@lru_cache(maxsize=8192)
def rows_layout(shape: Ints, stride: Ints, dim: int) -> tuple[Ints, Ints] | None:
    """Return (size, strides) of a tensor viewed as ``[*outer, row]``, where ``row`` merges the dims from ``dim`` on.

    None if it would have more than three outer dims, or one stride cannot walk the row: no kernel reads it then.
    """
    dim %= len(shape)
    if 0 in shape:
        outer, row = math.prod(shape[:dim]), math.prod(shape[dim:])
        return (outer, row), (max(row, 1), 1)
    outer, row = coalesce(shape[:dim], stride[:dim]), coalesce(shape[dim:], stride[dim:])
    if len(outer[0]) > 3 or len(row[0]) > 1:
        return None
    return outer[0] + row[0], outer[1] + (row[1] if row[0] != (1,) else (1,))


def unit_bytes(shape: Ints, stride: Ints | None, dim: int, world: int, sizes: Ints | None, itemsize: int) -> int:
    """Return the bytes per access of a kernel that copies between a tensor and its wire, both aligned to 16 bytes.

    Args:
        stride: None for a contiguous tensor.
    """
    split = AddressMap.along(shape, dim, world, sizes)
    layout = ((split.outer, split.row), (split.row, 1)) if stride is None else rows_layout(shape, stride, dim)
    if layout is None:  # as rows of any length where the wire is the tensor in its own order
        any_rows = split.outer == 1 and (split.even or sizes is not None)
        if any_rows:
            return unit_bytes(shape, stride, -1, world=1, sizes=None, itemsize=itemsize)
        return math.gcd(16, itemsize)
    size, step = layout
    # Elements of a row that are apart are accessed one by one.
    if size[-1] > 1 and step[-1] != 1:
        return math.gcd(16, itemsize)
    # An access has to divide the rows and blocks of both sides, and every stride that is walked.
    blocks = split.lengths or (split.run, split.outer * split.run if world > 1 else 0)
    strides = [pitch for rows, pitch in zip(size[:-1], step[:-1], strict=True) if rows > 1]
    return math.gcd(16, *(itemsize * n for n in (split.row, *blocks, *strides)))
