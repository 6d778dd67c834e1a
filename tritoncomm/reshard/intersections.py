"""The intersections of two layouts, and which rank sends each. Boxes are columns here: ``[dims, boxes]``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritoncomm.reshard.layout import Array, Layout

__all__ = ["Cells", "Ends", "cells_between", "parts_of", "split_cells"]

_DENSE = 2**17
"""Pairs of boxes up to which all are looked at, if the boxes are not those of meshes."""


class Ends:
    """Which rank sends every cell and which one gets it; tensors of layouts over the same ranks share one.

    Attributes:
        sender, receiver: positions in the group.
    """

    def __init__(self, sender: Array, receiver: Array) -> None:
        self.sender, self.receiver = sender, receiver

    @cached_property
    def is_remote(self) -> NDArray[np.bool_]:
        """Whether a cell goes to another rank."""
        return self.sender != self.receiver

    @cached_property
    def remote(self) -> Array:
        """Indices of those."""
        return np.nonzero(self.is_remote)[0]

    def pairs(self, world: int) -> Array:
        """The pair of ranks of every remote cell, as a number."""
        return self._cached("pairs", lambda: self.sender[self.remote] * world + self.receiver[self.remote])

    def of_rank(self, position: int) -> Array:
        """Indices of the cells that a rank sends, gets or keeps."""
        return self._cached("of_rank", lambda: np.nonzero((self.sender == position) | (self.receiver == position))[0])

    def _cached(self, name: str, make: Callable[[], Array]) -> Array:
        """For one group and rank, which all tensors of a plan have in common."""
        made = self.__dict__.get(f"_{name}")
        if made is None:
            made = self.__dict__[f"_{name}"] = make()
        return made


@dataclass(frozen=True, slots=True)
class Cells:
    """Boxes of one tensor that go from a rank to a rank, in the order in which both sides enumerate them.

    Attributes:
        ends: the ranks of every cell.
        source: box of the source layout.
        target: box of the target layout.
        grid: where the cells are.
    """

    ends: Ends
    source: Array
    target: Array
    grid: "Intersections | Listed"


@dataclass(frozen=True, slots=True)
class Intersections:
    """The parts that boxes of two layouts have in common.

    Attributes:
        region: box (or region without its replicas) of the source, of every cell.
        into: box of the target.
        volume: elements.
        low, size: first index and extent for every dim, by box of the source and of the target; an axis of one where
            the layout does not shard the dim.
    """

    region: Array
    into: Array
    volume: Array
    low: tuple[Array, ...]
    size: tuple[Array, ...]

    def boxes(self, index: Array) -> tuple[Array, Array]:
        """Start and size of some cells in the index space, ``[dims, cells]``."""
        region, into = self.region[index], self.into[index]
        start, size = np.empty((2, len(self.low), len(index)), np.int64)
        for dim, (low, extent) in enumerate(zip(self.low, self.size, strict=True)):
            at = region if low.shape[0] > 1 else 0, into if low.shape[1] > 1 else 0
            start[dim], size[dim] = low[at], extent[at]
        return start, size


@dataclass(frozen=True, slots=True)
class Listed:
    """The same of layouts with many boxes, of which few meet.

    Attributes:
        region, into, volume: as there.
        start, size: of every cell, ``[dims, cells]``.
    """

    region: Array
    into: Array
    volume: Array
    start: Array
    size: Array

    def boxes(self, index: Array) -> tuple[Array, Array]:
        """Start and size of some cells in the index space."""
        return self.start[:, index], self.size[:, index]


def cells_between(
    source: Layout,
    target: Layout,
    places: tuple[Array, Array],
    loads: Array,
    itemsize: int,
    known: dict[Any, tuple[Ends, Array]],
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
        known: the ranks of cells, kept from tensor to tensor of a plan.
        every_replica: each replica sends what it has, to be summed.
    """
    source_places = places[0][source.owner]
    pairs = len(source.owner) * len(target.owner)
    is_large = pairs > _DENSE and not (source.axes and target.axes)  # most boxes of two meshes meet
    grid = (_listed if is_large else _intersections)(source, target, not every_replica)
    region, into = grid.region, grid.into
    boxes = source.distinct.boxes
    if every_replica or boxes.shape[1] <= 1:
        # Shards of meshes over the same ranks that all meet have the same ranks for every tensor.
        every = pairs == len(region) and source.axes and target.axes
        key = source.ranks, target.ranks
        if every and key in known:
            return Cells(known[key][0], known[key][1], into, grid)
        box = region if every_replica else boxes.reshape(-1)[region]
        ends = Ends(source_places[box], places[1][target.owner][into])
        if every:
            known[key] = ends, box
        return Cells(ends, box, into, grid)
    receiver = places[1][target.owner][into]
    holders = np.where(boxes < 0, -1, source_places[boxes])
    choice = _choose(region, receiver, grid.volume * itemsize, holders, source.distinct.replicas, loads)
    return Cells(Ends(holders[region, choice], receiver), boxes[region, choice], into, grid)


