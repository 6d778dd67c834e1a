"""The elements of a contiguous tensor that a strided view selects, dim by dim, and their intersection with a shard."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Box", "box_of"]

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a view as an arithmetic progression along every dim of its base.

    Attributes:
        ranges: (start, count, step) of every dim of the base.
        dims: the base's dim of every dim of the view; None where the view has size 1.

    Example:
        ``x[1::2, 3]`` of a tensor ``[8, 4]`` has the ranges (1, 4, 2) and (3, 1, 1), and the dims (0,).
    """

    ranges: tuple[tuple[int, int, int], ...]
    dims: tuple[int | None, ...]

    def within(self, shard: Sequence[tuple[int, int, int]]) -> tuple["Box", Slices] | None:
        """The intersection with a shard, relative to its start, and its place in the view; None if it is empty.

        Args:
            shard: (dim, start, size) of every sharded dim of the base.
        """
        ranges, sliced = list(self.ranges), {}
        for dim, begin, size in shard:
            start, count, step = ranges[dim]
            first = max(0, -((start - begin) // step))  # rounded up
            last = min(count, -((start - begin - size) // step))
            if first >= last:
                return None
            ranges[dim] = (start + first * step - begin, last - first, step)
            sliced[dim] = slice(first, last)
        slices = tuple(slice(None) if dim is None else sliced.get(dim, slice(None)) for dim in self.dims)
        return Box(tuple(ranges), self.dims), slices

    def select(self, base: Tensor) -> Tensor:
        """The elements as a view of ``base``, with the dims of the view in their order."""
        index = tuple(
            slice(start, start + (count - 1) * step + 1, step) if dim in self.dims else start
            for dim, (start, count, step) in enumerate(self.ranges)
        )
        dims = [dim for dim in self.dims if dim is not None]
        selected = base[index].permute([sorted(dims).index(dim) for dim in dims])
        return selected[tuple(None if dim is None else slice(None) for dim in self.dims)]


def box_of(shape: Sequence[int], view: Tensor, offset: int = 0) -> Box | None:
    """How a view indexes a contiguous base of this shape: by integers and slices, its dims in any order.

    None for a view of no elements, or one with merged, repeated or diagonal dims.

    Args:
        shape: of the base.
        view: only its sizes and strides are read.
        offset: of the base in its storage.
    """
    if not view.numel():
        return None
    strides, remainder = torch.empty(shape, device="meta").stride(), int(view.storage_offset()) - offset
    starts: list[int] = []
    for stride in strides:
        start, remainder = divmod(remainder, stride)
        starts.append(start)
    ranges = [(start, 1, 1) for start in starts]
    dims: list[int | None] = []
    for count, stride in zip(view.shape, view.stride(), strict=True):
        dim = None if count == 1 else _base_dim(shape, strides, ranges, count, stride)
        if count > 1 and (dim is None or dim in dims):
            return None
        if dim is not None:
            ranges[dim] = (starts[dim], count, stride // strides[dim])
        dims.append(dim)
    return Box(tuple(ranges), tuple(dims))


def _base_dim(
    shape: Sequence[int], strides: Sequence[int], ranges: Sequence[tuple[int, int, int]], count: int, stride: int
) -> int | None:
    """The dim of the base along which a dim of the view steps within bounds; at most one exists."""
    for dim, (size, unit) in enumerate(zip(shape, strides, strict=True)):
        step, rest = divmod(stride, unit)
        if step and not rest and ranges[dim][0] + step * (count - 1) < size:
            return dim
    return None
