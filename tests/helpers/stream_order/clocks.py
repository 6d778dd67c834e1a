"""Streams and events as vector clocks: which operations of a GPU are known to be over before another one begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stream_order.capture import Graph
    from stream_order.simulator import Simulator

__all__ = ["Clock", "Event", "Lane", "Stream"]

Clock = dict[int, int]
"""By lane, the number of its operations that are over."""


class Lane:
    """Operations in order: those of the host, of a stream, or of the part of a stream that a graph captures.

    Attributes:
        number: identity in clocks.
        clock: operations of all lanes that are over before the next one of this lane begins.
        graph: the graph whose nodes the operations are, None for operations that run at once.
    """

    def __init__(self, number: int, graph: Graph | None = None) -> None:
        self.number, self.graph = number, graph
        self.clock: Clock = {}

    def tick(self) -> int:
        """The number of a new operation."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def follow(self, clock: Clock) -> None:
        """Begin later operations after those of ``clock``."""
        for number, tick in clock.items():
            if self.clock.get(number, 0) < tick:
                self.clock[number] = tick


class Stream:
    """``torch.cuda.Stream``.

    Attributes:
        eager: operations that run at once.
        captured: operations that a graph captures; None where nothing is captured.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.eager = simulator.new_lane()
        self.cuda_stream = self.stream_id = self.eager.number
        self.device = torch.device("cuda", 0)
        self.captured: Lane | None = None
        simulator.streams[self.cuda_stream] = self

    @property
    def lane(self) -> Lane:
        """The lane of the next operation."""
        return self.captured or self.eager

    def follow(self, event: Event) -> None:
        """Begin later operations after an event; a stream that waits for an event of a capture joins the capture."""
        self._simulator.sweep()
        if event.graph is not None and self.captured is None:
            self.captured = event.graph.lane_of(self)
        if event.graph is self.lane.graph:
            self.lane.follow(event.clock)
        elif event.recorded:
            self._simulator.report("ISOLATION", f"stream {self.cuda_stream} captures, and waits for an eager event")

    def point(self) -> Event:
        """An event of the operations so far, which no program has recorded."""
        event = Event(self._simulator)
        event.set(self.lane)
        return event

    def wait_event(self, event: Event) -> None:
        self.follow(event)

    def wait_stream(self, stream: Stream) -> None:
        self.follow(stream.point())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulator)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._simulator.block_host(self.lane.clock, f"stream {self.cuda_stream}.synchronize()")

    def query(self) -> bool:
        return self._simulator.ask(self.lane.clock, f"stream {self.cuda_stream}.query()")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.clock: Clock = {}
        self.graph: Graph | None = None
        self.recorded = False

    def set(self, lane: Lane) -> None:
        self.clock, self.graph, self.recorded = dict(lane.clock), lane.graph, True

    def record(self, stream: Stream | None = None) -> None:
        lane = (stream or self._simulator.current).lane
        self._simulator.sweep()
        if lane.graph is not None:
            self._simulator.report("EVENT", "an event is recorded in a capture")
        self.set(lane)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._simulator.current).wait_event(self)

    def synchronize(self) -> None:
        self._simulator.block_host(self.clock, "event.synchronize()")

    def query(self) -> bool:
        return self._simulator.ask(self.clock, "event.query()")
