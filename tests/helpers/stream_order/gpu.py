"""What the library sees of a GPU: patches of torch, of process groups, of launches and of allocations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from stream_order.clocks import Event
from stream_order.kernels import accesses_of, name_of
from stream_order.memory import Space
from stream_order.nccl import Rules
from torch import Tensor
from torch._C._distributed_c10d import Backend
from tritoncomm_kernels import cross_entropy, launch

from tritoncomm.core import memory

if TYPE_CHECKING:
    from stream_order.simulator import Simulator

__all__ = ["DEVICE", "Gpu"]

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros")
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_tolist, _to, _empty_strided = Tensor.tolist, Tensor.to, torch.empty_strided


class Gpu:
    """Device 0, whose memory is the host's.

    Args:
        simulator: puts in order what is issued.
        rules: of the backend, for its name.
    """

    def __init__(self, simulator: Simulator, rules: Rules) -> None:
        self._simulator, self._rules = simulator, rules
        self._thread = threading.local()
        self._allocate_on_cpu = memory._on_cpu

    def _raw_stream(self, device: int) -> int:
        return self._simulator.current.cuda_stream

    def _allocate(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        assert self._allocate_on_cpu is not None
        made = self._allocate_on_cpu(tuple(shape), stride, dtype)
        self._simulator.block_of(made, "empty", Space.DEVICE)
        return made

    def _launcher(self) -> Callable[..., None]:
        def call(prepared: Any, first: Tensor, second: Tensor, scale: float, *more: int, grid: int = 0) -> None:
            self._simulator.sweep()
            tables = [] if prepared.table is None else [prepared.table_for(self._simulator.current.cuda_stream)]
            with self._simulator.muted():
                accesses = accesses_of(prepared, first, second, more)
            tables += accesses.tables
            self._simulator.operate(accesses.reads, accesses.writes, name_of(prepared.kernel), tables=tables)

        return call

    def _launched(self, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        """The kernels of the cross entropy write one tensor, the last one."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        self._simulator.operate(tensors[:-1], tensors[-1:], name_of(kernel))

    def patches(self) -> Iterator[Any]:
        """All of them, to be entered in this order."""
        yield from self._patches_of_torch()
        yield mock.patch.multiple(launch, _current_device=lambda: 0, _current_stream=self._raw_stream)
        yield mock.patch.multiple(launch.Launch, __call__=self._launcher())
        yield mock.patch.multiple(cross_entropy, launched=self._launched)
        # The library allocates without the dispatcher only where no mode is on.
        yield mock.patch.multiple(memory, _modes=lambda: 0, _current_device=lambda: 0, _on_cuda=self._allocate)

    def _patches_of_torch(self) -> Iterator[Any]:
        space_of, multiple = self._simulator.space_of, mock.patch.multiple
        properties = SimpleNamespace(name="GPU that is not there", multi_processor_count=132, warp_size=32)
        yield multiple(
            torch.cuda,
            Event=lambda **_: Event(self._simulator),
            Stream=lambda device=None, **_: self._simulator.new_stream(),
            current_device=lambda: 0,
            current_stream=lambda device=None: self._simulator.current,
            default_stream=lambda device=None: self._simulator.default,
            device=lambda device: contextlib.nullcontext(),
            get_device_properties=lambda device=None: properties,
            is_available=lambda: False,  # no device is made the default one
            is_current_stream_capturing=lambda: self._simulator.is_capturing,
            stream=self._simulator.on,
            synchronize=self._simulator.synchronize,
        )
        yield multiple(
            Tensor,
            cpu=lambda x: self._moved(x, _CPU, None, False),
            device=property(lambda x: DEVICE if space_of(x) is Space.DEVICE else _CPU),
            get_device=lambda x: 0 if space_of(x) is Space.DEVICE else -1,
            is_cpu=property(lambda x: space_of(x) is not Space.DEVICE),
            is_cuda=property(lambda x: space_of(x) is Space.DEVICE),
            is_pinned=lambda x, device=None: space_of(x) is Space.PINNED,
            pin_memory=lambda x, device=None: self._pinned(x),
            record_stream=lambda x, stream: self._simulator.record(x, stream),
            to=lambda x, *args, **kwargs: self._to(x, *args, **kwargs),
            tolist=lambda x: self._to_list(x),
            **{name: self._placed(getattr(Tensor, name)) for name in _NEW},
        )
        yield multiple(torch, **{name: self._placed(getattr(torch, name)) for name in _FACTORIES})
        yield multiple(Backend, name=lambda backend: self._rules.name, supports_coalescing=property(lambda each: True))
        yield multiple(dist.ProcessGroup, **self._methods())

    def _placed(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A factory whose device, where one is named, is noted: the memory is the host's."""

        @wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.get("device")
            if device is None and not kwargs.get("pin_memory"):
                return factory(*args, **kwargs)
            space = Space.PINNED if kwargs.pop("pin_memory", False) else Space.HOST
            if device is not None and torch.device(device).type == "meta":
                return factory(*args, **kwargs)
            if device is not None and torch.device(device).type == "cuda":
                space = Space.DEVICE
            kwargs["device"] = _CPU
            return self._in_space(space, lambda: factory(*args, **kwargs))

        return make

    def _in_space(self, space: Space, make: Callable[[], Tensor]) -> Tensor:
        before, self._thread.space = getattr(self._thread, "space", None), space
        try:
            made = make()
        finally:
            self._thread.space = before
        self._simulator.block_of(made, "a factory", space)  # where no mode saw it, as in another thread
        return made

    def space_of_new(self, inputs: Sequence[Tensor]) -> Space:
        """Place of an operator's result: as it is told, else the device of its inputs."""
        named = getattr(self._thread, "space", None)
        if named is not None:
            return named
        return Space.DEVICE if any(self._simulator.space_of(x) is Space.DEVICE for x in inputs) else Space.HOST

    def _moved(self, x: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        space = Space.DEVICE if device.type == "cuda" else Space.HOST
        if (self._simulator.space_of(x) is Space.DEVICE) is (space is Space.DEVICE):
            return x if dtype is None else _to(x, dtype)
        shape, kind = x.shape, dtype or x.dtype
        made = self._in_space(space, lambda: _empty_strided(shape, memory.contiguous_stride(shape), dtype=kind))
        return made.copy_(x, non_blocking=non_blocking)

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device | str)]
        if not named:
            return _to(x, *args, **kwargs)
        dtypes = [each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
        return self._moved(x, torch.device(named[0]), next(iter(dtypes), None), kwargs.get("non_blocking", False))

    def _pinned(self, x: Tensor) -> Tensor:
        made = self._in_space(Space.PINNED, lambda: _empty_strided(x.shape, x.stride(), dtype=x.dtype))
        return made.copy_(x)

    def _to_list(self, x: Tensor) -> Any:
        if self._simulator.space_of(x) is Space.DEVICE and not self._simulator.is_muted:
            self._simulator.operate([x], [], "tolist()")
            self._simulator.block_host(self._simulator.current.lane.clock, "tolist()")
        return _tolist(x)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """The methods of process groups that the library calls, where torch has them."""
        issue, single = self._simulator.communicators.collective, self._simulator.communicators.single

        def even(what: str) -> Callable[..., Any]:
            return lambda g, out, x, options=None: issue(id(g), options, [x], [out], what)

        def split(g: Any, out: Tensor, x: Tensor, received: Any, sent: Any, options: Any = None) -> Any:
            return issue(id(g), options, [x], [out], "all-to-all")

        def in_place(what: str) -> Callable[..., Any]:
            return lambda g, tensors, options=None: issue(id(g), options, list(tensors), list(tensors), what)

        methods = {
            "_allgather_base": even("all-gather"),
            "all_gather_single": even("all-gather"),
            "_reduce_scatter_base": even("reduce-scatter"),
            "reduce_scatter_single": even("reduce-scatter"),
            "alltoall_base": split,
            "all_to_all_single": split,
            "allreduce": in_place("all-reduce"),
            "broadcast": in_place("broadcast"),
            "reduce": in_place("reduce"),
            "allgather": lambda g, outs, xs, o=None: issue(id(g), o, list(xs), list(outs[0]), "all-gather"),
            "reduce_scatter": lambda g, outs, xs, o=None: issue(id(g), o, list(xs[0]), list(outs), "reduce-scatter"),
            "send": lambda g, xs, peer, tag: single(id(g), (g.rank(), peer), list(xs), []),
            "recv": lambda g, xs, peer, tag: single(id(g), (g.rank(), peer), [], list(xs)),
            "_start_coalescing": lambda g, device: self._simulator.communicators.start_batch(),
            "_end_coalescing": lambda g, device: self._simulator.communicators.end_batch(id(g)),
        }
        return {name: method for name, method in methods.items() if hasattr(dist.ProcessGroup, name)}
