"""Planning: which blocks this rank sends, receives and keeps, and in which bucket; the same buckets on every rank."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.intersections import Cells, Ends, cells_between, parts_of, split_cells
from tritoncomm.reshard.layout import Array, Layout
from tritoncomm.reshard.overlaps import overlaps
from tritoncomm.reshard.plan import ALIGNMENT, Bucket, Item, Local, Side, Transfers
from tritoncomm.reshard.rows import common_periods

__all__ = ["transfers"]

_OPEN = 32
_SMALL = 4 * 2**20  # bytes of a bucket's blocks that stay and go through the staging memory


def transfers(
    items: Sequence[Item], ranks: Sequence[int], position: int, bucket_bytes: int, every_replica: bool = False
) -> Transfers:
    """Plan what one rank sends and receives.

    Only this rank's blocks are kept. Of the others the bytes are counted, because they decide where buckets end and
    which replica sends.

    Args:
        items: the tensors, checked by ``check``.
        ranks: global ranks of the group.
        position: of this rank in the group.
        bucket_bytes: bytes at most of a bucket, on the sending and on the receiving side of any rank.
        every_replica: each replica of the source sends, to be summed.

    Raises:
        ArgumentError: a single element for every peer is more than ``bucket_bytes``.
    """
    builder = _Builder(tuple(map(_in_rows, items)), tuple(ranks), position, bucket_bytes)
    for index in _interleaved(items):
        builder.add(index, every_replica)
    return builder.finish(every_replica)


def _in_rows(item: Item) -> Item:
    """The tensor in the index space in which boxes of both layouts have no steps."""
    source, target = item.source, item.target
    periods = common_periods(source.step, target.step)
    if max(periods, default=1) == 1:
        return item
    return replace(item, source=source.in_rows(periods), target=target.in_rows(periods))


def _interleaved(items: Sequence[Item]) -> list[int]:
    """The tensors in an order in which those of all sets of ranks go on at the same pace.

    The layers of a pipeline stage are all on the ranks of that stage: in their own order one stage after the other
    would send.
    """
    totals: dict[tuple[Ints, Ints], int] = {}
    middles = []
    for item in items:
        key, nbytes = (item.source.ranks, item.target.ranks), math.prod(item.source.shape) * item.carried.itemsize
        middles.append((key, 2 * totals.get(key, 0) + nbytes))
        totals[key] = totals.get(key, 0) + nbytes
    places = [Fraction(middle, max(totals[key], 1)) for key, middle in middles]
    return sorted(range(len(items)), key=lambda index: (places[index], index))


class _Builder:
    """Goes through the tensors once, and keeps this rank's blocks and every rank's totals."""

    def __init__(self, items: tuple[Item, ...], ranks: Ints, position: int, bucket_bytes: int) -> None:
        self.items, self.ranks, self.position, self.limit = items, ranks, position, bucket_bytes
        world = self.world = len(ranks)
        self.dims = max((len(item.source.shape) for item in items), default=0) or 1
        self.index = {rank: place for place, rank in enumerate(ranks)}
        self.places: dict[Ints, Array] = {}
        self.loads, self.lacking, self.messages = np.zeros((3, world), np.int64)
        self.total = np.zeros((2, world), np.int64)
        # Buckets that still take something: number, bytes of every rank on both sides, pairs of ranks.
        self.numbers: list[int] = []
        self.marked: list[set[Ends]] = []  # whose pairs are in a bucket
        self.known: dict[Any, tuple[Ends, Array]] = {}
        self.loaded = np.zeros((_OPEN, 2, world), np.int64)
        self.pairs = np.zeros((_OPEN, world * world), bool)
        self.largest, self.critical = 0, 0
        self.quiet: list[bool] = []
        self.flat: list[Array] = []  # bucket, tensor, sender and receiver of this rank's blocks
        self.boxes: list[Array] = []  # start in the source, start in the target, and size
        self.ends: tuple[set[int], set[int]] = (set(), set())

    def add(self, index: int, every_replica: bool) -> None:
        """Put one tensor into the current bucket, or into several."""
        item = self.items[index]
        places = (self._places(item.source, 0), self._places(item.target, 1))
        itemsize = item.carried.itemsize
        cells = cells_between(item.source, item.target, places, self.loads, itemsize, self.known, every_replica)
        buckets = [0]
        if len(cells.ends.remote):
            buckets = self._fit(index, cells, itemsize, item.source.is_single and item.target.is_single)
        self._keep(index, cells, buckets)

    def _places(self, layout: Layout, side: int) -> Array:
        places = self.places.get(layout.ranks)
        if places is None:
            places = self.places[layout.ranks] = np.array([self.index[rank] for rank in layout.ranks], np.int64)
        self.ends[side].update(layout.ranks)
        return places

    def _fit(self, index: int, cells: Cells, itemsize: int, single: bool) -> list[int]:
        """Put one tensor into the first bucket with room, or its parts into one each; the numbers of the buckets."""
        ends = cells.ends
        nbytes = cells.grid.volume * itemsize
        nbytes *= ends.is_remote
        lacking = _totals(ends.receiver, nbytes, self.world)
        self.lacking += lacking
        if single and not (nbytes & (ALIGNMENT - 1)).any():
            sides = [np.stack([_totals(ends.sender, nbytes, self.world), lacking])]
        else:
            sides = [self._sides(ends.sender, ends.receiver, nbytes, single)]
        if sides[0].max() > self.limit:
            remote = ends.remote
            sender, receiver = ends.sender[remote], ends.receiver[remote]
            start, size = cells.grid.boxes(remote)
            parts = self._parts(index, sender, receiver, size, itemsize, sides[0])
            cell, part, _, extent = split_cells(start, size, parts)
            sides = [
                self._sides(sender[cell[mine]], receiver[cell[mine]], extent[:, mine].prod(0) * itemsize, False)
                for mine in (np.nonzero(part == each)[0] for each in range(parts))
            ]
        buckets: list[int] = []
        for each in sides:
            slot = self._slot(each, buckets[-1] if buckets else -1)
            self.loaded[slot] += each
            if ends not in self.marked[slot]:
                self.marked[slot].add(ends)
                self.pairs[slot, ends.pairs(self.world)] = True
            buckets.append(self.numbers[slot])
        return buckets

    def _slot(self, sides: Array, after: int) -> int:
        """The first open bucket after that number which has room, or a new one."""
        count = len(self.numbers)
        fits = (self.loaded[:count] + sides <= self.limit).all((1, 2)) & (np.array(self.numbers, np.int64) > after)
        if fits.any():
            return int(fits.argmax())
        if count == _OPEN:
            self._account(1)
        self.numbers.append(len(self.quiet))
        self.marked.append(set())
        self.quiet.append(False)
        return len(self.numbers) - 1

    def _parts(self, index: int, sender: Array, receiver: Array, size: Array, itemsize: int, sides: Array) -> int:
        """Into how many parts a tensor has to be divided for each to fit into a bucket."""
        parts, most = 1, int(size.prod(0).max())
        while sides.max() > self.limit:
            if parts >= most:
                raise ArgumentError(
                    f"reshard: bucket_bytes {self.limit} is too small for {self.items[index].name}: one element for "
                    f"every peer takes {int(sides.max())} bytes"
                )
            parts = min(most, max(parts + 1, parts * int(sides.max()) // self.limit))
            sides = self._sides(sender, receiver, parts_of(size, parts)[1] * itemsize, False)
        return parts

    def _sides(self, sender: Array, receiver: Array, nbytes: Array, single: bool) -> Array:
        """Aligned bytes that every rank sends and receives of one tensor."""
        if not single:
            pair, inverse = np.unique(sender * self.world + receiver, return_inverse=True)
            nbytes = _totals(inverse, nbytes, len(pair))
            sender, receiver = np.divmod(pair, self.world)
        nbytes = nbytes + (ALIGNMENT - 1) & -ALIGNMENT
        return np.stack([_totals(each, nbytes, self.world) for each in (sender, receiver)])

    def _account(self, count: int) -> None:
        """Close the first open buckets and add up what they have."""
        for slot in range(count):
            self.total += self.loaded[slot]
            self.messages += self.pairs[slot].reshape(self.world, -1).sum(1)
            self.largest = max(self.largest, int(self.loaded[slot].max()))
            self.critical += int(self.loaded[slot].max())
        kept = len(self.numbers) - count
        self.loaded[:kept], self.pairs[:kept] = self.loaded[count:][:kept].copy(), self.pairs[count:][:kept].copy()
        self.loaded[kept:], self.pairs[kept:] = 0, False
        del self.numbers[:count], self.marked[:count]

    def _keep(self, index: int, cells: Cells, buckets: list[int]) -> None:
        """Note this rank's blocks of one tensor, part by part in these buckets."""
        item = self.items[index]
        mine = cells.ends.of_rank(self.position)
        if not len(mine):
            return
        ends = cells.ends.sender[mine], cells.ends.receiver[mine]
        source, target = cells.source[mine], cells.target[mine]
        start, size = cells.grid.boxes(mine)
        to_source = (item.source.at[source] - item.source.start[source]).T
        to_target = (item.target.at[target] - item.target.start[target]).T
        part = np.zeros(len(mine), np.int64)
        if len(buckets) > 1:
            cell, part, start, size = split_cells(start, size, len(buckets))
            ends = ends[0][cell], ends[1][cell]
            to_source, to_target = to_source[:, cell], to_target[:, cell]
        flat = np.stack([np.array(buckets, np.int64)[part], np.full_like(part, index), *ends])
        boxes = np.zeros((3, self.dims, len(part)), np.int64)
        boxes[2] = 1
        first = self.dims - len(size)
        boxes[0, first:], boxes[1, first:], boxes[2, first:] = start + to_source, start + to_target, size
        self.flat.append(flat)
        self.boxes.append(boxes)

    def finish(self, sums: bool) -> Transfers:
        """The plan."""
        self._account(len(self.numbers))
        self.quiet = self.quiet or [True]  # blocks that stay on their ranks only
        flat = np.concatenate([np.empty((4, 0), np.int64), *self.flat], 1)
        boxes = np.concatenate([np.empty((3, self.dims, 0), np.int64), *self.boxes], 2)
        bucket, tensor, sender, receiver = flat
        stays = sender == receiver
        sent = self._sides_of(boxes[0], boxes[2], bucket, tensor, receiver, ~stays & (sender == self.position))
        received = self._sides_of(boxes[1], boxes[2], bucket, tensor, sender, ~stays & (receiver == self.position))
        kept = np.nonzero(stays)[0]
        kept = kept[np.argsort(bucket[kept], kind="stable")]
        ends = np.searchsorted(bucket[kept], np.arange(len(self.quiet) + 1))
        buckets = []
        for place, is_quiet in enumerate(self.quiet):
            here = kept[ends[place] : ends[place + 1]]
            local = Local(tensor[here], boxes[0][:, here], boxes[1][:, here], boxes[2][:, here], np.empty(0, np.int64))
            launches = (not sent[place].nbytes) + (not received[place].nbytes)
            own, rest, own_bytes = self._staged(local, launches, received[place] if sums else None)
            buckets.append(Bucket(sent[place], received[place], own, own_bytes, rest, is_quiet))
        is_disjoint = not self.ends[0] & self.ends[1]
        return Transfers(
            self.items, self.ranks, self.position, tuple(buckets), self.total[0], self.total[1], self.lacking,
            self.messages, self.largest, self.critical, is_disjoint, sums,
        )  # fmt: skip

    def _staged(self, local: Local, launches: int, added: Side | None) -> tuple[Local, Local, int]:
        """Blocks that go through the staging memory, those that are copied directly, and the bytes of the former.

        Few bytes take less time to be copied twice than a launch takes, which direct copies need. A block that is added
        to others has to be there, whatever its size.

        Args:
            local: all blocks of a bucket that stay.
            launches: how many of a pack and an unpack there would not be without them.
            added: what arrives, if it is added up with them.
        """
        itemsizes = np.array([item.carried.itemsize for item in self.items], np.int64)
        nbytes = -(-local.elements * itemsizes[local.tensor] // ALIGNMENT) * ALIGNMENT
        is_staged = (not launches or added is not None) and nbytes.sum() <= min(_SMALL, self.limit)
        chosen = np.arange(len(nbytes) if is_staged else 0)
        if added is not None:
            pairs = (local.tensor, added.tensor), (local.target, added.start), (local.size, added.size)
            is_added = overlaps(*(np.concatenate(pair, -1) for pair in pairs))[: len(nbytes)]
            chosen = np.union1d(chosen, np.nonzero(is_added)[0])
        ends = np.cumsum(nbytes[chosen])
        rest = np.setdiff1d(np.arange(len(nbytes)), chosen)
        total = int(ends[-1]) if len(ends) else 0
        return local.pick(chosen, ends - nbytes[chosen]), local.pick(rest, local.wire), total

    def _sides_of(
        self, start: Array, size: Array, bucket: Array, tensor: Array, peer: Array, mine: Array
    ) -> list[Side]:
        """This rank's messages of one side by bucket: in the order of the peers, of one peer in that of the tensors."""
        chosen = np.nonzero(mine)[0]
        chosen = chosen[np.lexsort((tensor[chosen], peer[chosen], bucket[chosen]))]
        start, size, bucket, tensor, peer = (
            start[:, chosen],
            size[:, chosen],
            bucket[chosen],
            tensor[chosen],
            peer[chosen],
        )
        itemsizes = np.array([item.carried.itemsize for item in self.items], np.int64)
        nbytes = size.prod(0) * itemsizes[tensor]
        keys = np.stack([bucket, peer, tensor])
        is_first = np.ones(len(chosen), bool)
        is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(0)
        firsts, group = np.nonzero(is_first)[0], np.cumsum(is_first) - 1
        exact = np.bincount(group, nbytes, len(firsts)).astype(np.int64)
        aligned = -(-exact // ALIGNMENT) * ALIGNMENT
        wire = np.cumsum(nbytes) - nbytes + (np.cumsum(aligned - exact) - (aligned - exact))[group]
        counts = np.zeros((len(self.quiet), self.world), np.int64)
        np.add.at(counts, (bucket[firsts], peer[firsts]), aligned)
        base = np.cumsum(counts.sum(1)) - counts.sum(1)
        wire -= base[bucket]
        ends = np.searchsorted(bucket, np.arange(len(self.quiet) + 1))
        return [
            Side(tensor[a:b], start[:, a:b], size[:, a:b], wire[a:b], tuple(row))
            for a, b, row in zip(ends, ends[1:], counts.tolist(), strict=False)
        ]


def _totals(index: Array, nbytes: Array, count: int) -> Array:
    """Sums by index; a double holds every number of bytes exactly."""
    return np.bincount(index, nbytes, count).astype(np.int64)