@lru_cache(maxsize=256)
def _intersections(source: Layout, target: Layout, is_distinct: bool) -> Intersections:
    owned = source.distinct if is_distinct else source
    shape = len(owned.start), len(target.start)
    overlaps, volume = np.ones(shape, bool), np.ones(shape, np.int64)
    lows, sizes = [], []
    for dim, (a, b) in enumerate(zip(source.sharded, target.sharded, strict=True)):
        rows, columns = slice(None if a else 1), slice(None if b else 1)
        first, other = owned.start[rows, dim, None], target.start[None, columns, dim]
        low = np.maximum(first, other)
        size = np.minimum(first + owned.size[rows, dim, None], other + target.size[None, columns, dim]) - low
        overlaps &= size > 0
        volume *= size
        lows.append(low)
        sizes.append(size)
    if overlaps.all():  # as between shards of two dims
        region, into = _every_pair(*shape)
        volume = volume.reshape(-1)
    else:
        region, into = np.nonzero(overlaps)
        volume = volume[overlaps]
    return Intersections(region, into, volume, tuple(lows), tuple(sizes))


@lru_cache(maxsize=8)
def _listed(source: Layout, target: Layout, is_distinct: bool) -> Listed:
    """Of the pairs of boxes that meet along one dim, the one along which the fewest do, those that meet along all."""
    owned = source.distinct if is_distinct else source
    ends = owned.start + owned.size, target.start + target.size
    sides = [
        _meeting(owned.start[:, dim], ends[0][:, dim], target.start[:, dim], ends[1][:, dim])
        for dim in range(len(source.shape))
    ]
    order, first, counts = min(sides, key=lambda side: int(side[2].sum()))
    into = np.repeat(np.arange(len(target.owner)), counts)
    region = order[np.arange(len(into)) - np.repeat(np.cumsum(counts) - counts - first, counts)]
    low = np.maximum(owned.start[region], target.start[into])
    size = np.minimum(ends[0][region], ends[1][into]) - low
    meets = np.nonzero((size > 0).all(1))[0]
    meets = meets[np.lexsort((into[meets], region[meets]))]
    size = np.ascontiguousarray(size[meets].T)
    return Listed(region[meets], into[meets], size.prod(0), np.ascontiguousarray(low[meets].T), size)


def _meeting(low: Array, high: Array, other_low: Array, other_high: Array) -> tuple[Array, Array, Array]:
    """Intervals in the order of their starts, and for every other one the first of them that may meet it, and how many.

    None that does is left out; of those that start before it ends, intervals in between may end before it starts.
    """
    order = np.argsort(low, kind="stable")
    first = np.searchsorted(np.maximum.accumulate(high[order]), other_low, "right")
    last = np.searchsorted(low[order], other_high, "left")
    return order, first, np.maximum(last - first, 0)


@lru_cache(maxsize=16)
def _every_pair(regions: int, boxes: int) -> tuple[Array, Array]:
    """Indices of both, the second one fastest."""
    region, into = (each.flatten() for each in np.indices((regions, boxes), np.int64))
    return region, into


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
