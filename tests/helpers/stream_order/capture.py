"""CUDA graphs: nodes in an order of their own, which replays run again with the memory that it is then."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stream_order.clocks import Lane, Stream

if TYPE_CHECKING:
    from stream_order.memory import Block, Region
    from stream_order.simulator import Simulator

__all__ = ["Copy", "Graph", "Node"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A node that copies bytes of the host to the device.

    Attributes:
        source, target: blocks and offsets.
        nbytes: how many.
    """

    source: tuple[Block, int]
    target: tuple[Block, int]
    nbytes: int


@dataclass(slots=True)
class Node:
    """A captured operation.

    Attributes:
        what: its name.
        regions: what it reads and writes.
        copy: what it copies, of a copy from the host.
        tables: regions of integers that decide what it does, and their bytes at the capture.
    """

    what: str
    regions: list[tuple[Region, bool]]
    copy: Copy | None
    tables: list[tuple[Region, bytes]]


class Graph:
    """``torch.cuda.CUDAGraph``, from its capture on.

    Attributes:
        nodes: in the order in which they were captured.
        is_capturing: until the end of the capture.
    """

    def __init__(self, simulator: Simulator, origin: Stream) -> None:
        self._simulator, self._origin = simulator, origin
        self._lanes: dict[Stream, Lane] = {}
        self.nodes: list[Node] = []
        self.is_capturing = True
        origin.captured = self.lane_of(origin)

    def lane_of(self, stream: Stream) -> Lane:
        """The part of the graph that a stream captures."""
        if stream not in self._lanes:
            self._lanes[stream] = self._simulator.new_lane(self)
        return self._lanes[stream]

    def end(self) -> None:
        """End the capture: all streams that joined have to be joined again."""
        clock = self.lane_of(self._origin).clock
        for stream, lane in self._lanes.items():
            if clock.get(lane.number, 0) < lane.clock.get(lane.number, 0):
                self._simulator.report("UNJOINED", f"stream {stream.cuda_stream} has work that the capture lost")
            stream.captured = None
        self.is_capturing = False

    def replay(self) -> None:
        """Launch all nodes on the current stream, as one operation."""
        simulator = self._simulator
        assert not self.is_capturing
        for node in self.nodes:
            if any(block.ref.expired() and block.graph is not self for (block, _, _), _ in node.regions):
                continue  # reported when the memory was freed
            if node.copy is not None:
                (source, start), (target, at) = node.copy.source, node.copy.target
                if not source.ref.expired() and not target.ref.expired():
                    ctypes.memmove(target.base + at, source.base + start, node.copy.nbytes)
            for (block, low, high), content in node.tables:
                if not block.ref.expired() and ctypes.string_at(block.base + low, high - low) != content:
                    simulator.report("CHANGED", f"{node.what} of a replay reads another table than it captured")
        simulator.run([region for node in self.nodes for region in node.regions], "a replay")

    def uses(self, block: Block) -> bool:
        """Whether a node reads or writes memory of a block."""
        return self in block.accesses
