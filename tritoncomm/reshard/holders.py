"""Holders: the ranks of a layout, and the region of the tensor that each of their boxes is, without any sizes.

All tensors that a mesh shards by the same axes have the same holders, so these are computed once for a whole model.
"""

import hashlib
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.boxes import Array

__all__ = ["BoxPairs", "Holders", "Members", "members_of", "on_axes", "pair_boxes_by_rank"]


class Members:
    """Ordered set of global ranks; compares and hashes by its content."""

    def __init__(self, ids: Array) -> None:
        self.ids = ids
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]
        self._place: dict[int, int] = {}  # of ranks asked for: all tensors of a call ask for one
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise ArgumentError(f"Layout: a rank is listed twice in {ids.tolist()}")
        self.digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Members) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def ranks(self) -> Ints:
        """Global ranks as Python numbers."""
        return tuple(self.ids.tolist())

    def places_of(self, ids: Array) -> Array:
        """Return the place of each of some global ranks in the set; -1 for a rank that is not in it."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        nearest = np.minimum(np.searchsorted(self._sorted, ids), len(self.ids) - 1)
        return np.where(self._sorted[nearest] == ids, self._order[nearest], -1)

    def place_of(self, rank: int) -> int:
        """Return the place of a global rank in the set; -1 if it is not in it."""
        if rank not in self._place:
            self._place[rank] = int(self.places_of(np.array([rank], np.int64))[0])
        return self._place[rank]


@lru_cache(maxsize=64)
def members_of(ids: bytes) -> Members:
    """Return the set of the global ranks whose numbers have these bytes; cached."""
    return Members(np.frombuffer(ids, np.int64))


class Holders:
    """Boxes of a layout: the rank that owns each, and the region that each is.

    Attributes:
        owner: place of every box's rank, ascending.
        region: region of every box. Equal boxes of several ranks are one region.
        counts: number of boxes of every region.
        order: the boxes sorted by region, and then by rank.
        first: place in ``order`` of every region's first box, and behind them the number of boxes.
        is_simple: every rank owns exactly one box.
    """

    def __init__(self, members: Members, owner: Array, region: Array) -> None:
        self.members, self.owner, self.region = members, owner, region
        self.counts = np.bincount(region)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        self.order = np.argsort(region, kind="stable")
        self.is_simple = len(owner) == len(members.ids) and bool((owner == np.arange(len(owner))).all())
        state = hashlib.blake2b(members.digest, digest_size=16)
        state.update(owner.tobytes())
        state.update(region.tobytes())
        self.digest = state.digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Holders) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def most(self) -> int:
        """Largest number of boxes that are one region; 0 without boxes."""
        return int(self.counts.max(initial=0))

    @cached_property
    def nth(self) -> Array:
        """Number of every box among the boxes of its region."""
        result = np.empty_like(self.order)
        result[self.order] = np.arange(len(self.order)) - np.repeat(self.first[:-1], self.counts)
        return result

    def boxes_of_rank(self, rank: int) -> Array:
        """Return the boxes of a global rank, none where it is no member."""
        place = self.members.place_of(rank)
        return np.empty(0, np.int64) if place < 0 else self.boxes_of(place)

    def boxes_of(self, place: int) -> Array:
        """Return the boxes of the rank at a place."""
        return np.arange(*np.searchsorted(self.owner, [place, place + 1]))  # neighbours, as ``owner`` ascends

    def boxes_in(self, region: Array) -> tuple[Array, Array]:
        """Return all boxes of some regions, region by region, and for every box its index in ``region``."""
        # ``nth`` numbers the boxes of each region from 0; ``order`` has them side by side.
        counts = self.counts[region]
        index = np.repeat(np.arange(len(region)), counts)
        nth = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.order[self.first[region][index] + nth], index


class BoxPairs(NamedTuple):
    """Box of every rank in two layouts, sorted by source region, then by target box.

    Attributes:
        source_box, target_box: ``[pairs]``.
        regions: ``[2, distinct]``, the distinct pairs of a source region and a target region.
        region_pair: ``[pairs]``, column of ``regions`` of every pair of boxes.
    """

    source_box: Array
    target_box: Array
    regions: Array
    region_pair: Array


@lru_cache(maxsize=64)
def pair_boxes_by_rank(source: Holders, target: Holders) -> BoxPairs:
    """Pair the box of every rank with its box of another layout, where each rank has one box in both; cached."""
    # The number of a box is the place of its rank, so that pairs of ranks are pairs of boxes. -1: not in the target.
    target_box_of = target.members.places_of(source.members.ids)
    source_box = np.nonzero(target_box_of >= 0)[0]
    source_box = source_box[np.lexsort((target_box_of[source_box], source.region[source_box]))]
    target_box = target_box_of[source_box]
    # A pair of regions as one integer, source region first.
    num_target_regions = len(target.counts)
    codes = source.region[source_box] * num_target_regions + target.region[target_box]
    distinct_codes, region_pair = np.unique(codes, return_inverse=True)
    regions = np.stack(np.divmod(distinct_codes, max(num_target_regions, 1)))
    return BoxPairs(source_box, target_box, regions, region_pair)


@lru_cache(maxsize=256)  # the tensors of a model are sharded in a few ways
def on_axes(members: Members, mesh: Ints, dims: tuple[Ints, ...]) -> Holders:
    """Return the holders of the shards of a mesh; cached.

    Args:
        members: the ranks of the mesh, the last axis fastest.
        dims: for every sharded dim of the tensor the axes that shard it, in the order in which they do.
    """
    # The number of a region has a rank's coordinates on the sharding axes as digits, the last one fastest; ranks that
    # differ on other axes only hold replicas.
    coordinates = np.indices(mesh, np.int64).reshape(len(mesh), -1)
    region = np.zeros(len(members.ids), np.int64)
    for axes in dims:
        for axis in axes:
            region = region * mesh[axis] + coordinates[axis]
    return Holders(members, np.arange(len(region)), region)
