"""Table of integers that kernels read on a device: copied there once, shared by streams and graphs.

Tables lie in slabs: pinned memory, and as much memory of the device. A slab outlives the graphs that were captured with
it. Not to be confused with ``tables``, which are files of tuned tiles.
"""

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

__all__ = ["Content", "Table", "addresses_on", "table_of", "table_on"]

Content = np.ndarray[Any, np.dtype[Any]]
"""Integers of a table, int32 or int64, contiguous."""

_SLAB = 1 << 20  # bytes; a longer table has a slab of its own
_RESERVE = _SLAB // 2  # bytes at the end of a slab that only captures take
_ALIGNED = 16  # bytes
_lock = threading.Lock()


class Table:
    """Integers on a device, copied there at their first use, without a wait of the host; ``content`` is on the host."""

    def __init__(self, content: Content, device: int) -> None:
        self.content, self._device = content, device
        self._tensor = torch.from_numpy(content) if device < 0 else None  # of the CPU, for the interpreter
        self._slab: _Slab | None = None
        # These streams are ordered behind the copy.
        self._streams: set[int] = set()
        self._copied: torch.cuda.Event | None = None

    def on(self, stream: int) -> Tensor:
        """Return the tensor for kernels of ``stream``, the current one.

        While a graph is captured the tensor is for the next launch alone: nobody else keeps its memory.
        """
        if self._device < 0:
            assert self._tensor is not None
            return self._tensor
        # While a CUDA graph is captured nothing may be awaited and nothing runs. A table that is on the device already
        # is used where it is: the graph replays only after the device was synchronised, as torch.cuda.graph does before
        # it captures. Any other table gets memory that only this graph uses, and every replay copies the same bytes
        # again.
        captures = torch.cuda.is_current_stream_capturing()
        if self._tensor is None:
            if captures:
                return _in_graph(self.content, self._device)
            with _lock:
                if self._tensor is None:  # no other thread was faster
                    self._copy()
        assert self._tensor is not None
        assert self._slab is not None
        if captures:
            self._slab.in_graph = True
        elif stream not in self._streams:
            # Another stream than the copy's waits for the copy once.
            current = torch.cuda.current_stream(self._device)
            assert self._copied is not None
            current.wait_event(self._copied)
            self._slab.serve(current)
            self._streams.add(stream)
        return self._tensor

    def _copy(self) -> None:
        """Start the copy to a slab on the current stream; ``_copied`` lets other streams wait for it, once each."""
        current = torch.cuda.current_stream(self._device)
        slab = _slab_for(self.content.nbytes, self._device, current)
        slab.serve(current)  # before the copy, as this stream may not be the one that made the slab
        tensor = slab.copied(self.content)
        self._copied = torch.cuda.Event()
        self._copied.record(current)
        self._slab, self._tensor = slab, tensor
        self._streams.add(current.cuda_stream)
        slab.tables.add(self)  # the slab stays while this table does


class _Slab:
    """Pinned memory and as much of the device, from the start of which on tables are placed, each once.

    Attributes:
        room, used: bytes of either memory, and bytes that tables have.
        tables: its tables that are still referenced.
        in_graph: whether a graph reads from it; such a slab is never freed.
    """

    def __init__(self, room: int, device: int, stream: torch.cuda.Stream) -> None:
        self.room, self.used, self.in_graph = room, 0, False
        self.tables: WeakSet[Table] = WeakSet()
        self._pinned, self._memory = _allocated(room, device, stream)
        self._bytes = self._pinned.numpy()
        self._streams = {stream.cuda_stream}
        # Other streams wait for this event: until then earlier work may use the memory that torch gave to the slab.
        self._made = torch.cuda.Event()
        self._made.record(stream)

    def serve(self, stream: torch.cuda.Stream) -> None:
        """Let a stream use the slab: after the earlier users of its memory, and before torch reuses it."""
        if stream.cuda_stream not in self._streams:
            stream.wait_event(self._made)
            self._memory.record_stream(stream)
            self._streams.add(stream.cuda_stream)

    def copied(self, content: Content) -> Tensor:
        """Place a table behind the used bytes, and copy it on the current stream."""
        start, end = self.used, self.used + content.nbytes
        self.used = -(-end // _ALIGNED) * _ALIGNED
        self._bytes[start:end] = content.view(np.uint8)
        memory = self._memory[start:end]
        memory.copy_(self._pinned[start:end], non_blocking=True)
        return memory.view(torch.int32 if content.dtype == np.int32 else torch.int64)


_slabs: dict[int, list[_Slab]] = {}
_sources: list[Tensor] = []  # host memory from which replays of graphs copy: kept for ever


def _slab_for(nbytes: int, device: int, stream: torch.cuda.Stream) -> _Slab:
    """Return the newest slab of a device, or a new one where its room for eager calls does not suffice."""
    # Never called in a capture. ``_RESERVE`` is left for tables of captures, which cannot allocate pinned memory.
    slabs = _slabs.setdefault(device, [])
    if not slabs or slabs[-1].used + nbytes > slabs[-1].room - _RESERVE:
        # A slab without tables goes back to torch, which reuses its memory behind the streams that used it. That
        # happens here and not when the last table goes, which may be in a capture: torch's events would become nodes of
        # the graph.
        slabs[:] = [slab for slab in slabs if slab.in_graph or slab.tables]
        slabs.append(_Slab(max(_SLAB, nbytes + _RESERVE), device, stream))
    return slabs[-1]


def _in_graph(content: Content, device: int) -> Tensor:
    """Return a table for the graph that is being captured, in the rest of the newest slab, which stays from now on."""
    with _lock:
        slab = _slabs[device][-1] if device in _slabs else None
        if slab is not None and slab.used + content.nbytes <= slab.room:
            slab.in_graph = True
            return slab.copied(content)
        # Without room in a slab the device memory is the graph's own, as any result's in a capture, and the source is
        # ordinary memory. Pinned memory cannot be had: older torch queries events for it, which ends the capture.
        _sources.append(torch.from_numpy(content))
        return _on_device(content.nbytes, device).view(_sources[-1].dtype).copy_(_sources[-1], non_blocking=True)


def _allocated(nbytes: int, device: int, stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
    """Allocate pinned memory and memory of a device, in a thread of its own."""

    def allocate() -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True), _on_device(nbytes, device)

    # This thread may allocate in a private pool: torch.compile(mode="reduce-overhead") has one while it warms up, and
    # takes memory that lives longer for a leak.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def _on_device(nbytes: int, device: int) -> Tensor:
    """Allocate bytes on a CUDA device, from the pool of the current stream or capture."""
    return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))


@lru_cache(maxsize=1024)
def table_on(content: tuple[int, ...], device: int) -> Table:
    """Return the table of a content and device; equal contents share it."""
    return Table(np.array(content, np.int32), device)


def table_of(content: Content | tuple[int, ...], device: int) -> Table:
    """Return the shared table of a tuple, or a new table of an array."""
    return table_on(content, device) if isinstance(content, tuple) else Table(content, device)


@lru_cache(maxsize=64)
def addresses_on(addresses: tuple[int, ...], device: int) -> Table:
    """Return addresses of tensors on their device; they are copied when they change."""
    return Table(np.frombuffer(array("q", addresses), np.int64), device)  # a third of the time of np.array
