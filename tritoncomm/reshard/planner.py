"""The planner: divides the blocks of a request into buckets, which are the same on every rank."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.holders import Holders, Members, members_of
from tritoncomm.reshard.intersections import first_of_part, most_of_a_part, split_into_parts
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.overlaps import has_overlap
from tritoncomm.reshard.plan import ALIGNMENT, Bucket, Item, Side, StayingBlocks, Totals, TransferPlan
from tritoncomm.reshard.routes import Bounds, Classes, Requests, Routes

__all__ = ["plan_transfers"]

_OPEN = 128  # buckets that still take tensors
_SMALL = 4 * 2**20
"""Bytes of a bucket's staying blocks up to which they go through the staging memory.

Copying few bytes twice takes less time than a launch, which direct copies need.
"""
_SMALL_GROUP = 256  # ranks of which every one is a class of its own
_MOST_CLASSES = 4096
_MOST_RANKS = 8192  # that are classes of their own; more take several per class
_NO_WIRE: Array = np.empty(0, np.int64)  # of staying blocks that are copied directly
_UNEVEN = 1.5
"""Times that a class may count the bytes of its largest rank until its ranks are counted one by one."""
_AllRoutes = dict[tuple[Layout, Layout], Routes]
_Held = dict[Layout, tuple[Array, int]]
"""Layouts before, or behind: positions of their ranks in the group, and bytes of an element of all their tensors."""


class _Assigned(NamedTuple):
    """Assignment of a tensor.

    Attributes:
        index: number of the tensor.
        table: the replica that serves each slot; see ``Routes.table_of``.
        buckets: number of the bucket of every part of the tensor.
    """

    index: int
    table: Array | None
    buckets: list[int]


def plan_transfers(
    items: Sequence[Item], ranks: Sequence[int], position: int, bucket_bytes: int, every_replica: bool = False
) -> TransferPlan:
    """Plan all messages and copies that bring tensors from their source to their target layouts, for one rank.

    Args:
        bucket_bytes: the most bytes that any rank may send, or receive, in one bucket.
        every_replica: each replica of a source sends, and the receivers sum.
    """
    # The plan has the blocks of this rank only, and takes time and memory by these. All ranks get the same buckets,
    # because the ends of these follow from the bytes of classes of ranks.
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
    """Order tensors so that the ranks of all pipeline stages send at the same time; return their indices."""
    # The layers of a stage lie on the ranks of that stage, so in the order of the layers one stage after the other
    # would send. The tensors of each set of ranks are spread evenly over the order by their bytes: a tensor's place is
    # the fraction of the bytes of its set that lie before its middle.
    totals: dict[tuple[Members, Members], int] = {}
    twice_middles = []
    for item in items:
        key = item.source.holders.members, item.target.holders.members
        nbytes = math.prod(item.source.shape) * item.carried.itemsize
        twice_middles.append((key, 2 * totals.get(key, 0) + nbytes))
        totals[key] = totals.get(key, 0) + nbytes
    # Fractions compare exactly, so every rank gets the same order.
    places = [Fraction(twice_middle, max(totals[key], 1)) for key, twice_middle in twice_middles]
    return sorted(range(len(items)), key=lambda index: (places[index], index))


def _all_routes(items: Sequence[Item], ranks: Sequence[int], every_replica: bool) -> _AllRoutes:
    """Return the routes of all pairs of layouts that tensors have; boxes are dense."""
    group = members_of(np.array(ranks, np.int64).tobytes())
    places: dict[Members, Array] = {}
    result: _AllRoutes = {}
    for item in items:
        pair = item.source, item.target
        if pair not in result:
            for members in (layout.holders.members for layout in pair):
                if members not in places:
                    places[members] = group.places_of(members.ids)
            ends = places[item.source.holders.members], places[item.target.holders.members]
            result[pair] = Routes(*pair, ends, every_replica)
    return result


def _classes(items: Sequence[Item], routes: _AllRoutes, world: int) -> Classes:
    """Return the classes of a group: each rank of a class counts the most that one of them sends, or receives."""
    # In a small group every rank is a class. In a large one a class has the ranks that are in the same layouts. Its
    # bytes are bounds, which take no look at pairs of ranks.
    if world <= _SMALL_GROUP:
        return Classes(np.stack([np.arange(world)] * 2))
    # Senders have the source layouts, receivers the target layouts.
    sides: tuple[_Held, _Held] = {}, {}
    for item in items:
        layouts = item.source, item.target
        for held, layout, places in zip(sides, layouts, routes[layouts].places, strict=True):
            held[layout] = places, held.get(layout, (places, 0))[1] + item.carried.itemsize
    common = np.zeros(world, np.int64)
    sets = {layout.holders.members: places for held in sides for layout, (places, _) in held.items()}
    for places in sets.values():
        common = _refined(common, places, np.zeros_like(places))
    ranks = np.arange(world)
    # Ranks that divide a buffer hold different tensors: a class of them would count all of these for each. So each rank
    # is a class, or in very large groups a few neighbours, which hold the same tensors in a buffer.
    ranks_per_class = -(-world // _MOST_RANKS)
    by_neighbours = _refined(common, ranks, ranks // ranks_per_class)
    senders, receivers = (by_neighbours if _is_uneven(held, common) else common for held in sides)
    # Replicas that serve different bytes are in different classes, unless there would be too many of these.
    for holders, places in {each.source.holders: each.places[0] for each in routes.values() if each.has_table}.items():
        finer = _refined(senders, places[holders.owner], holders.nth)
        senders = finer if finer.max() < _MOST_CLASSES else senders
    return Classes(np.stack([senders, receivers]))


def _is_uneven(held: _Held, classes: Array) -> bool:
    """Whether ranks of a class hold their bytes of different tensors, as ranks that divide a buffer."""
    # By position the bytes that the rank holds. By class the bytes of its largest rank, taken for each layout anew: it
    # is more than any rank holds where the largest rank changes from layout to layout.
    total, most = np.zeros(len(classes)), np.zeros(int(classes.max(initial=0)) + 1)
    for layout, (places, itemsize) in held.items():
        holders, of_class = layout.holders, np.zeros_like(most)
        elements = np.bincount(holders.owner, layout.size.prod(1)[holders.region], len(places))
        np.maximum.at(of_class, classes[places], elements)
        total[places] += elements * itemsize
        most += of_class * itemsize
    return bool(most.max() > _UNEVEN * total.max())


def _refined(classes: Array, places: Array, label: Array) -> Array:
    """Divide classes: ranks with and without a label, and ranks with different ones, come into different classes.

    Args:
        classes: class of every position of the group.
        places: positions with a label.
        label: label of each of them.
    """
    result = classes.copy()
    # Classes and labels as digits of one number, above all classes without a label; then numbered from 0.
    result[places] = (classes[places] + 1) * (int(label.max(initial=0)) + 1) * (int(classes.max()) + 2) + label
    return np.unique(result, return_inverse=True)[1]


class _Planner:
    """State of a plan while tensors are added: open buckets with the bytes of ranks, and this rank's blocks."""

    def __init__(
        self, items: tuple[Item, ...], ranks: Ints, position: int, bucket_bytes: int, every_replica: bool
    ) -> None:
        self.items, self.ranks, self.position = items, ranks, position
        self.limit = min(bucket_bytes, 2**62)  # more is not an int64
        self.every_replica, self.world = every_replica, len(ranks)
        self.dims = max((len(item.source.shape) for item in items), default=0) or 1
        self.itemsizes = np.array([item.carried.itemsize for item in items], np.int64)
        self.routes = _all_routes(items, ranks, every_replica)
        self.classes = _classes(items, self.routes, self.world)
        self.loads: dict[Holders, Array] = {}  # bytes that every replica of a region sends
        self.own: dict[Routes, Requests] = {}  # requests of this rank, and those that it may have to serve
        self.blocks: dict[Routes, tuple[Array, Array]] = {}  # of routes without a table
        self.bounds: dict[Routes, Bounds] = {}  # of routes without a table that several tensors have
        self.uses = Counter(self.routes[item.source, item.target] for item in items)
        self.count = 0  # of buckets
        # Bytes of a rank of every class in the last _OPEN buckets, the open ones: bucket b has row ``b % _OPEN``.
        self.loaded = np.zeros((_OPEN, self.classes.count), np.int64)
        self.assigned: list[_Assigned] = []
        self.flat: list[Array] = []  # bucket, tensor, sender and receiver of this rank's blocks
        self.boxes: list[Array] = []  # start in the source, start in the target, and size of this rank's blocks

    def add(self, index: int) -> None:
        """Add tensor ``index``: choose its senders, put its messages into buckets, and store this rank's blocks."""
        item = self.items[index]
        routes, holders, table = self.routes[item.source, item.target], item.source.holders, None
        if routes.has_table:
            loads = self.loads.setdefault(holders, np.zeros(holders.most, np.int64))
            table = routes.table_of(loads, item.carried.itemsize)
        load_of = self._load_function(routes, table, item.carried.itemsize)
        load, buckets = load_of(1), [0]  # bucket 0 has the tensors of which nothing is sent
        if load.any():
            parts = self._parts(item, load, load_of)
            buckets = self._with_room(load if parts == 1 else load_of(parts), parts)
        self.assigned.append(_Assigned(index, table, buckets))
        self._note(index, routes, table, buckets)

    def _load_function(self, routes: Routes, table: Array | None, itemsize: int) -> Callable[[int], Array]:
        """Return a function from a number of parts to the bytes of a rank of every class in a part, ``[classes]``."""
        # An upper bound in a large group; in a small one the bytes of the largest part.
        if self.world > _SMALL_GROUP:
            bounds = self.bounds.get(routes) or routes.bounds(self.classes, table)
            if table is None and self.uses[routes] > 1:
                self.bounds[routes] = bounds
            return lambda parts: bounds.nbytes(itemsize, routes.unit, parts)
        # Every rank is a class here, the senders before the receivers, in the order of ``_load_of``.
        ends, volume = routes.remote(table)
        sender, receiver = ends
        return lambda parts: _load_of(
            sender, receiver, most_of_a_part(volume, parts) * itemsize, self.world, routes.is_single
        ).reshape(-1)

    def _parts(self, item: Item, load: Array, load_of: Callable[[int], Array]) -> int:
        """Return the number of parts into which a tensor has to be divided for each part to fit into a bucket.

        ``load`` are the bytes per class of the undivided tensor; ``load_of(n)`` returns those of the largest of n
        parts.
        """
        parts, most = 1, item.source.elements
        while load.max() > self.limit:
            if parts >= most:
                raise ArgumentError(
                    f"reshard: bucket_bytes {self.limit} is too small for {item.name}: one element for every peer "
                    f"takes {int(load.max())} bytes"
                )
            # Alignment makes the bytes of a part more than its share, so the estimate may need another round.
            parts = min(most, max(parts + 1, parts * int(load.max()) // self.limit))
            load = load_of(parts)
        return parts

    def _with_room(self, load: Array, parts: int) -> list[int]:
        """Add the parts of a tensor to the first open buckets with room for them, one to each; return their numbers.

        ``load`` are the bytes of each part that a rank of every class has, ``[classes]``.
        """
        numbers, room = np.arange(max(self.count - _OPEN, 0), self.count), self.limit - load
        heaviest = load.argmax()  # the class in which most full buckets show that they are full
        likely = numbers[self.loaded[numbers % _OPEN, heaviest] <= room[heaviest]]
        fits = (number for number in likely.tolist() if (self.loaded[number % _OPEN] <= room).all())
        chosen = list(itertools.islice(fits, parts))
        for number in chosen:
            self.loaded[number % _OPEN] += load
        # A new bucket takes the place of the oldest open one.
        opened = range(self.count, self.count + parts - len(chosen))
        for number in opened:
            self.loaded[number % _OPEN] = load
        self.count = opened.stop
        return [*chosen, *opened]

    def _note(self, index: int, routes: Routes, table: Array | None, buckets: list[int]) -> None:
        """Store the blocks of one tensor that this rank sends, receives or keeps, for the plan that ``finish`` returns.

        ``buckets`` has the bucket of every part of the tensor, which is cut into so many.
        """
        ends, boxes = self._blocks_of(routes, table)
        part = np.zeros(len(ends[0]), np.int64)
        if len(buckets) > 1:
            place, part, start, size = split_into_parts(np.zeros_like(boxes[2]), boxes[2], len(buckets))
            ends, boxes = ends[:, place], np.stack([boxes[0][:, place] + start, boxes[1][:, place] + start, size])
        # By row: bucket, tensor, sender, receiver; first index in the local tensor before and after, extent.
        if len(part):
            self.flat.append(np.stack([np.array(buckets, np.int64)[part], np.full_like(part, index), *ends]))
            self.boxes.append(boxes)

    def _blocks_of(self, routes: Routes, table: Array | None) -> tuple[Array, Array]:
        """Return the blocks of one tensor that this rank sends, receives or keeps, sorted by region and target box.

        Returns:
            Sender and receiver of every block, ``[2, blocks]``; its first index in the local tensor before and after
            and its extent, ``[3, dims, blocks]``. Tensors of fewer dims have leading ones.
        """
        if table is None and routes in self.blocks:
            return self.blocks[routes]
        if self.world <= _SMALL_GROUP:
            requests, (box, ends) = routes.all, routes.all_served(table)  # listed already, for the bytes of every rank
        else:
            requests = self.own[routes] = self.own.get(routes) or routes.of_rank(self.ranks[self.position])
            box, ends = routes.served(requests, table)
        chosen = np.nonzero((ends == self.position).any(0))[0]
        low, box, target = requests.low[:, chosen], box[chosen], requests.target[chosen]
        source_box, target_box = routes.source.boxes(box), routes.target.boxes(target)
        boxes = np.zeros((3, self.dims, len(chosen)), np.int64)
        boxes[2] = 1
        first = self.dims - len(low)
        # From an index of the global tensor to that of the local one: ``at`` is the box's start there.
        boxes[0, first:] = low + (source_box.at - source_box.start).T
        boxes[1, first:] = low + (target_box.at - target_box.start).T
        boxes[2, first:] = requests.size[:, chosen]
        result = ends[:, chosen], boxes
        if table is None:
            self.blocks[routes] = result
        return result

    def finish(self) -> TransferPlan:
        """Return the transfer plan of this rank: every bucket's blocks."""
        is_quiet = not self.count  # no messages: one bucket has the staying blocks
        count = self.count or 1
        flat = np.concatenate([np.empty((4, 0), np.int64), *self.flat], 1)
        boxes = np.concatenate([np.empty((3, self.dims, 0), np.int64), *self.boxes], 2)
        bucket, tensor, sender, receiver = flat
        stays = sender == receiver
        sides = partial(self._sides, bucket=bucket, tensor=tensor, size=boxes[2], count=count)
        sent = sides(boxes[0], peer=receiver, is_chosen=~stays & (sender == self.position))
        received = sides(boxes[1], peer=sender, is_chosen=~stays & (receiver == self.position))
        staying = np.nonzero(stays)[0]
        staying = staying[np.argsort(bucket[staying], kind="stable")]
        ends = np.searchsorted(bucket[staying], np.arange(count + 1))
        buckets = []
        for number in range(count):
            here = staying[ends[number] : ends[number + 1]]
            source, target, size = boxes[:, :, here]
            blocks = StayingBlocks(tensor[here], source, target, size, _NO_WIRE)
            staged, nbytes, direct = self._staged(blocks, sent[number], received[number])
            buckets.append(Bucket(sent[number], received[number], staged, nbytes, direct, is_quiet))
        is_source, is_target = np.zeros((2, self.world), bool)
        for routes in self.routes.values():
            is_source[routes.places[0]] = is_target[routes.places[1]] = True
        totals = partial(_totals, self.items, self.ranks, self.every_replica, self.assigned, count)
        return TransferPlan(
            self.items, self.ranks, self.position, tuple(buckets), is_disjoint=not (is_source & is_target).any(),
            sums=self.every_replica, count_totals=totals,
        )  # fmt: skip

    def _staged(self, blocks: StayingBlocks, sent: Side, received: Side) -> tuple[StayingBlocks, int, StayingBlocks]:
        """Divide a bucket's staying blocks; return the staged ones, their bytes, and the direct ones."""
        nbytes = _aligned(blocks.size.prod(0) * self.itemsizes[blocks.tensor])
        # Few bytes are staged, all or none of them, where the bucket has a pack and an unpack anyway.
        has_passes = self.every_replica or (sent.nbytes > 0 and received.nbytes > 0)
        is_staged = has_passes and nbytes.sum() <= min(_SMALL, self.limit)
        chosen = np.arange(len(nbytes)) if is_staged else np.arange(0)
        if self.every_replica:
            pairs = (blocks.tensor, received.tensor), (blocks.target, received.start), (blocks.size, received.size)
            # Blocks that are summed with received ones have to be in the staging memory whatever their size.
            is_summed = has_overlap(*(np.concatenate(pair, -1) for pair in pairs))[: len(nbytes)]
            chosen = np.union1d(chosen, np.nonzero(is_summed)[0])
        ends = np.cumsum(nbytes[chosen])
        staged = blocks.pick(chosen, wire=ends - nbytes[chosen])
        staged_bytes = int(ends[-1]) if len(ends) else 0
        not_staged = np.setdiff1d(np.arange(len(nbytes)), chosen)
        return staged, staged_bytes, blocks.pick(not_staged, wire=_NO_WIRE)

    def _sides(
        self, start: Array, size: Array, bucket: Array, tensor: Array, peer: Array, is_chosen: NDArray[np.bool_],
        count: int,
    ) -> list[Side]:  # fmt: skip
        """Lay out the blocks that this rank sends, or receives, on the wire; return one side per bucket.

        Args:
            start, size: first index and extent of every block in its local tensor, ``[dims, blocks]``.
            peer: position in the group of the rank on the other end.
            is_chosen: whether a block is sent (or received) by this rank; the other blocks are left out.
            count: number of buckets.
        """
        chosen = np.nonzero(is_chosen)[0]
        # The order of the wire: bucket, peer, tensor, and then the order of the blocks, which is equal on both ends.
        chosen = chosen[np.lexsort((tensor[chosen], peer[chosen], bucket[chosen]))]
        start, size = start[:, chosen], size[:, chosen]
        bucket, tensor, peer = bucket[chosen], tensor[chosen], peer[chosen]
        nbytes = size.prod(0) * self.itemsizes[tensor]
        # A group is the blocks of one tensor in one message. Each group is padded at its end, so that the next one is
        # aligned. ``firsts`` has the first block of each group, and ``group`` the group of each block.
        firsts, group = _runs(bucket, peer, tensor)
        exact = _totals_by(group, nbytes, len(firsts))
        aligned = _aligned(exact)
        padding = aligned - exact
        # A block begins behind all blocks before it, and behind the padding of all groups before its own.
        bytes_before, padding_before = np.cumsum(nbytes) - nbytes, np.cumsum(padding) - padding
        wire = bytes_before + padding_before[group]
        # A message is the groups for one peer in one bucket. ``starts`` has the first group of each message.
        starts, message = _runs(bucket[firsts], peer[firsts])
        lengths = _totals_by(message, aligned, len(starts))
        bucket_of_message = bucket[firsts][starts]
        # Every bucket has a wire of its own, so that the bytes of the buckets before do not count.
        bucket_ends = np.cumsum(_totals_by(bucket_of_message, lengths, count))
        bucket_starts = np.concatenate([np.zeros(1, np.int64), bucket_ends])
        wire -= bucket_starts[bucket]
        numbers = np.arange(count + 1)
        blocks, messages = np.searchsorted(bucket, numbers), np.searchsorted(bucket_of_message, numbers)
        peers = peer[firsts][starts]
        return [
            Side(tensor[a:b], start[:, a:b], size[:, a:b], wire[a:b], peers[c:d], lengths[c:d], self.world)
            for a, b, c, d in zip(blocks, blocks[1:], messages, messages[1:], strict=False)
        ]


def _runs(*keys: Array) -> tuple[Array, Array]:
    """Group neighbours with equal keys; return the first element of every group, and the group of every element."""
    opens = np.zeros(len(keys[0]), bool)
    opens[:1] = True
    for key in keys:
        opens[1:] |= key[1:] != key[:-1]
    return np.nonzero(opens)[0], np.cumsum(opens) - 1


def _load_of(sender: Array, receiver: Array, nbytes: Array, world: int, is_single: bool) -> Array:
    """Sum the bytes that every rank sends, and that every rank receives, of one tensor: return ``[2, world]``.

    ``is_single``: no pair of ranks has two blocks.
    """
    if not is_single:
        pair, inverse = np.unique(sender * world + receiver, return_inverse=True)
        nbytes = _totals_by(inverse, nbytes, len(pair))
        sender, receiver = np.divmod(pair, world)
    # Per pair of ranks, as on the wire: the blocks of a tensor in a message are aligned together.
    nbytes = nbytes + (ALIGNMENT - 1) & -ALIGNMENT
    return np.stack([_totals_by(place, nbytes, world) for place in (sender, receiver)])


def _totals(
    items: tuple[Item, ...], ranks: Ints, every_replica: bool, assigned: Sequence[_Assigned], count: int
) -> Totals:
    """Count the bytes and messages of all ranks of a plan; ``assigned`` has the tensors' buckets, ``count`` of them."""
    world, routes = len(ranks), _all_routes(items, ranks, every_replica)
    loads = np.zeros((count, 2, world), np.int64)  # bytes that every rank sends and receives in every bucket
    lacking = np.zeros(world, np.int64)
    # Of every bucket the pairs of ranks that have a message, each as ``sender * world + receiver``. Whole tensors with
    # the same routes have the same pairs, which are listed once; parts and tensors with a table have their own.
    pairs_of_routes: list[dict[Routes, Array]] = [{} for _ in range(count)]
    pairs_of_tensors: list[dict[int, Array]] = [{} for _ in range(count)]
    for index, table, buckets in assigned:
        item = items[index]
        tensor_routes, itemsize = routes[item.source, item.target], item.carried.itemsize
        (sender, receiver), volume = tensor_routes.remote(table)
        lacking += _totals_by(receiver, volume * itemsize, world)
        is_whole = table is None and len(buckets) == 1
        for part, bucket in enumerate(buckets):
            first, end = (first_of_part(volume, len(buckets), number) for number in (part, part + 1))
            elements = end - first
            loads[bucket] += _load_of(sender, receiver, elements * itemsize, world, tensor_routes.is_single)
            pairs = (sender * world + receiver)[elements > 0]
            if is_whole:
                pairs_of_routes[bucket].setdefault(tensor_routes, pairs)
            else:
                pairs_of_tensors[bucket].setdefault(index, pairs)
    pairs_of_buckets = [
        [*of_routes.values(), *of_tensors.values()]
        for of_routes, of_tensors in zip(pairs_of_routes, pairs_of_tensors, strict=True)
    ]
    largest_of_bucket = loads.max((1, 2), initial=0)
    bytes_sent, bytes_received = loads.sum(0)
    return Totals(
        bytes_sent, bytes_received, lacking, _sent_messages(pairs_of_buckets, world),
        int(largest_of_bucket.max()), int(largest_of_bucket.sum()),
    )  # fmt: skip


def _sent_messages(pairs_of_buckets: Sequence[Sequence[Array]], world: int) -> Array:
    """Count the messages that every rank sends: one to each receiver in a bucket; pairs are as in ``_totals``."""
    counts, empty = np.zeros(world, np.int64), np.empty(0, np.int64)
    for pairs in pairs_of_buckets:
        distinct = np.unique(np.concatenate([empty, *pairs]))
        counts += np.bincount(distinct // world, minlength=world)
    return counts


def _aligned(nbytes: Array) -> Array:
    """Round bytes up to multiples of ``ALIGNMENT``."""
    return nbytes + (ALIGNMENT - 1) & -ALIGNMENT


def _totals_by(index: Array, nbytes: Array, count: int) -> Array:
    """Sum bytes by index: return ``count`` sums. A double, in which numpy sums, holds every number of bytes exactly."""
    return np.bincount(index, nbytes, count).astype(np.int64)
