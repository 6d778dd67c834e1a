"""The address map in integers: where the elements of a tensor, split along one dim, are in a buffer in rank order."""

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
        row: elements of a row.
        run: elements of a row that go to one rank (the longest one when sizes are given).
        world: number of ranks.
        even: every rank gets the same number of elements.
        is_view: a contiguous tensor already is the wire, no copy is needed.
        lengths: elements of a row per rank, or None where the dim is split as ``torch.chunk`` does.
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
        """The map that splits ``shape[dim]`` over ``world`` ranks; made once per argument set.

        Without ``sizes`` an uneven dim is split as ``torch.chunk`` does: 9 over 4 is 3, 3, 3, 0.

        Raises:
            ShapeError: no such dim, or sizes that do not add up to it.

        Example:
            ``AddressMap.along((2, 6), 1, 3)`` has outer 2, row 6, run 2, world 3.
        """
        return _along(tuple(shape), dim, world, sizes)


@lru_cache(maxsize=8192)
def _along(shape: Ints, dim: int, world: int, sizes: Ints | None) -> AddressMap:
    dim = normalize_dim(shape, dim)
    inner = math.prod(shape[dim + 1 :])
    outer, row = math.prod(shape[:dim]), shape[dim] * inner
    if sizes is None:
        run = -(-shape[dim] // world) * inner
        even = run * world == row
        return AddressMap(outer, row, run, world, even, outer == 1 and even)
    check_split_sizes(shape, dim, world, sizes)
    even = len(set(sizes)) <= 1
    return AddressMap(outer, row, max(sizes) * inner, world, even, outer == 1, tuple(size * inner for size in sizes))


@lru_cache(maxsize=8192)
def wire_layout(shape: Ints, stride: Ints, dim: int, world: int) -> tuple[bool, tuple[Ints, Ints] | None]:
    """Whether the tensor is in rank order already; size and stride that read it in rank order, None when uneven.

    Wire order is ``[world, *shape[:dim], shape[dim]/world, *shape[dim+1:]]``.
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
    """Size and stride that read a contiguous even wire in the order of the gathered tensor.

    The third value is the shape of the wire as one shard per rank where two dims still have to be merged, which copies;
    with one element per rank along ``dim`` there is nothing to merge, a reshape would only give a view, and it is None.
    The last is the elements of a row. None when the split is uneven or nothing moves.
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
    if each <= 1 or 0 in shape:
        return shape, (*stride[:dim], rank, *stride[dim + 1 :]), None, math.prod(shape[dim:])
    size, steps = (*shard[:dim], world, *shard[dim:]), (*stride[:dim], rank, *stride[dim:])
    return size, steps, (world, *shard), math.prod(shape[dim:])


@lru_cache(maxsize=8192)
def rows_layout(shape: Ints, stride: Ints, dim: int) -> tuple[Ints, Ints] | None:
    """Size and stride of a tensor seen as ``[*outer, row]`` with at most three outer dims; None when it cannot be."""
    dim %= len(shape)
    if 0 in shape:
        outer, row = math.prod(shape[:dim]), math.prod(shape[dim:])
        return (outer, row), (max(row, 1), 1)
    outer, row = coalesce(shape[:dim], stride[:dim]), coalesce(shape[dim:], stride[dim:])
    if len(outer[0]) > 3 or len(row[0]) > 1:
        return None
    return outer[0] + row[0], outer[1] + (row[1] if row[0] != (1,) else (1,))


@lru_cache(maxsize=8192)
def unit_bytes(shape: Ints, stride: Ints | None, dim: int, world: int, sizes: Ints | None, itemsize: int) -> int:
    """Bytes per access with which a kernel copies between this tensor and its wire, both aligned to 16 bytes.

    Without strides the tensor is contiguous.
    """
    split = AddressMap.along(shape, dim, world, sizes)
    layout = ((split.outer, split.row), (split.row, 1)) if stride is None else rows_layout(shape, stride, dim)
    if layout is None:  # as rows of any length where the wire is the tensor in its own order
        any_rows = split.outer == 1 and (split.even or sizes is not None)
        return unit_bytes(shape, stride, -1, 1, None, itemsize) if any_rows else math.gcd(16, itemsize)
    size, step = layout
    if size[-1] > 1 and step[-1] != 1:
        return math.gcd(16, itemsize)
    blocks = split.lengths or (split.run, split.outer * split.run if world > 1 else 0)
    strides = [pitch for rows, pitch in zip(size[:-1], step[:-1], strict=True) if rows > 1]
    return math.gcd(16, *(itemsize * n for n in (split.row, *blocks, *strides)))
