"""The planner: divides the blocks of a request into buckets, which are the same on every rank."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.intersections import Routes, part_counts, routes_between, split_into_parts
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.overlaps import has_overlap
from tritoncomm.reshard.plan import ALIGNMENT, Bucket, Item, Side, StayingBlocks, TransferPlan

__all__ = ["plan_transfers"]

_OPEN = 32  # buckets that still take tensors
_SMALL = 4 * 2**20
"""Bytes of a bucket's staying blocks up to which they go through the staging memory.

Copying few bytes twice takes less time than a launch, which direct copies need.
"""


def plan_transfers(
    items: Sequence[Item], ranks: Sequence[int], position: int, bucket_bytes: int, every_replica: bool = False
) -> TransferPlan:
    """Plan all messages and copies that bring tensors from their source to their target layouts, for one rank.

    The plan has the blocks of this rank only. Of the other ranks bytes are counted, because these decide which replica
    sends and where buckets end.

    Args:
        items: the tensors, checked by ``check_items``.
        ranks: global ranks of the group.
        position: position of this rank in the group.
        bucket_bytes: the most bytes that any rank may send, or receive, in one bucket.
        every_replica: each replica of a source sends, and the receivers sum.

    Raises:
        ArgumentError: a single element for every peer is more than ``bucket_bytes``.
    """
    planner = _Planner(tuple(map(_in_rows, items)), tuple(ranks), position, bucket_bytes, every_replica)
    for index in _interleaved(items):
        planner.add(index)
    return planner.finish()


def _in_rows(item: Item) -> Item:
    """Convert both layouts of a tensor to a common view of rows, in which no box is strided; return a new item."""
    source, target = item.source, item.target
    periods = tuple(map(math.lcm, source.step, target.step))
    if max(periods, default=1) == 1:
        return item
    return replace(item, source=source.in_rows(periods), target=target.in_rows(periods))


def _interleaved(items: Sequence[Item]) -> list[int]:
    """Order tensors so that the ranks of all pipeline stages send at the same time; return their indices.

    The layers of a stage lie on the ranks of that stage, so in the order of the layers one stage after the other would
    send. Here the tensors of each set of ranks are spread evenly over the order by their bytes.
    """
    totals: dict[tuple[Ints, Ints], int] = {}
    middles = []
    for item in items:
        key, nbytes = (item.source.ranks, item.target.ranks), math.prod(item.source.shape) * item.carried.itemsize
        middles.append((key, 2 * totals.get(key, 0) + nbytes))
        totals[key] = totals.get(key, 0) + nbytes
    # Fractions compare exactly, so every rank gets the same order.
    places = [Fraction(middle, max(totals[key], 1)) for key, middle in middles]
    return sorted(range(len(items)), key=lambda index: (places[index], index))


class _Planner:
    """The state of a plan while tensors are added: open buckets with every rank's bytes, and this rank's blocks.

    Args:
        items, ranks, position, bucket_bytes, every_replica: as for ``plan_transfers``; boxes are dense.
    """

    def __init__(
        self, items: tuple[Item, ...], ranks: Ints, position: int, bucket_bytes: int, every_replica: bool
    ) -> None:
        self.items, self.ranks, self.position, self.limit = items, ranks, position, bucket_bytes
        self.every_replica = every_replica
        world = self.world = len(ranks)
        self.dims = max((len(item.source.shape) for item in items), default=0) or 1
        self.itemsizes = np.array([item.carried.itemsize for item in items], np.int64)
        self.positions = {rank: place for place, rank in enumerate(ranks)}
        self.sources, self.targets = set[int](), set[int]()  # ranks with a part of a source, of a target
        self.loads, self.lacking, self.messages = np.zeros((3, world), np.int64)
        self.total = np.zeros((2, world), np.int64)
        self.largest, self.critical, self.count = 0, 0, 0  # the count is of buckets
        # Open buckets: number, bytes that every rank sends and receives, pairs of ranks with a message.
        self.numbers: list[int] = []
        self.loaded = np.zeros((_OPEN, 2, world), np.int64)
        self.pairs = np.zeros((_OPEN, world * world), bool)
        self.flat: list[Array] = []  # bucket, tensor, sender and receiver of this rank's blocks
        self.boxes: list[Array] = []  # start in the source, start in the target, and size of this rank's blocks

    def add(self, index: int) -> None:
        """Add one tensor to the plan: choose senders, put its messages into buckets, and store this rank's blocks.

        Args:
            index: number of the tensor.
        """
        item = self.items[index]
        self.sources.update(item.source.ranks)
        self.targets.update(item.target.ranks)
        positions = self._positions_of(item.source), self._positions_of(item.target)
        routes = routes_between(
            item.source, item.target, positions, self.loads, item.carried.itemsize, self.every_replica
        )
        is_remote = routes.sender != routes.receiver
        self._note(index, routes, self._fit(index, routes, is_remote) if is_remote.any() else [0])

    def _positions_of(self, layout: Layout) -> Array:
        """Return the positions in the process group of a layout's ranks, in the order of the layout."""
        return np.array([self.positions[rank] for rank in layout.ranks], np.int64)

    def _fit(self, index: int, routes: Routes, is_remote: NDArray[np.bool_]) -> list[int]:
        """Put the messages of one tensor into the first open bucket with room, or one part each into several buckets.

        Args:
            index: the tensor.
            routes: its routes.
            is_remote: whether sender and receiver of an intersection are different ranks.

        Returns:
            The numbers of the buckets, in the order of the parts.
        """
        item = self.items[index]
        itemsize = item.carried.itemsize
        nbytes = routes.intersections.volume * itemsize * is_remote
        # Counted before the alignment, which is on the wire only.
        self.lacking += _totals(routes.receiver, nbytes, self.world)
        # One box per rank on both sides is one block per pair of ranks, and needs no sum over pairs.
        is_single = item.source.is_single and item.target.is_single
        loads = [self._load_of(routes.sender, routes.receiver, nbytes, is_single)]
        remote = np.nonzero(is_remote)[0]
        sender, receiver = routes.sender[remote], routes.receiver[remote]
        if loads[0].max() > self.limit:
            start, size = routes.intersections.boxes(remote)
            parts = self._parts(item, sender, receiver, size, loads[0])
            place, part, _, extent = split_into_parts(start, size, parts)
            sizes = extent.prod(0) * itemsize
            loads = [
                self._load_of(sender[place[piece]], receiver[place[piece]], sizes[piece], False)
                for piece in (part == number for number in range(parts))
            ]
        buckets: list[int] = []
        for load in loads:
            slot = self._slot(load, buckets[-1] if buckets else -1)
            self.loaded[slot] += load
            self.pairs[slot, sender * self.world + receiver] = True
            buckets.append(self.numbers[slot])
        return buckets

    def _slot(self, load: Array, after: int) -> int:
        """Return the index of an open bucket with room for a load; open a bucket if none has.

        Args:
            load: bytes that every rank sends and receives, ``[2, world]``.
            after: number that the bucket's number has to exceed.
        """
        count = len(self.numbers)
        fits = (self.loaded[:count] + load <= self.limit).all((1, 2)) & (np.array(self.numbers, np.int64) > after)
        if fits.any():
            return int(fits.argmax())
        if count == _OPEN:
            self._close(1)
        self.numbers.append(self.count)
        self.count += 1
        return len(self.numbers) - 1

    def _parts(self, item: Item, sender: Array, receiver: Array, size: Array, load: Array) -> int:
        """Return the number of parts into which a tensor has to be divided for each part to fit into a bucket.

        Args:
            item: the tensor.
            sender, receiver: positions of the ranks of every intersection between two ranks.
            size: extents of the intersections, ``[dims, intersections]``.
            load: bytes that every rank sends and receives of the undivided tensor.

        Raises:
            ArgumentError: a single element for every peer is more than a bucket takes.
        """
        parts, most = 1, int(size.prod(0).max())
        while load.max() > self.limit:
            if parts >= most:
                raise ArgumentError(
                    f"reshard: bucket_bytes {self.limit} is too small for {item.name}: one element for every peer "
                    f"takes {int(load.max())} bytes"
                )
            # Alignment makes the bytes of a part more than its share, so the estimate may need another round.
            parts = min(most, max(parts + 1, parts * int(load.max()) // self.limit))
            load = self._load_of(sender, receiver, part_counts(size, parts)[1] * item.carried.itemsize, False)
        return parts

    def _load_of(self, sender: Array, receiver: Array, nbytes: Array, is_single: bool) -> Array:
        """Sum the bytes that every rank sends, and that every rank receives, of one tensor: return ``[2, world]``.

        The bytes of each pair of ranks are rounded up to a multiple of ``ALIGNMENT``.

        Args:
            sender, receiver: positions of the ranks of every block.
            nbytes: bytes of every block.
            is_single: no pair of ranks has two blocks.
        """
        if not is_single:
            pair, inverse = np.unique(sender * self.world + receiver, return_inverse=True)
            nbytes = _totals(inverse, nbytes, len(pair))
            sender, receiver = np.divmod(pair, self.world)
        nbytes = nbytes + (ALIGNMENT - 1) & -ALIGNMENT
        return np.stack([_totals(place, nbytes, self.world) for place in (sender, receiver)])

    def _close(self, count: int) -> None:
        """Close the ``count`` oldest open buckets: add their bytes and messages to the totals, and drop them."""
        for slot in range(count):
            self.total += self.loaded[slot]
            self.messages += self.pairs[slot].reshape(self.world, -1).sum(1)
            self.largest = max(self.largest, int(self.loaded[slot].max()))
            self.critical += int(self.loaded[slot].max())
        # The other buckets keep their order: the first bucket with room takes a tensor.
        left = len(self.numbers) - count
        self.loaded[:left], self.pairs[:left] = self.loaded[count:][:left].copy(), self.pairs[count:][:left].copy()
        self.loaded[left:], self.pairs[left:] = 0, False
        del self.numbers[:count]

    def _note(self, index: int, routes: Routes, buckets: list[int]) -> None:
        """Store the blocks of one tensor that this rank sends, receives or keeps, for the plan that ``finish`` returns.

        Stored are each block's bucket, tensor, sender, receiver, first index in the local tensor before and after, and
        extent. A tensor in several parts is cut, and each part goes to its own bucket.

        Args:
            index: number of the tensor.
            routes: sender and receiver of each of the tensor's intersections.
            buckets: number of the bucket of every part of the tensor.
        """
        item = self.items[index]
        own = np.nonzero((routes.sender == self.position) | (routes.receiver == self.position))[0]
        if not len(own):
            return
        sender, receiver = routes.sender[own], routes.receiver[own]
        source, target = routes.source[own], routes.intersections.target[own]
        start, size = routes.intersections.boxes(own)
        to_source = (item.source.at[source] - item.source.start[source]).T
        to_target = (item.target.at[target] - item.target.start[target]).T
        part = np.zeros(len(own), np.int64)
        if len(buckets) > 1:
            place, part, start, size = split_into_parts(start, size, len(buckets))
            sender, receiver = sender[place], receiver[place]
            to_source, to_target = to_source[:, place], to_target[:, place]
        boxes = np.zeros((3, self.dims, len(part)), np.int64)
        boxes[2] = 1
        first = self.dims - len(size)  # tensors of fewer dims have leading ones
        boxes[0, first:], boxes[1, first:], boxes[2, first:] = start + to_source, start + to_target, size
        self.flat.append(np.stack([np.array(buckets, np.int64)[part], np.full_like(part, index), sender, receiver]))
        self.boxes.append(boxes)

    def finish(self) -> TransferPlan:
        """Close all buckets and return the transfer plan of this rank: every bucket's blocks, and all ranks' totals."""
        self._close(len(self.numbers))
        is_quiet, self.count = not self.count, self.count or 1  # without messages one bucket has the staying blocks
        flat = np.concatenate([np.empty((4, 0), np.int64), *self.flat], 1)
        boxes = np.concatenate([np.empty((3, self.dims, 0), np.int64), *self.boxes], 2)
        bucket, tensor, sender, receiver = flat
        stays = sender == receiver
        sent = self._sides(boxes[0], boxes[2], bucket, tensor, receiver, ~stays & (sender == self.position))
        received = self._sides(boxes[1], boxes[2], bucket, tensor, sender, ~stays & (receiver == self.position))
        staying = np.nonzero(stays)[0]
        staying = staying[np.argsort(bucket[staying], kind="stable")]
        ends = np.searchsorted(bucket[staying], np.arange(self.count + 1))
        buckets = []
        for number in range(self.count):
            here = staying[ends[number] : ends[number + 1]]
            source, target, size = boxes[:, :, here]
            blocks = StayingBlocks(tensor[here], source, target, size, np.empty(0, np.int64))
            staged, nbytes, direct = self._staged(blocks, sent[number], received[number])
            buckets.append(Bucket(sent[number], received[number], staged, nbytes, direct, is_quiet))
        return TransferPlan(
            self.items, self.ranks, self.position, tuple(buckets), self.total[0], self.total[1], self.lacking,
            self.messages, self.largest, self.critical, not self.sources & self.targets, self.every_replica,
        )  # fmt: skip

    def _staged(self, blocks: StayingBlocks, sent: Side, received: Side) -> tuple[StayingBlocks, int, StayingBlocks]:
        """Divide the blocks of a bucket that stay on this rank into staged and direct ones.

        Blocks are staged if they are few bytes and the bucket has a pack and an unpack anyway, or if they are summed
        with received blocks, which needs them in the staging memory whatever their size.

        Args:
            blocks: all blocks that stay.
            sent, received: this rank's side of the bucket.

        Returns:
            The staged blocks, their bytes, and the direct blocks.
        """
        nbytes = blocks.size.prod(0) * self.itemsizes[blocks.tensor] + (ALIGNMENT - 1) & -ALIGNMENT
        has_passes = self.every_replica or (sent.nbytes > 0 and received.nbytes > 0)
        is_staged = has_passes and nbytes.sum() <= min(_SMALL, self.limit)
        chosen = np.arange(len(nbytes) if is_staged else 0)
        if self.every_replica:
            pairs = (blocks.tensor, received.tensor), (blocks.target, received.start), (blocks.size, received.size)
            is_summed = has_overlap(*(np.concatenate(pair, -1) for pair in pairs))[: len(nbytes)]
            chosen = np.union1d(chosen, np.nonzero(is_summed)[0])
        ends = np.cumsum(nbytes[chosen])
        rest = np.setdiff1d(np.arange(len(nbytes)), chosen)
        staged = blocks.pick(chosen, ends - nbytes[chosen])
        return staged, int(ends[-1]) if len(ends) else 0, blocks.pick(rest, blocks.wire)

    def _sides(
        self, start: Array, size: Array, bucket: Array, tensor: Array, peer: Array, is_chosen: NDArray[np.bool_]
    ) -> list[Side]:
        """Lay out the blocks that this rank sends, or receives, on the wire; return one side per bucket.

        Blocks are ordered by peer, then by tensor. The blocks of one tensor start at a multiple of ``ALIGNMENT``.

        Args:
            start, size: first index and extent of every block in its local tensor, ``[dims, blocks]``.
            bucket, tensor: bucket and tensor of every block.
            peer: position in the group of the rank on the other end.
            is_chosen: whether a block is sent (or received) by this rank; the other blocks are left out.

        Returns:
            For every bucket, the blocks in the order of the wire with their byte offsets, and the bytes of every peer.
        """
        chosen = np.nonzero(is_chosen)[0]
        chosen = chosen[np.lexsort((tensor[chosen], peer[chosen], bucket[chosen]))]
        start, size = start[:, chosen], size[:, chosen]
        bucket, tensor, peer = bucket[chosen], tensor[chosen], peer[chosen]
        nbytes = size.prod(0) * self.itemsizes[tensor]
        keys = np.stack([bucket, peer, tensor])
        is_first = np.ones(len(chosen), bool)
        is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(0)
        firsts, group = np.nonzero(is_first)[0], np.cumsum(is_first) - 1
        exact = _totals(group, nbytes, len(firsts))
        aligned = exact + (ALIGNMENT - 1) & -ALIGNMENT
        wire = np.cumsum(nbytes) - nbytes + (np.cumsum(aligned - exact) - (aligned - exact))[group]
        counts = np.zeros((self.count, self.world), np.int64)
        np.add.at(counts, (bucket[firsts], peer[firsts]), aligned)
        wire -= (np.cumsum(counts.sum(1)) - counts.sum(1))[bucket]
        ends = np.searchsorted(bucket, np.arange(self.count + 1))
        return [
            Side(tensor[a:b], start[:, a:b], size[:, a:b], wire[a:b], tuple(row))
            for a, b, row in zip(ends, ends[1:], counts.tolist(), strict=False)
        ]


def _totals(index: Array, nbytes: Array, count: int) -> Array:
    """Sum bytes by index: return ``count`` sums. A double, in which numpy sums, holds every number of bytes exactly."""
    return np.bincount(index, nbytes, count).astype(np.int64)
