"""Routes of one tensor between two layouts: the elements that ranks lack, and the replica that sends each of them.

A *request* is an intersection of a source region with a target box of one rank. Every rank computes the requests of its
own boxes only. Sender and receiver of a request agree without a word, because its sender follows from places:

- The requests of a region form a *line*, on which each is as long as its elements: in the order of the elements, and
  for the same elements in the order of the ranks. Requests of ranks that hold the region are taken out.
- The line is cut into equally long *slots*, one per replica. A request is in the slot that its middle lies in.
- A table, which is the same for all regions, says which replica serves a slot.
"""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm.reshard.boxes import Array, Boxes, distinct_rows
from tritoncomm.reshard.holders import Holders, pair_boxes_by_rank
from tritoncomm.reshard.intersections import BoxIndex
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.plan import ALIGNMENT

__all__ = ["Bounds", "Classes", "Requests", "Routes"]


class Requests(NamedTuple):
    """Some requests of a tensor, sorted by region and then by target box.

    Attributes:
        region: source region of every request.
        target: target box of every request.
        low, size: first index and extent of every request's box, ``[dims, requests]``.
        own: the receiver's own source box with these elements, which then stay; -1 if it has none.
        slot: slot of every request on its region's line.
    """

    region: Array
    target: Array
    low: Array
    size: Array
    own: Array
    slot: Array

    def pick(self, chosen: Array) -> "Requests":
        """Return some of the requests, by their indices."""
        return Requests(*(each[..., chosen] for each in self))


class Bounds(NamedTuple):
    """Largest numbers of elements and requests that a rank of every class sends, or receives: each ``[classes]``."""

    elements: Array
    requests: Array

    def nbytes(self, itemsize: int, unit: int, parts: int) -> Array:
        """Return the most bytes of a part of the tensor, alignment included, ``[classes]``; see ``Routes.unit``."""
        if parts == 1:
            # A request's bytes are a multiple of ``unit * itemsize``, which limits the padding.
            padding = ALIGNMENT - math.gcd(ALIGNMENT, unit * itemsize)
            nbytes = self.elements * itemsize + self.requests * padding
        else:  # a part of a request is longer than its share by a 32nd at most, or by an element
            share = self.elements // parts * 33 // 32 + 2
            nbytes = share * itemsize + self.requests * (itemsize + ALIGNMENT - 1)
        return np.where(self.elements > 0, nbytes, 0)


class Classes:
    """Classes of ranks whose bytes are counted together: some of senders and others of receivers.

    Attributes:
        of: class of every position of the group as a sender and as a receiver, ``[2, world]``; receivers' classes are
            numbered behind senders'. Ranks of one class are in the same layouts.
        count: number of both.
    """

    def __init__(self, of: Array) -> None:
        senders = int(of[0].max(initial=-1)) + 1
        self.of, self.count = np.stack([of[0], of[1] + senders]), senders + int(of[1].max(initial=-1)) + 1
        self._regions: dict[tuple[int, Holders], tuple[Array, Array]] = {}

    def regions(self, side: int, holders: Holders, places: Array) -> tuple[Array, Array]:
        """Return the pairs of a class and a region that ranks with one box each have.

        Args:
            side: 0 for classes of senders, 1 for classes of receivers.
            places: position in the group of every rank.
        """
        if (side, holders) not in self._regions:
            pairs = np.unique(self.of[side][places] * len(holders.counts) + holders.region)
            of, region = np.divmod(pairs, max(len(holders.counts), 1))
            self._regions[side, holders] = of, region
        return self._regions[side, holders]


class _Held(NamedTuple):
    """Pairs of a source box and a target box of one rank, one per region and target box, sorted by these.

    Attributes:
        source_box, target_box: of every pair.
        volume: number of elements that the two share; 0 if they do not meet.
        before: elements of the region before these; see ``_before``.
    """

    source_box: Array
    target_box: Array
    volume: Array
    before: Array


class _Distinct(NamedTuple):
    """Distinct values of the regions, and the index of every region's value."""

    values: Array
    index: Array


class _Slots(NamedTuple):
    """The most elements and the most requests in every slot: each ``[kinds of lines, most replicas]``."""

    elements: Array
    requests: Array


