"""A CUDA graph on the CPU: while it is captured, what is issued is noted instead of run, and every replay runs it.

Kernels and tables take the ways of a GPU. Addresses count, as in a graph: a table is read where it was, and only if its
memory is still there.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from tritoncomm_kernels import device_table, launch
from tritoncomm_kernels.launch import Launch

__all__ = ["CapturingDevice"]

_PROPERTIES = SimpleNamespace(name="GPU that captures", multi_processor_count=132)
_POISON = 0x7F


class CapturingDevice:
    """A GPU whose memory is the host's.

    Attributes:
        capturing: a graph is being captured.
        nodes: of the graph that was captured last.
        from_slabs: how many nodes copy from memory that was pinned before the capture.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.nodes: list[Callable[[], object]] = []
        self.from_slabs = 0
        self._slabs: list[tuple[StorageWeakRef, int, int]] = []  # pinned or not: storage, address, bytes
        self._pinned: dict[int, StorageWeakRef] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, every tensor says that it is on this GPU."""
        stream = SimpleNamespace(cuda_stream=1, wait_event=lambda event: None)
        event = SimpleNamespace(record=lambda stream: None)
        with ExitStack() as stack:
            for patch in (
                mock.patch.multiple(
                    torch.Tensor, is_cuda=property(lambda x: True), get_device=lambda x: 0,
                    record_stream=lambda x, stream: None,
                ),
                mock.patch.multiple(
                    torch.cuda, current_stream=lambda at=None: stream, Event=lambda: event,
                    device=lambda at: nullcontext(), get_device_properties=lambda at: _PROPERTIES,
                    is_current_stream_capturing=lambda: self.capturing,
                ),
                mock.patch.multiple(
                    device_table, _allocated=self._allocated, _on_device=self._on_device, _slabs={}, _sources=[]
                ),
                mock.patch.multiple(launch, _current_stream=None),
            ):  # fmt: skip
                stack.enter_context(patch)
            for cached in (device_table.table_on, device_table.addresses_on):
                cached.cache_clear()
                stack.callback(cached.cache_clear)
            yield

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """The result of a call that is captured: memory that the replays fill."""
        self.nodes, self.from_slabs = [], 0
        with mock.patch.object(Launch, "__call__", self._noted_launch()), _Noted(self):
            self.capturing = True
            try:
                return call()
            finally:
                self.capturing = False

    def replay(self) -> None:
        """Run what was captured."""
        for node in self.nodes:
            node()

    def read_again(self, x: Tensor) -> "_Again":
        """A tensor of the same address, which is not kept alive if it is a table."""
        for storage, start, nbytes in self._slabs:
            if start <= x.data_ptr() < start + nbytes and not storage.expired():
                return _Again(None, storage, x.data_ptr(), x.dtype, x.numel())
        return _Again(x)

    def is_pinned(self, x: Tensor) -> bool:
        """Whether it is in a slab of pinned memory."""
        pinned = self._pinned.get(x.untyped_storage().data_ptr())
        return pinned is not None and not pinned.expired()  # other memory may have the address of a slab that is gone

    def _allocated(self, nbytes: int, device: int, stream: Any) -> tuple[Tensor, Tensor]:
        assert not self.capturing, "allocated while a graph is captured"
        pinned = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self._pinned[pinned.untyped_storage().data_ptr()] = StorageWeakRef(pinned.untyped_storage())
        self._slabs.append((StorageWeakRef(pinned.untyped_storage()), pinned.data_ptr(), nbytes))
        return pinned, self._on_device(nbytes, device)

    def _on_device(self, nbytes: int, device: int) -> Tensor:
        memory = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        if not self.capturing:  # otherwise of the graph
            self._slabs.append((StorageWeakRef(memory.untyped_storage()), memory.data_ptr(), nbytes))
        return memory

    def _noted_launch(self) -> Callable[..., None]:
        ordinary = Launch.__call__

        def note(call: Launch, first: Tensor, second: Tensor, scale: float, *more: int) -> None:
            table = None if call.table is None else self.read_again(call.table_for(1))
            listed = self.read_again(second)

            def run() -> None:
                with mock.patch.object(Launch, "table_for", return_value=None if table is None else table()):
                    ordinary(call, first, listed(), scale, *more)

            self.nodes.append(run)

        return note


@dataclass(frozen=True)
class _Again:
    """A tensor that a replay reads or writes: itself, or an address in a storage that somebody else has to keep."""

    tensor: Tensor | None
    storage: StorageWeakRef | None = None
    address: int = 0
    dtype: torch.dtype = torch.uint8
    count: int = 0

    def __call__(self) -> Tensor:
        if self.storage is None:
            assert self.tensor is not None
            return self.tensor
        assert not self.storage.expired(), "a graph reads a table whose memory is gone"
        memory = (ctypes.c_uint8 * (self.count * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype, count=self.count)


class _Noted(TorchDispatchMode):
    """Operators run once, for their results, and again in every replay; copies to the device in replays alone."""

    def __init__(self, device: CapturingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        if func is torch.ops.aten.copy_.default and device.is_pinned(args[1]):
            into, source = (device.read_again(x) for x in args[:2])
            device.from_slabs += 1
            device.nodes.append(lambda: into().copy_(source()))
            return args[0]
        results = func(*args, **kwargs)
        again_args = tree_map_only(Tensor, device.read_again, args)
        returned = [each.alias_info for each in func._schema.returns]
        assert func.namespace == "aten", f"{func}: the CPU cannot note it"
        if any(alias is not None and not alias.is_write for alias in returned) or "empty" in str(func):
            kept = tree_map_only(Tensor, device.read_again, results)
            device.nodes.append(lambda: kept)  # memory without values of its own, which the graph keeps
            return results

        def run() -> None:
            again = func(*tree_map_only(_Again, lambda read: read(), again_args), **kwargs)
            for x, fresh in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(x, Tensor) and x is not fresh:
                    x.copy_(fresh)

        device.nodes.append(run)
        return results
