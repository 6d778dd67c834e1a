"""A GPU's order of things on the CPU: streams, events, the caching allocator, NCCL and captures, by vector clocks.

Nothing is computed that does not decide what is launched. Whatever the library issues (ATen operators, its kernels,
calls of process groups, events) is put in order, and these are problems:

======================  ==============================================================================================
RACE                    an access without an order to a conflicting one
REUSE                   memory goes back to its pool while another stream may still use it
GRAPH                   memory that a graph reads or writes at every replay is freed
CHANGED                 a replay reads another table than was captured
KEPT                    memory of a graph's private pool outlives the results
SYNC, EVENT, PINNED     a capture waits for the device, records an event, allocates pinned memory
ISOLATION, UNJOINED     a capture waits for eager work; a capture ends without work that it began
======================  ==============================================================================================
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from stream_order.capture import Copy, Graph, Node
from stream_order.clocks import Clock, Lane, Stream
from stream_order.gpu import DEVICE, Gpu
from stream_order.memory import Block, Region, Space, content_of
from stream_order.nccl import Communicators, Rules
from stream_order.operators import Operators
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from tritoncomm_kernels import device_table

from tritoncomm.core import memory

__all__ = ["DEVICE", "Simulator"]

_CACHING = ("tritoncomm_kernels", "tritoncomm.core", "tritoncomm.reshard", "tritoncomm.ulysses")


class Simulator:
    """One GPU of one process, inside ``with``.

    Args:
        rules: of the process groups.
        completes: what was issued is over as soon as somebody asks; else never before it is waited for.

    Attributes:
        problems: found so far.
        operations: that were issued so far.
        fail_at: the number of the operation that raises instead; 0 for none.
        watched: tensors of works that nobody waited for.
    """

    def __init__(self, rules: Rules, completes: bool = False) -> None:
        self._completes = completes
        self._lanes = 0
        self._thread = threading.local()
        self._blocks: dict[int, Block] = {}
        self._graphs: list[Graph] = []
        self._lock = threading.RLock()
        self._patches = contextlib.ExitStack()
        self._gpu = Gpu(self, rules)
        self.streams: dict[int, Stream] = {}
        self.host = self.new_lane()
        self.default = self.new_stream()
        self.communicators = Communicators(self, rules)
        self.problems: list[str] = []
        self.operations = self.fail_at = 0
        self.watched: list[list[Tensor]] = []
        self._pending: list[tuple[Region, bytes, int, int]] = []

    # Streams

    def new_lane(self, graph: Graph | None = None) -> Lane:
        self._lanes += 1
        return Lane(self._lanes, graph)

    def new_stream(self) -> Stream:
        return Stream(self)

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._thread, "stream", self.default)

    @property
    def is_capturing(self) -> bool:
        """``torch.cuda.is_current_stream_capturing``."""
        return self.current.captured is not None

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        self.enter(stream)
        try:
            yield
        finally:
            self.leave()

    def enter(self, stream: Stream) -> None:
        """Make a stream the current one of this thread, until ``leave``."""
        self._thread.left = [*getattr(self._thread, "left", ()), self.current]
        self._thread.stream = stream

    def leave(self) -> None:
        """Return to the stream before the last ``enter``."""
        self._thread.stream = self._thread.left.pop()

    def block_host(self, clock: Clock, what: str) -> None:
        """The host waits for what is in ``clock``."""
        self.sweep()
        if self.current.captured is not None:
            self.report("SYNC", f"{what} in a capture")
        else:
            self.host.follow(clock)

    def ask(self, clock: Clock, what: str) -> bool:
        """Whether what is in ``clock`` is over; the host knows it afterwards."""
        if self._completes or self.current.captured is not None:
            self.block_host(clock, what)
        return self._completes

    def synchronize(self, device: Any = None) -> None:
        """``torch.cuda.synchronize``."""
        for stream in [*self.streams.values()]:
            self.block_host(stream.eager.clock, "torch.cuda.synchronize()")

    # Graphs

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """``torch.cuda.graph``: the device is synchronised before, and ``stream`` is the current one."""
        self.synchronize()
        graph = Graph(self, stream)
        self._graphs.append(graph)
        try:
            with self.on(stream):
                yield graph
        finally:
            self.sweep()
            graph.end()

    def drop(self, graph: Graph) -> None:
        """The program drops a graph; it is not replayed any more."""
        self.sweep()
        self._graphs.remove(graph)

    @contextlib.contextmanager
    def private_pool(self) -> Iterator[object]:
        """Allocations of this thread are in a pool of their own, as those of a warm-up of ``reduce-overhead``."""
        pool = self._thread.pool = object()
        try:
            yield pool
        finally:
            self._thread.pool = None

    def check_pool(self, pool: object) -> None:
        """Report memory of a private pool, or of a graph, that is still referenced."""
        gc.collect()
        self.sweep()
        for block in self._blocks.values():
            if pool in (block.pool, block.graph):
                self.report("KEPT", f"memory of {block.born} is kept in a private pool")

    # Memory

    def space_of(self, x: Tensor) -> Space:
        block = self._blocks.get(x.untyped_storage()._cdata)
        return Space.HOST if block is None else block.space

    def block_of(self, x: Tensor, born: str = "an unknown operation", space: Space = Space.HOST) -> Block:
        """The storage of a tensor; one that is seen for the first time is in ``space``."""
        storage = x.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            stream = self.current
            block = Block(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), space, stream, born)
            if space is Space.DEVICE:
                block.graph, block.pool = stream.lane.graph, getattr(self._thread, "pool", None)
                block.follow(stream.lane)
            elif space is Space.PINNED and stream.captured is not None:
                self.report("PINNED", f"{born} allocates pinned memory in a capture")
            with self._lock:
                self._blocks[storage._cdata] = block
        return block

    def region_of(self, x: Tensor | int) -> Region:
        """The bytes of a tensor; from an address on, all of its storage."""
        if isinstance(x, Tensor):
            block = self.block_of(x)
            low = x.data_ptr() - block.base
            return block, low, low + memory.extent_of(x)
        for block in self._blocks.values():
            if block.base <= x < block.base + block.size and not block.ref.expired():
                return block, x - block.base, block.size
        raise AssertionError(f"a kernel is given the address {x:#x}, which is of no tensor")

    def sweep(self) -> None:
        """Give memory that nothing refers to back to its pool."""
        with self._lock:
            expired = [(key, block) for key, block in self._blocks.items() if block.ref.expired()]
            for key, _ in expired:
                del self._blocks[key]
        for _, block in expired:
            if any(g is not block.graph and g.uses(block) for g in self._graphs):
                self.report("GRAPH", f"memory of {block.born} is freed, and a graph uses it")
            if block.space is Space.DEVICE:
                for access in block.unfinished(self.host):
                    pool = f"memory of {block.born} goes back to the pool of stream {block.stream.cuda_stream}"
                    self.report("REUSE", f"{pool}, and {access.what} on lane {access.lane} may use it")

    # Operations

    def report(self, kind: str, text: str) -> None:
        self.problems.append(f"{kind}: {text}")

    def step(self, what: str) -> None:
        """Count an operation, or raise in its place."""
        self.operations += 1
        if self.operations == self.fail_at:
            if what.startswith(("aten", "_")):
                raise torch.OutOfMemoryError(f"simulated in {what}")
            raise dist.DistBackendError(f"simulated in {what}")

    def operate(
        self,
        reads: Sequence[Tensor | int],
        writes: Sequence[Tensor | int],
        what: str,
        stream: Stream | None = None,
        copy: Copy | None = None,
        tables: Sequence[Tensor] = (),
    ) -> None:
        """Issue an operation on a stream, the current one by default."""
        self.step(what)
        listed = [self.region_of(x) for x in tables]
        regions = [(region, False) for region in listed]
        for given, is_write in ((reads, False), (writes, True)):
            regions += [(self.region_of(x), is_write) for x in given if not isinstance(x, Tensor) or x.numel()]
        self.run(regions, what, stream, copy, listed)

    def run(
        self,
        regions: Sequence[tuple[Region, bool]],
        what: str,
        stream: Stream | None = None,
        copy: Copy | None = None,
        tables: Sequence[Region] = (),
    ) -> None:
        """``operate`` on regions, each with whether it is written."""
        self.sweep()
        lane = (stream or self.current).lane
        if lane.graph is None:
            lane.follow(self.host.clock)
        self._access(regions, lane, what)
        if lane.graph is not None:
            lane.graph.nodes.append(Node(what, [*regions], copy, [(each, content_of(each)) for each in tables]))
        elif copy is not None and copy.source[0].space is Space.PINNED:
            source = copy.source[0], copy.source[1], copy.source[1] + copy.nbytes
            self._pending.append((source, content_of(source), lane.number, lane.clock[lane.number]))
        self._check_pending()

    def _check_pending(self) -> None:
        """See whether the host changed pinned memory, past torch, that a copy may still read."""
        pending, self._pending = self._pending, []
        for each in pending:
            region, content, number, tick = each
            if self.host.clock.get(number, 0) >= tick or region[0].ref.expired():
                continue
            if content_of(region) != content:
                self.report("RACE", "the host writes to pinned memory that a copy may still read")
            else:
                self._pending.append(each)

    def run_on_host(self, regions: Sequence[tuple[Region, bool]], what: str) -> None:
        """``run`` by the host, which needs no stream."""
        self.sweep()
        self._access(regions, self.host, f"{what} of the host")

    def _access(self, regions: Sequence[tuple[Region, bool]], lane: Lane, what: str) -> None:
        tick = lane.tick()
        for (block, low, high), is_write in regions:
            for other in block.add(low, high, lane, tick, is_write, what):
                uses = f"{'writes' if is_write else 'reads'} what {other.what} on lane {other.lane}"
                may = "write" if other.writes else "read"
                self.report("RACE", f"{what} on lane {lane.number} {uses} may still {may}, memory of {block.born}")

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor on the device that the program has filled on the current stream."""
        x = torch.empty(shape, dtype=dtype, device=DEVICE)
        self.operate([], [x], "the program")
        return x

    def use(self, *tensors: Tensor) -> None:
        """The program reads tensors on the current stream."""
        self.operate(tensors, [], "the program")

    def finish(self) -> list[str]:
        """End of a program: its graphs are dropped, what it began is over, what it kept is freed; all problems."""
        self._check_pending()
        gc.collect()
        self._graphs.clear()
        self.sweep()
        self.synchronize()
        self.watched.clear()
        self.sweep()
        return self.problems

    def record(self, x: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.block_of(x).recorded.add(stream)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Operators of this thread are no operations of the program."""
        before, self._thread.muted = self.is_muted, True
        try:
            yield
        finally:
            self._thread.muted = before

    @property
    def is_muted(self) -> bool:
        return getattr(self._thread, "muted", False)

    # The library

    def __enter__(self) -> Simulator:
        self._start_anew()
        for patch in (*self._gpu.patches(), Operators(self, self._gpu)):
            self._patches.enter_context(patch)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        self._start_anew()

    def _start_anew(self) -> None:
        """Drop all memory that the library has on a device."""
        self.forget()
        for name, value in vars(device_table).items():
            if isinstance(value, dict | list | set) and not name.startswith("__"):
                value.clear()

    def forget(self) -> None:
        """Evict what the library caches by shape, tables on the device included; what graphs need stays."""
        for name, module in [*sys.modules.items()]:
            if name.startswith(_CACHING):
                for value in [*vars(module).values()]:
                    if callable(getattr(value, "cache_clear", None)):
                        value.cache_clear()
