"""The intersections of two layouts, and which rank sends each. Boxes are columns here: ``[dims, boxes]``."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tritoncomm.reshard.layout import Array, Layout

__all__ = ["Cells", "cells_between", "parts_of", "split_cells"]


@dataclass(frozen=True, slots=True)
class Cells:
    """Boxes of one tensor that go from a rank to a rank, in the order in which both sides enumerate them.

    Attributes:
        sender: position in the group, of every cell.
        receiver: position in the group.
        source: box of the source layout.
        target: box of the target layout.
        start, size: in the index space, ``[dims, cells]``.
        volume: elements.
    """

    sender: Array
    receiver: Array
    source: Array
    target: Array
    start: Array
    size: Array
    volume: Array


def cells_between(
    source: Layout,
    target: Layout,
    places: tuple[Array, Array],
    loads: Array,
    itemsize: int,
    every_replica: bool = False,
) -> Cells:
    """What has to move so that every rank of ``target`` has its boxes.

    A rank that has an element itself takes its own. Otherwise a replica sends it: those of a region share its requests
    by bytes, in the order of what they have to send so far.

    Args:
        source, target: layouts of one tensor.
        places: positions in the group of the ranks of both layouts.
        loads: bytes that every position of the group has to send as one of several replicas so far; updated.
        itemsize: bytes of an element.
        every_replica: each replica sends what it has, to be summed.
    """
    source_places = places[0][source.owner]
    region, into, start, size, volume = _intersections(source, target, not every_replica)
    receiver = places[1][target.owner][into]
    if every_replica:
        return Cells(source_places[region], receiver, region, into, start, size, volume)
    boxes = source.distinct.boxes
    if boxes.shape[1] <= 1:
        box = boxes.reshape(-1)[region]
        return Cells(source_places[box], receiver, box, into, start, size, volume)
    holders = np.where(boxes < 0, -1, source_places[boxes])
    choice = _choose(region, receiver, volume * itemsize, holders, source.distinct.replicas, loads)
    return Cells(holders[region, choice], receiver, boxes[region, choice], into, start, size, volume)


@lru_cache(maxsize=256)
def _intersections(source: Layout, target: Layout, is_distinct: bool) -> tuple[Array, Array, Array, Array, Array]:
    """Region (or box) of the source, box of the target, start, size and volume of every intersection."""
    owned = source.distinct if is_distinct else source
    ends, target_ends = owned.start + owned.size, target.start + target.size
    low = [np.maximum.outer(owned.start[:, dim], target.start[:, dim]) for dim in range(len(source.shape))]
    size = [np.minimum.outer(ends[:, dim], target_ends[:, dim]) - first for dim, first in enumerate(low)]
    overlaps = np.ones((len(owned.start), len(target.start)), bool)
    for extent in size:
        overlaps &= extent > 0
    region, into = np.nonzero(overlaps)
    start, extent = np.empty((2, len(low), len(region)), np.int64)
    for dim in range(len(low)):
        start[dim], extent[dim] = low[dim][overlaps], size[dim][overlaps]
    return region, into, start, extent, extent.prod(0)


def _choose(region: Array, receiver: Array, nbytes: Array, holders: Array, replicas: Array, loads: Array) -> Array:
    """Which replica sends every cell, as an index into the holders of its region."""
    own = holders[region] == receiver[:, None]
    choice = own.argmax(1)
    remote = np.nonzero(~own.any(1))[0]
    if not len(remote):
        return choice
    region, nbytes = region[remote], nbytes[remote]  # regions ascend
    requests = np.bincount(region, minlength=len(holders))
    totals = np.bincount(region, nbytes, len(holders)).astype(np.int64)
    before = np.cumsum(nbytes) - nbytes - (np.cumsum(totals) - totals)[region]
    slots = np.minimum(replicas, requests)[region]
    slot = (2 * before + nbytes) * slots // (2 * totals[region])
    by_load = np.argsort(np.where(holders < 0, np.iinfo(np.int64).max, loads[holders]), 1, kind="stable")
    choice[remote] = by_load[region, slot]
    loads += np.bincount(holders[region, choice[remote]], nbytes, len(loads)).astype(np.int64)
    return choice


def parts_of(size: Array, parts: int) -> tuple[Array, Array]:
    """Into how many slices along each dim boxes are divided to make that many parts.

    Args:
        size: of the boxes, ``[dims, boxes]``.
        parts: how many parts, at least.

    Returns:
        Slices along each dim, the longest dims first, and the elements of the largest part of every box.
    """
    slices, remaining = np.ones_like(size), np.full(size.shape[1], parts, np.int64)
    columns = np.arange(size.shape[1])
    for dim in np.argsort(-size, 0, kind="stable"):
        along = slices[dim, columns] = np.minimum(remaining, size[dim, columns])
        remaining = -(-remaining // along)
    return slices, -(-slices.prod(0) // parts) * (-(-size // slices)).prod(0)


def split_cells(start: Array, size: Array, parts: int) -> tuple[Array, Array, Array, Array]:
    """Boxes divided into parts: the box, the part, start and size of every slice; none is empty."""
    slices, _ = parts_of(size, parts)
    counts = slices.prod(0)
    box = np.repeat(np.arange(size.shape[1]), counts)
    index = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    part, rest = index * parts // counts[box], index
    low, extent = np.empty((2, len(size), len(box)), np.int64)
    for dim in reversed(range(len(size))):
        along, length = slices[dim, box], size[dim, box]
        rest, digit = np.divmod(rest, along)
        first, last = digit * length // along, (digit + 1) * length // along
        low[dim], extent[dim] = start[dim, box] + first, last - first
    return box, part, low, extent
