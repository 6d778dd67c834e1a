"""Intersections of two layouts of one tensor, and the route of each: the rank that sends it and the one that gets it.

Here boxes are columns of an array, ``[dims, boxes]``.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.layout import Layout

__all__ = ["Intersections", "ListedIntersections", "Routes", "part_counts", "routes_between", "split_into_parts"]

_DENSE = 2**17  # pairs of boxes up to which all pairs are compared


@dataclass(frozen=True, slots=True)
class Intersections:
    """The boxes that regions of a source layout share with boxes of a target layout, found by comparing all pairs.

    Attributes:
        region: source region of every intersection (source box, if replicas were not merged); ascending.
        target: target box of every intersection.
        volume: number of elements of every intersection.
        low, size: per dim, first index and extent of the intersection of every pair, ``[regions, targets]``; an axis of
            size 1 where the layout does not shard the dim.
    """

    region: Array
    target: Array
    volume: Array
    low: tuple[Array, ...]
    size: tuple[Array, ...]

    def boxes(self, index: Array) -> tuple[Array, Array]:
        """Return the boxes of some intersections: first indices and extents, each ``[dims, intersections]``.

        Args:
            index: numbers of the intersections.
        """
        region, target = self.region[index], self.target[index]
        start, size = np.empty((2, len(self.low), len(index)), np.int64)
        for dim, (low, extent) in enumerate(zip(self.low, self.size, strict=True)):
            pair = region if low.shape[0] > 1 else 0, target if low.shape[1] > 1 else 0
            start[dim], size[dim] = low[pair], extent[pair]
        return start, size


@dataclass(frozen=True, slots=True)
class ListedIntersections:
    """The boxes that regions of a source layout share with boxes of a target layout, where few of many pairs meet.

    Attributes:
        region, target, volume: as those of ``Intersections``.
        start, size: first index and extent of every intersection, ``[dims, intersections]``.
    """

    region: Array
    target: Array
    volume: Array
    start: Array
    size: Array

    def boxes(self, index: Array) -> tuple[Array, Array]:
        """Return the boxes of some intersections: first indices and extents, each ``[dims, intersections]``.

        Args:
            index: numbers of the intersections.
        """
        return self.start[:, index], self.size[:, index]


@dataclass(frozen=True, slots=True)
class Routes:
    """Sender and receiver of every intersection of one tensor; all ranks enumerate the intersections alike.

    Attributes:
        sender, receiver: position in the group of the rank that sends an intersection, and of the one that gets it.
        source: the sender's source box of every intersection.
        intersections: the intersections themselves.
    """

    sender: Array
    receiver: Array
    source: Array
    intersections: Intersections | ListedIntersections


def routes_between(
    source: Layout, target: Layout, positions: tuple[Array, Array], loads: Array, itemsize: int, every_replica: bool
) -> Routes:
    """Choose a sender for every element that a rank of ``target`` needs, so that each rank gets its target boxes.

    A rank that owns an element in ``source`` keeps it. Otherwise one replica sends it: the replicas of a region share
    the region's bytes evenly, those with the least load so far first.

    Args:
        source, target: layouts of one tensor.
        positions: position in the group of every rank of the source layout, and of the target layout.
        loads: bytes that every position of the group sends as one of several replicas; increased by this tensor's.
        itemsize: bytes of an element.
        every_replica: each replica sends its elements to every receiver, so that the receivers sum them up.

    Returns:
        Sender and receiver of every intersection; both are the same rank if the element stays.
    """
    holders, receivers = positions[0][source.owner], positions[1][target.owner]
    is_large = len(holders) * len(receivers) > _DENSE
    meeting = (_sparse_intersections if is_large else _dense_intersections)(source, target, not every_replica)
    receiver = receivers[meeting.target]
    if every_replica:
        return Routes(holders[meeting.region], receiver, meeting.region, meeting)
    regions = source.regions
    if regions.boxes.shape[1] <= 1:  # no replicas: nothing to choose, no load to balance
        box = regions.boxes.reshape(-1)[meeting.region]
        return Routes(holders[box], receiver, box, meeting)
    candidates = np.where(regions.boxes < 0, -1, holders[regions.boxes])
    nbytes = meeting.volume * itemsize
    choice = _chosen_replicas(meeting.region, receiver, nbytes, candidates, regions.replicas, loads)
    return Routes(candidates[meeting.region, choice], receiver, regions.boxes[meeting.region, choice], meeting)


@lru_cache(maxsize=256)  # the layers of a model repeat a few pairs of layouts
def _dense_intersections(source: Layout, target: Layout, is_distinct: bool) -> Intersections:
    """Intersect the source boxes of a tensor with its target boxes, by a comparison of all pairs; cached.

    Args:
        source, target: layouts of the tensor.
        is_distinct: merge equal source boxes into one region first.

    Returns:
        The pairs that share an element, by source and then by target, with the boxes that they share.
    """
    owned = source.regions if is_distinct else source
    shape = len(owned.start), len(target.start)
    meets, volume = np.ones(shape, bool), np.ones(shape, np.int64)
    lows, sizes = [], []
    for dim, (a, b) in enumerate(zip(source.sharded, target.sharded, strict=True)):
        # All boxes have the full extent of a dim that is not sharded: one of them stands for all.
        rows, columns = slice(None if a else 1), slice(None if b else 1)
        first, other = owned.start[rows, dim, None], target.start[None, columns, dim]
        low = np.maximum(first, other)
        size = np.minimum(first + owned.size[rows, dim, None], other + target.size[None, columns, dim]) - low
        meets &= size > 0
        volume *= size
        lows.append(low)
        sizes.append(size)
    region, box = np.nonzero(meets)
    return Intersections(region, box, volume[meets], tuple(lows), tuple(sizes))


@lru_cache(maxsize=8)
def _sparse_intersections(source: Layout, target: Layout, is_distinct: bool) -> ListedIntersections:
    """Intersect many source boxes of a tensor with its target boxes, without a comparison of all pairs; cached.

    Pairs that meet along one dim are listed first, along the dim with the fewest of them; pairs that do not meet along
    the other dims are dropped.

    Args:
        source, target: layouts of the tensor.
        is_distinct: merge equal source boxes into one region first.

    Returns:
        The pairs that share an element, by source and then by target, with the boxes that they share.
    """
    owned = source.regions if is_distinct else source
    ends = owned.start + owned.size, target.start + target.size
    sides = [
        _candidates(owned.start[:, dim], ends[0][:, dim], target.start[:, dim], ends[1][:, dim])
        for dim in range(len(source.shape))
    ]
    order, first, counts = min(sides, key=lambda side: int(side[2].sum()))
    box = np.repeat(np.arange(len(target.owner)), counts)
    region = order[np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts - first, counts)]
    low = np.maximum(owned.start[region], target.start[box])
    size = np.minimum(ends[0][region], ends[1][box]) - low
    meets = np.nonzero((size > 0).all(1))[0]
    meets = meets[np.lexsort((box[meets], region[meets]))]
    size = np.ascontiguousarray(size[meets].T)
    return ListedIntersections(region[meets], box[meets], size.prod(0), np.ascontiguousarray(low[meets].T), size)


def _candidates(low: Array, high: Array, other_low: Array, other_high: Array) -> tuple[Array, Array, Array]:
    """List intervals that may meet each of some other intervals; no interval that meets one is left out.

    Args:
        low, high: start and end of the intervals.
        other_low, other_high: start and end of the other intervals.

    Returns:
        The intervals sorted by start; and for each other interval its candidates in that order: the place of the first
        candidate, and their number. A candidate in between may end before the other interval starts.
    """
    order = np.argsort(low, kind="stable")
    # The running maximum of the ends ascends although the ends of intervals with ascending starts need not.
    first = np.searchsorted(np.maximum.accumulate(high[order]), other_low, "right")
    last = np.searchsorted(low[order], other_high, "left")
    return order, first, np.maximum(last - first, 0)


def _chosen_replicas(
    region: Array, receiver: Array, nbytes: Array, holders: Array, replicas: Array, loads: Array
) -> Array:
    """Choose the replica that sends each intersection: the receiver's own, else replicas in turn by their loads.

    Args:
        region: region of every intersection, ascending.
        receiver: position in the group of every intersection's receiver.
        nbytes: bytes of every intersection.
        holders: positions of the ranks that hold each region, ``[regions, most]``, padded with -1.
        replicas: number of ranks that hold each region.
        loads: bytes that every position of the group sends so far; increased by the chosen bytes.

    Returns:
        For every intersection, a column of ``holders``.
    """
    own = holders[region] == receiver[:, None]
    choice = own.argmax(1)
    remote = np.nonzero(~own.any(1))[0]
    if not len(remote):
        return choice
    region, nbytes = region[remote], nbytes[remote]
    requests = np.bincount(region, minlength=len(holders))
    totals = np.bincount(region, nbytes, len(holders)).astype(np.int64)
    before = np.cumsum(nbytes) - nbytes - (np.cumsum(totals) - totals)[region]
    # Each replica sends an equal stretch of its region's requested bytes; a request counts where its middle lies.
    slots = np.minimum(replicas, requests)[region]
    slot = (2 * before + nbytes) * slots // (2 * totals[region])
    by_load = np.argsort(np.where(holders < 0, np.iinfo(np.int64).max, loads[holders]), 1, kind="stable")
    choice[remote] = by_load[region, slot]
    loads += np.bincount(holders[region, choice[remote]], nbytes, len(loads)).astype(np.int64)
    return choice


def part_counts(size: Array, parts: int) -> tuple[Array, Array]:
    """Return the number of slices along each dim that cuts boxes into at least ``parts`` pieces, longest dims first.

    Args:
        size: extents of the boxes, ``[dims, boxes]``.
        parts: number of pieces wanted of every box; a box of fewer elements has a piece per element.

    Returns:
        The slices along each dim of every box, ``[dims, boxes]``; and for every box the most elements in one of
        ``parts`` groups of consecutive pieces.
    """
    # Longest dims first: slices of a long dim leave the longest rows to copy.
    slices, remaining = np.ones_like(size), np.full(size.shape[1], parts, np.int64)
    columns = np.arange(size.shape[1])
    for dim in np.argsort(-size, 0, kind="stable"):
        along = slices[dim, columns] = np.minimum(remaining, size[dim, columns])
        remaining = -(-remaining // along)
    return slices, -(-slices.prod(0) // parts) * (-(-size // slices)).prod(0)


def split_into_parts(start: Array, size: Array, parts: int) -> tuple[Array, Array, Array, Array]:
    """Cut boxes into pieces by ``part_counts`` and deal each box's pieces to parts 0 to ``parts - 1`` in order.

    Args:
        start, size: first index and extent of the boxes, ``[dims, boxes]``.
        parts: number of parts.

    Returns:
        For every piece, none of which is empty: its box, its part, its first index and its extent.
    """
    slices, _ = part_counts(size, parts)
    counts = slices.prod(0)
    box = np.repeat(np.arange(size.shape[1]), counts)
    index = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    part, rest = index * parts // counts[box], index  # consecutive pieces, as evenly as their number allows
    low, extent = np.empty((2, len(size), len(box)), np.int64)
    for dim in reversed(range(len(size))):
        along, length = slices[dim, box], size[dim, box]
        rest, digit = np.divmod(rest, along)
        first, last = digit * length // along, (digit + 1) * length // along
        low[dim], extent[dim] = start[dim, box] + first, last - first
    return box, part, low, extent