class _Line(NamedTuple):
    """Lines of all source regions, a value per region.

    Attributes:
        length: elements of the requests of every region.
        span: the line's length; longer than the requests where some elements are requested less often than others.
        most: the most elements of a request of every region.
        requests: number of requests of every region, at most; exact where they are equally long.
        is_even: whether the requests of a region fill its line and are equally long.
        slots: number of slots of every region.
    """

    length: Array
    span: Array
    most: Array
    requests: Array
    is_even: NDArray[np.bool_]
    slots: Array


class Routes:
    """Requests of one tensor.

    Args:
        places: position in the group of every rank of the source layout, and of the target layout.
        every_replica: each replica of a region serves every request, and the receivers sum.
    """

    def __init__(self, source: Layout, target: Layout, places: tuple[Array, Array], every_replica: bool) -> None:
        self.source, self.target, self.places, self.every_replica = source, target, places, every_replica
        # Whether one of several replicas is chosen to serve a request; if not, every slot is 0 or a replica's own.
        self.has_choice = not every_replica and source.holders.most > 1

    def of_rank(self, rank: int) -> Requests:
        """Return the requests of a global rank, then those of other ranks for regions that it holds."""
        source, target = self.source.holders, self.target.holders
        # What this rank receives, and what others want of the regions that it holds: it may be the one to send these.
        held, own = source.boxes_of_rank(rank), target.boxes_of_rank(rank)
        region = target.region[own]
        met = self.source.index.meeting(self.target.start[region], self.target.size[region])
        received = self._requests(met.other, own[met.one], met.low, met.size)
        sent = self._for_regions(np.unique(source.region[held]))
        sent = sent.pick(np.nonzero(target.owner[sent.target] != target.members.place_of(rank))[0])
        return Requests(*(np.concatenate(each, -1) for each in zip(received, sent, strict=True)))

    def served(self, requests: Requests, table: Array | None = None) -> tuple[Array, Array]:
        """Return the source box that serves each request, and its sender and receiver, ``[2, requests]``.

        Both are positions in the group. A request for elements that stay has the receiver's own box.

        Args:
            table: the replica that serves each slot, of every number of replicas, ``[numbers, slots]``; see
                ``table_of``. None: slot and replica have the same number.
        """
        holders, replica = self.source.holders, requests.slot
        if table is not None:
            replica = table[self._replicas.index[requests.region], replica]
        # ``order`` lists the boxes region by region, and ``first`` has the place of each region's first box in it.
        box_of_replica = holders.order[holders.first[requests.region] + replica]
        box = np.where(requests.own >= 0, requests.own, box_of_replica)
        owners = holders.owner[box], self.target.holders.owner[requests.target]
        return box, np.stack([place[owner] for place, owner in zip(self.places, owners, strict=True)])

    def all_served(self, table: Array | None) -> tuple[Array, Array]:
        """Return ``served`` of all requests."""
        return self._all_served if table is None else self.served(self.all, table)

    @cached_property
    def _all_served(self) -> tuple[Array, Array]:
        """Result of ``served`` for all requests, without a table."""
        return self.served(self.all)

    def remote(self, table: Array | None) -> tuple[Array, Array]:
        """Return the ends and the elements of all requests between two ranks, for reports and small groups."""
        return self._everything if table is None else self._remote(table)

    @cached_property
    def _everything(self) -> tuple[Array, Array]:
        """Ends and elements of all requests between two ranks, without a table."""
        return self._remote()

    def _remote(self, table: Array | None = None) -> tuple[Array, Array]:
        """Find ends and elements of all requests between two ranks; see ``remote``."""
        _, ends = self.all_served(table)
        is_remote = ends[0] != ends[1]
        return ends[:, is_remote], self.all.size.prod(0)[is_remote]

    @cached_property
    def all(self) -> Requests:
        """Requests of all ranks, for small groups and for reports."""
        return self._for_regions(np.arange(len(self.source.start)))

    @property
    def is_single(self) -> bool:
        """Whether no pair of ranks has two requests: each rank has one box on both sides."""
        return self.source.holders.is_simple and self.target.holders.is_simple

    @cached_property
    def has_table(self) -> bool:
        """Whether the slots of a region have different bytes, so that it matters which replica serves which slot."""
        if self.every_replica or self.source.holders.most <= 1:
            return False
        return len(self._replicas.values) > 1 or bool((self._slots.elements != self._slots.elements[:, :1]).any())

    def table_of(self, loads: Array, itemsize: int) -> Array:
        """Assign the replicas with the least load so far to the slots with the most bytes; add these to the loads.

        Args:
            loads: bytes of every replica so far, ``[most replicas]``; increased by this tensor's.

        Returns:
            The replica that serves each slot, for each number of replicas that regions have, ``[numbers, slots]``.
        """
        # The largest slot of all kinds of lines, as one table serves all regions.
        weights = self._slots.elements.max(0)
        heaviest, idlest = np.argsort(-weights, kind="stable"), np.argsort(loads, kind="stable")
        table = np.tile(np.arange(len(loads)), (len(self._replicas.values), 1))
        # Of regions with that many replicas: the heaviest slot to the idlest of them, the next one to the next, and so
        # on.
        for row, number in zip(table, self._replicas.values.tolist(), strict=True):
            row[heaviest[heaviest < number]] = idlest[idlest < number]
        # The last row is of the largest number of replicas, so it has a slot for each of them.
        loads[table[-1]] += weights * itemsize
        return table

    def bounds(self, classes: Classes, table: Array | None) -> Bounds:
        """Return the most that a rank of every class sends and receives, without a look at pairs of ranks."""
        source, target, held = self.source.holders, self.target.holders, self._held
        result = Bounds(*np.zeros((2, classes.count), np.int64))

        def add(of: Array, elements: Array, requests: Array) -> None:
            np.maximum.at(result.elements, of, elements)
            np.maximum.at(result.requests, of, requests)

        needed, asked = self._needed
        if self.is_single and table is None and not self.every_replica:
            # Ranks that have the same region and are in one layout only are alike. As senders they serve slot 0, the
            # one that a line has here.
            of, region = classes.regions(0, source, self.places[0])
            kind = self._kinds.index[region]
            add(of, self._slots.elements[kind, 0], self._slots.requests[kind, 0])
            of, region = classes.regions(1, target, self.places[1])
            is_source = np.zeros(classes.count, bool)
            is_source[classes.of[1][self.places[0]]] = True
            apart = ~is_source[of]  # they hold nothing of what they need; the others follow, less what stays
            add(of[apart], needed[region[apart]], asked[region[apart]])
            region = target.region[held.target_box]
            add(classes.of[1][self.places[1][held.target_box]], needed[region] - held.volume, asked[region])
            return result
        # By source box: the elements that it sends and the requests that it answers, less the elements that stay.
        if self.every_replica:
            served, answers = self._line.length[source.region], self._line.requests[source.region]
            np.subtract.at(served, held.source_box, held.volume)
        else:
            slot = source.nth
            if table is not None:
                # The inverse of the table: from replicas to slots.
                slot = np.argsort(table, 1)[self._replicas.index[source.region], slot]
            kind = self._kinds.index[source.region]
            served, answers = self._slots.elements[kind, slot], self._slots.requests[kind, slot]
        # By target box: the elements that it needs and the requests for them.
        needed, asked = needed[target.region], asked[target.region]
        np.subtract.at(needed, held.target_box, held.volume)
        for side, holders, values in ((0, source, (served, answers)), (1, target, (needed, asked))):
            of_ranks = (np.bincount(holders.owner, each, len(self.places[side])).astype(np.int64) for each in values)
            add(classes.of[side][self.places[side]], *of_ranks)
        return result

    @cached_property
    def _needed(self) -> tuple[Array, Array]:
        """Elements that every target region needs, and number of the requests for them, at most."""
        copies = self.source.holders.most if self.every_replica else 1
        return _covered(self.target, self.source, self.every_replica), _meetings(self.target, self.source)[1] * copies

    @cached_property
    def unit(self) -> int:
        """Number of elements that divides the elements of every request."""
        # A request starts and ends at edges of both layouts, so the gcd of a dim's edges divides its extent in that
        # dim.
        edges = zip(*((each for each, _ in layout.intervals) for layout in (self.source, self.target)), strict=True)
        return math.prod(int(np.gcd.reduce(np.concatenate(each), None)) for each in edges)

    @cached_property
    def _held(self) -> _Held:
        """Elements that ranks have before and after."""
        if self.is_single:
            return self._held_by_rank()
        source, target = self.source.holders, self.target.holders
        # The rank becomes one more dim of the boxes, the first one, so that boxes of different ranks do not meet.
        # ``label`` is the place of a source box's rank in the target layout, -1 without one.
        label = target.members.places_of(source.members.ids)[source.owner]
        is_both = np.zeros(len(target.members.ids), bool)
        is_both[label[label >= 0]] = True
        source_box, target_box = np.nonzero(label >= 0)[0], np.nonzero(is_both[target.owner])[0]
        sources, targets = self.source.boxes(source_box), self.target.boxes(target_box)
        met = BoxIndex(*_with_rank(targets, target.owner[target_box])).meeting(*_with_rank(sources, label[source_box]))
        source_box, target_box, low, size = source_box[met.one], target_box[met.other], met.low[1:], met.size[1:]
        region = source.region[source_box]
        order = np.lexsort((source_box, target_box, region))
        is_first = np.ones(len(order), bool)  # a rank may have the same box twice
        is_first[1:] = (np.diff(region[order]) != 0) | (np.diff(target_box[order]) != 0)
        order = order[is_first]
        first_element = self._before(region, low, size)
        return _Held(source_box[order], target_box[order], size.prod(0)[order], first_element[order])

    def _held_by_rank(self) -> _Held:
        """Find ``_held`` where each rank has one box on both sides."""
        pairs = pair_boxes_by_rank(self.source.holders, self.target.holders)
        region, target_region = pairs.regions
        low = np.maximum(self.source.start[region], self.target.start[target_region]).T
        source_end = (self.source.start + self.source.size)[region]
        target_end = (self.target.start + self.target.size)[target_region]
        size = np.maximum(np.minimum(source_end, target_end).T - low, 0)
        volume, first_element = size.prod(0), self._before(region, low, size)
        pair = pairs.region_pair
        return _Held(pairs.source_box, pairs.target_box, volume[pair], first_element[pair])

    @cached_property
    def _line(self) -> _Line:
        """Line of every source region."""
        source, counts = self.source, self.target.holders.counts
        length = _covered(source, self.target, counts_replicas=True)
        most, meets, is_even = _meetings(source, self.target)
        # Upper bounds: as if every element were requested by as many ranks as the most wanted one.
        most_wanted = counts.max(initial=0)
        span, requests = most_wanted * source.size.prod(1), most_wanted * meets
        if not self.every_replica:
            for total in (length, span):
                np.subtract.at(total, source.holders.region[self._held.source_box], self._held.volume)
        most = np.maximum(most, 1)
        is_even = is_even & (length == span)
        if "overlap" in self.target.problem:  # requests lie over each other on the line
            is_even = np.zeros_like(is_even)
        requests = np.where(is_even, length // most, requests)
        slots = np.clip(-(-length // most), 1, source.holders.counts)
        return _Line(length, np.maximum(span, 1), most, requests, is_even, slots)

    @cached_property
    def _replicas(self) -> _Distinct:
        """Distinct numbers of replicas of the regions, ascending."""
        return _Distinct(*np.unique(self.source.holders.counts, return_inverse=True))

    @cached_property
    def _kinds(self) -> _Distinct:
        """Distinct lines of the regions, ``[kinds, fields]``."""
        rows = np.stack([*(each.astype(np.int64) for each in self._line)], 1)
        first, kind = distinct_rows(rows)
        return _Distinct(rows[first], kind)

    @cached_property
    def _slots(self) -> _Slots:
        """Slots of every kind of line."""
        # The fields of ``_Line`` by name, one row per kind of line; columns are slots.
        length, span, most, requests, is_even, slots = (each[:, None] for each in self._kinds.values.T)
        slot = np.arange(self.source.holders.most + 1)
        # Request j of n equal ones is in slot (2j + 1) * slots // 2n.
        firsts = np.clip(-(-(2 * requests * slot - slots) // (2 * slots)), 0, requests)
        exact = np.diff(firsts, axis=1)
        # A slot is ``span // slots`` long, and a request whose middle is in it may reach past both of its ends.
        bound = length if "overlap" in self.target.problem else np.minimum(length, span // slots + 1 + most)
        is_slot = slot[:-1] < slots
        elements = np.where(is_even > 0, exact * most, bound) * is_slot
        return _Slots(elements, np.where(is_even > 0, exact, requests) * is_slot)

    def _for_regions(self, region: Array) -> Requests:
        """Return the requests for some source regions, of all ranks."""
        met = self.target.index.meeting(self.source.start[region], self.source.size[region])
        boxes, index = self.target.holders.boxes_in(met.other)
        return self._requests(region[met.one][index], boxes, met.low[:, index], met.size[:, index])

    def _requests(self, region: Array, target: Array, low: Array, size: Array) -> Requests:
        """Sort some requests, and find for each the receiver's own box with its elements, and its slot."""
        order = np.lexsort((target, region))
        region, target, low, size = region[order], target[order], low[:, order], size[:, order]
        holders, receivers = self.source.holders, self.target.holders
        if self.every_replica:
            # Repeat each request for every box that holds its region; ``index`` is the number of the repeated request.
            source_box, index = holders.boxes_in(region)
            region, target, low, size = region[index], target[index], low[:, index], size[:, index]
            stays = self.places[0][holders.owner[source_box]] == self.places[1][receivers.owner[target]]
            own = np.where(stays, source_box, -1)
            return Requests(region, target, low, size, own, holders.nth[source_box])
        # Region and target box as one number. ``_held`` is sorted by it, so a search finds the receiver's own box.
        held, num_targets = self._held, len(receivers.owner)
        held_key = holders.region[held.source_box] * num_targets + held.target_box
        key = region * num_targets + target
        nearest = np.searchsorted(held_key, key)
        own = np.full(len(key), -1)
        found = np.nonzero(nearest < len(held_key))[0]
        found = found[held_key[nearest[found]] == key[found]]
        own[found] = held.source_box[nearest[found]]
        slot = self._slot_of(region, target, low, size) if self.has_choice else np.zeros_like(region)
        return Requests(region, target, low, size, own, slot)

    def _slot_of(self, region: Array, target: Array, low: Array, size: Array) -> Array:
        """Return the slot of each request: the one of equal pieces of its region's line that its middle lies in."""
        # A place on the line is ``copies`` times the elements before the request, plus ``nth`` times its volume, where
        # it is the nth request of the same elements. Requests of ranks that hold the region are taken out: their
        # elements on the line before the request are subtracted.
        held, nth = self._held, self.target.holders.nth
        regions = self.source.holders.region[held.source_box]
        copies, slots = self.target.holders.most, self._line.slots
        # Larger numbers than an int64 has are rounded, on all ranks in the same way.
        reach = 4.0 * self.source.elements * copies * slots.max(initial=1)
        number = np.int64 if reach < 2**62 else np.float64
        base = np.cumsum(self.source.size.prod(1), dtype=number) * copies
        base -= self.source.size.prod(1) * copies
        held_place = base[regions] + held.before.astype(number) * copies + held.volume * nth[held.target_box]
        order = np.argsort(held_place, kind="stable")
        held_place = held_place[order]
        # ``held_volume[i]``: elements of the first i of the requests that are taken out.
        held_volume = np.concatenate([np.zeros(1, np.int64), np.cumsum(held.volume[order])])
        volume = size.prod(0)
        place = self._before(region, low, size).astype(number) * copies + volume * nth[target]
        up_to_request, up_to_line = (
            held_volume[np.searchsorted(held_place, end)] for end in (base[region] + place, base[region])
        )
        place = place - (up_to_request - up_to_line)
        # Not the simpler rule, replica = receiver modulo replicas. Llama's busiest sender is equal under both. The
        # busiest sender of DeepSeek's dense weights carries 1.47 to 2.68 times more bytes under the simpler rule
        # (measured).
        middle, span = 2 * place + volume, self._line.span[region]
        return np.clip(middle * slots[region] // (2 * span), 0, slots[region] - 1).astype(np.int64)

    def _before(self, region: Array, low: Array, size: Array) -> Array:
        """Return the elements of regions that come before boxes in them, where boxes of one size fill a region."""
        first, extent = self.source.start[region].T, self.source.size[region].T
        outer, inner, before = np.ones_like(region), extent.prod(0), np.zeros_like(region)
        for dim in range(len(low)):
            inner = inner // extent[dim]
            before += outer * (low[dim] - first[dim]) * inner
            outer = outer * size[dim]
        return before


def _with_rank(boxes: Boxes, rank: Array) -> tuple[Array, Array]:
    """Return start and size of boxes with their ranks as first dim."""
    return np.insert(boxes.start, 0, rank, 1), np.insert(boxes.size, 0, 1, 1)


def _covered(layout: Layout, others: Layout, counts_replicas: bool) -> Array:
    """Return the number of elements that each region of a layout shares with other regions.

    ``counts_replicas``: an element of a region with ``n`` replicas counts ``n`` times.
    """
    counts = others.holders.counts if counts_replicas else np.ones(len(others.start), np.int64)
    if not others.problem and (counts == counts[:1]).all():
        return layout.size.prod(1) * counts.max(initial=0)
    met = others.index.meeting(layout.start, layout.size)
    return np.bincount(met.one, met.volume * counts[met.other], len(layout.start)).astype(np.int64)


def _meetings(layout: Layout, others: Layout) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Compare each region of a layout with the others' regions, dim by dim.

    Returns:
        For every region: the most elements that it shares with another one; the number of regions that it meets; and
        whether it shares equally many with all of them. The first two are upper bounds where regions are no grid.
    """
    # Two regions meet if their intervals meet in every dim. In a grid every combination of intervals is a region: a
    # region meets the product, over the dims, of the numbers of intervals that meet its own. Without a grid some
    # combinations are no region, and the product is too large. A second bound is the number of regions that it meets in
    # one dim, in the dim where these are the fewest.
    most, counts = np.ones((2, len(layout.start)), np.int64)
    fewest = np.full(len(layout.start), len(others.start))
    is_even = np.ones(len(layout.start), bool)
    for (intervals, interval), (other_intervals, other_interval) in zip(
        layout.intervals, others.intervals, strict=True
    ):
        regions_by_interval = np.bincount(other_interval, minlength=len(other_intervals))
        longest, number, regions, is_equal = _overlaps(intervals, other_intervals, regions_by_interval)
        # From an interval of this dim to the regions that have it.
        most *= longest[interval]
        counts *= number[interval]
        is_even &= is_equal[interval]
        fewest = np.minimum(fewest, regions[interval])
    return most, np.minimum(counts, fewest), is_even


def _overlaps(
    intervals: Array, other_intervals: Array, weights: Array
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Compare intervals (start, extent) of one dim with others, ``[intervals, 2]`` sorted by their starts.

    Returns:
        For every own interval: its longest overlap, at most; the number of others that it meets; the sum of these
        others' weights; and whether it is known to share equally much with all of them.
    """
    low, extent = intervals.T
    lows, extents = other_intervals.T
    high, order = low + extent, np.argsort(lows + extents, kind="stable")
    ends = (lows + extents)[order]
    first, last = np.searchsorted(ends, low, "right"), np.searchsorted(lows, high, "left")
    weight_before_start, weight_before_end = (
        np.concatenate([np.zeros(1, np.int64), np.cumsum(each)]) for each in (weights, weights[order])
    )
    # An interval meets the others that start before its end, less the ones that end before its start.
    number, weight_sum = last - first, weight_before_start[last] - weight_before_end[first]
    # The others overlap each other, so the ones that meet an interval are no stretch of neighbours: bounds only.
    if (ends[:-1] > lows[1:]).any():
        return np.minimum(extent, extents.max()), number, weight_sum, np.zeros(len(intervals), bool)
    # Those met are neighbours: the first and the last in part, the ones between them whole.
    # ``reduceat`` refuses a stop that is no index, so two more entries are appended, which nothing reads.
    lows, ends, extents = (np.append(each, [0, 0]) for each in (lows, ends, extents))
    ends_met = np.stack([first, np.maximum(last, 1) - 1])
    parts = np.minimum(ends[ends_met], high) - np.maximum(lows[ends_met], low)
    # ``reduceat`` reduces between every two of its indices. They are (start, stop) of the whole neighbours of interval
    # 0, of interval 1, and so on; so every second result is of the gap between two pairs, and is dropped. An interval
    # that meets the others 2 to 5 has the pair (3, 5).
    between = np.stack([first + 1, np.maximum(last - 1, first + 1)], 1).reshape(-1)

    def of_all(extreme: np.ufunc) -> Array:
        """Return the largest, or the smallest, overlap of an interval with those it meets."""
        at_ends, inside = extreme.reduce(parts), extreme.reduceat(extents, between)[::2]
        return np.where(number > 2, extreme(inside, at_ends), at_ends)

    longest, shortest = of_all(np.maximum), of_all(np.minimum)
    return np.where(number > 0, longest, 0), number, weight_sum, (longest == shortest) | (number <= 1)
