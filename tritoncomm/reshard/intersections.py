"""Intersections of boxes with many others, found by a sorted index, and the parts into which blocks are cut."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tritoncomm.reshard.boxes import Array, range_boxes

__all__ = ["BoxIndex", "Meeting", "first_of_part", "most_of_a_part", "split_into_parts"]

_UNIT = 16  # elements; a multiple of them is a multiple of 16 bytes
_FINE = 64  # units of a part from which parts are whole units: rounding adds at most a 64th to a part


class Meeting(NamedTuple):
    """Pairs of boxes that share an element.

    Attributes:
        one, other: the boxes of every pair.
        low, size: first index and extent of the box that the two share, ``[dims, pairs]``.
    """

    one: Array
    other: Array
    low: Array
    size: Array

    @property
    def volume(self) -> Array:
        """Number of elements that the two boxes of every pair share."""
        return self.size.prod(0)


class BoxIndex:
    """Boxes ``[boxes, dims]`` sorted by their starts along every dim, to find the ones that meet some other boxes."""

    def __init__(self, start: Array, size: Array) -> None:
        self._start, self._end = start, start + size

    @cached_property
    def _sorted(self) -> list[tuple[Array, Array, Array]]:
        """Per dim: the boxes in the order of their starts, those starts, and the largest end so far."""
        columns = zip(self._start.T, self._end.T, strict=True)
        orders = [(np.argsort(low, kind="stable"), low, high) for low, high in columns]
        # The running maximum of the ends ascends although the ends of boxes with ascending starts need not.
        return [(order, low[order], np.maximum.accumulate(high[order])) for order, low, high in orders]

    def candidates(self, start: Array, size: Array) -> list[tuple[Array, Array]]:
        """Return per dim the stretch of sorted boxes that may meet each of some boxes: its first place, its length."""
        result = []
        for (_, lows, highs), low, extent in zip(self._sorted, start.T, size.T, strict=True):
            # Boxes before ``first`` end at ``low`` or before it; boxes from ``last`` on start behind the box.
            first = np.searchsorted(highs, low, "right")
            last = np.searchsorted(lows, low + extent, "left")
            result.append((first, np.maximum(last - first, 0)))
        return result

    def meeting(self, start: Array, size: Array) -> Meeting:
        """Return the pairs of some boxes, ``[boxes, dims]``, with the boxes of the index that they meet."""
        if not start.shape[1]:  # tensors of one element
            one, other = (each.reshape(-1) for each in np.indices((len(start), len(self._start))))
            return Meeting(one, other, *np.empty((2, 0, len(one)), np.int64))
        # Candidates are listed along the dim with the fewest of them; pairs that are apart along another dim are
        # dropped.
        sides = zip(self._sorted, self.candidates(start, size), strict=True)
        (order, _, _), (first, counts) = min(sides, key=_number_of_pairs)
        # Each box meets ``counts`` boxes of ``order`` from ``first`` on, so far as this dim tells.
        one = np.repeat(np.arange(len(start)), counts)
        place_in_run = np.arange(len(one)) - np.repeat(np.cumsum(counts) - counts, counts)
        other = order[np.repeat(first, counts) + place_in_run]
        low = np.maximum(start[one], self._start[other])
        extent = np.minimum((start + size)[one], self._end[other]) - low
        meets = np.nonzero((extent > 0).all(1))[0]
        return Meeting(one[meets], other[meets], low[meets].T, extent[meets].T)


def first_of_part(volume: Array, parts: int, part: Array | int) -> Array:
    """Return the first element of a part of blocks that have ``volume`` elements; for part ``parts`` their end."""
    # Parts of many elements are whole units, and the last one has the rest.
    unit = np.where(volume >= _UNIT * _FINE * parts, _UNIT, 1)
    return np.where(part == parts, volume, volume // unit * part // parts * unit)


def most_of_a_part(volume: Array, parts: int) -> Array:
    """Return the most elements that one of ``parts`` parts has of each block."""
    unit = np.where(volume >= _UNIT * _FINE * parts, _UNIT, 1)
    return np.minimum(volume, -(-(volume // unit) // parts) * unit + volume % unit)


def split_into_parts(start: Array, size: Array, parts: int) -> tuple[Array, Array, Array, Array]:
    """Cut blocks into ``parts`` ranges of their elements in row-major order, each of as many elements as the others.

    Returns:
        For every piece, which is a box: its block, its part, its first index and its extent.
    """
    block, part = (each.reshape(-1) for each in np.indices((size.shape[1], parts)))
    volume = size.prod(0)[block]
    first, end = first_of_part(volume, parts, part), first_of_part(volume, parts, part + 1)
    piece, low, extent = range_boxes(size[:, block], first, end)
    return block[piece], part[piece], start[:, block[piece]] + low, extent


def _number_of_pairs(side: tuple[Any, tuple[Array, Array]]) -> int:
    """Return the pairs of boxes that may meet along a dim; see ``BoxIndex.candidates``."""
    _, (_, counts) = side
    return int(counts.sum())
