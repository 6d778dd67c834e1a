"""Storages, the accesses to them, and when their memory may be used again."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stream_order.capture import Graph
    from stream_order.clocks import Clock, Lane, Stream

__all__ = ["Access", "Block", "Region", "Space", "content_of"]


class Space(Enum):
    """Places of a storage."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of bytes ``low`` to ``high`` of a storage.

    Attributes:
        lane, tick: of the operation.
        writes: whether it writes.
        what: its name.
    """

    low: int
    high: int
    lane: int
    tick: int
    writes: bool
    what: str

    def is_over(self, clock: Clock) -> bool:
        """Whether the operation is over for whoever has ``clock``."""
        return clock.get(self.lane, 0) >= self.tick


@dataclass(eq=False, slots=True)
class Block:
    """A storage.

    Attributes:
        ref: expires with it.
        base, size: address and bytes.
        space: where it is.
        stream: current when it was allocated; its memory goes back to the pool of that stream.
        born: the operation that allocated it.
        graph: the graph in whose private pool it is.
        pool: the private pool without a capture that it is in, as of a warm-up.
        accesses: by the graph that the operations are nodes of, None for eager ones.
        recorded: streams of ``record_stream``.
    """

    ref: StorageWeakRef
    base: int
    size: int
    space: Space
    stream: Stream
    born: str
    graph: Graph | None = None
    pool: object = None
    accesses: dict[Graph | None, list[Access]] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def follow(self, lane: Lane) -> None:
        """Be allocated on a stream, on which operations before may have used the same memory."""
        if tick := lane.clock.get(lane.number, 0):
            before = Access(0, self.size, lane.number, tick, True, "the tensor that had the memory before")
            self.accesses[lane.graph] = [before]

    def add(self, low: int, high: int, lane: Lane, tick: int, writes: bool, what: str) -> Iterator[Access]:
        """Add an access; yield earlier ones that conflict with it and may not be over."""
        known = self.accesses.setdefault(lane.graph, [])
        kept = []
        for each in known:
            overlaps = each.low < high and low < each.high
            if overlaps and (writes or each.writes) and not each.is_over(lane.clock):
                yield each
            is_inside = low <= each.low and each.high <= high
            if not (each.lane == lane.number and is_inside and (writes or not each.writes)):
                kept.append(each)
        kept.append(Access(low, high, lane.number, tick, writes, what))
        self.accesses[lane.graph] = kept

    def unfinished(self, host: Lane) -> Iterator[Access]:
        """Accesses that may run after the memory is given to another tensor of its pool.

        The caching allocator gives it out at once to its stream, or once events on the recorded streams are over.
        """
        if self.graph is None:
            lanes = [host, self.stream.eager, *(stream.eager for stream in self.recorded)]
        elif self.recorded or not self.graph.is_capturing:
            return  # in a capture, memory that other streams recorded is given out after its end only
        else:
            lanes = [self.graph.lane_of(self.stream)]
        for each in self.accesses.get(self.graph, ()):
            if not any(each.is_over(lane.clock) for lane in lanes):
                yield each


Region = tuple[Block, int, int]
"""Bytes ``low`` to ``high`` of a storage."""


def content_of(region: Region) -> bytes:
    """The bytes of a region, as the host sees them now."""
    block, low, high = region
    return ctypes.string_at(block.base + low, high - low)
