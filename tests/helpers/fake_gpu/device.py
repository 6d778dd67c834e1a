"""A GPU that is not there: Triton compiles and launches for it, and the PTX of its kernels runs on the CPU.

A library stands in for the CUDA driver under Triton's own launcher, so what reaches a kernel is what would reach it on
hardware: the variant that was looked up, the grid, the bits of every argument. Needs a C compiler, and a process where
kernels are not interpreted.
"""

import ctypes
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from fake_gpu.program import Program, parse
from fake_gpu.threads import Buffer, run
from torch import Tensor
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.compiler import CompiledKernel
from tritoncomm_kernels import cross_entropy, device_table, id_sort, launch, row_copy, row_sums, segment_copy

__all__ = ["Device"]

_SOURCE = Path(__file__).with_name("libcuda.c")
_INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
_HOOK = ctypes.CFUNCTYPE(None, *[ctypes.c_uint] * 3, *[ctypes.c_void_p] * 2, ctypes.POINTER(ctypes.c_void_p))
PROPERTIES = SimpleNamespace(name="GPU that is not there", multi_processor_count=132, warp_size=32)


class Device:
    """One GPU of a compute capability; a process has one.

    Attributes:
        capability: as ``(9, 0)``.
        launches: ``(name of the kernel, blocks)`` of every launch that ran.
        kernels: what was loaded so far, by the driver's handle.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.launches: list[tuple[str, int]] = []
        self.kernels: dict[int, CompiledKernel] = {}
        self._library = _driver_library()
        self._hook = _HOOK(self._launched)
        self._thread = threading.local()  # what its launch may touch, and what went wrong in it

    @contextmanager
    def current(self, runs: bool = True) -> Iterator[None]:
        """Inside, every tensor says that it is on this GPU; its memory is the host's.

        Args:
            runs: whether kernels run; otherwise they are launched into nothing.
        """
        driver = _driver(self.capability)
        before = triton.runtime.driver._active
        with ExitStack() as stack:
            patches = [
                mock.patch.multiple(torch.Tensor, is_cuda=property(lambda x: True), get_device=lambda x: 0),
                mock.patch.multiple(torch.cuda, device=lambda at: nullcontext()),
                mock.patch.multiple(torch.cuda, get_device_properties=lambda at: PROPERTIES),
                mock.patch.multiple(torch.cuda, Stream=_Stream, stream=lambda stream: nullcontext()),
                mock.patch.multiple(torch.cuda, current_stream=_Stream),
                mock.patch.multiple(torch.Tensor, record_stream=lambda x, stream: None),
                mock.patch.multiple(launch, _current_device=lambda: 0, _current_stream=lambda at: 0),
                mock.patch.multiple(device_table, Table=_Table),
                mock.patch.multiple(CompiledKernel, _init_handles=partialmethod(_load, self.kernels)),
            ]
            if runs:
                ordinary = self._watched(launch.launched, lambda *arguments: arguments)
                patches += [
                    mock.patch.multiple(launch.Launch, __call__=self._watched(launch.Launch.__call__, _of_direct)),
                    mock.patch.multiple(cross_entropy, launched=ordinary),
                    mock.patch.multiple(id_sort, _sort=self._addressed(id_sort._sort)),
                    mock.patch.multiple(row_copy, _run=self._addressed(row_copy._run)),
                    mock.patch.multiple(row_sums, _run=self._addressed(row_sums._run)),
                    mock.patch.multiple(segment_copy, _run=self._addressed(segment_copy._run)),
                    mock.patch.multiple(
                        segment_copy.SegmentCall, __call__=self._addressed(segment_copy.SegmentCall.__call__)
                    ),
                ]
            for patch in patches:
                stack.enter_context(patch)
            triton.runtime.driver.set_active(driver)
            self._library.fake_on_launch(self._hook if runs else None)
            try:
                yield
            finally:
                self._library.fake_on_launch(None)
                triton.runtime.driver._active = before or driver  # kernels are unloaded through it when they go

    def _watched(self, call: Callable[..., Any], tensors_of: Callable[..., Any]) -> Callable[..., Any]:
        """Note the tensors of a launch, the only memory its kernel may touch; raise what went wrong in the kernel."""

        def run_watched(*arguments: Any, **options: Any) -> Any:
            tensors = (*tensors_of(*arguments), *getattr(self._thread, "addressed", ()))
            self._thread.tensors = [x for x in tensors if isinstance(x, Tensor) and x.numel()]
            self._thread.error = None
            result = call(*arguments, **options)
            if self._thread.error is not None:
                raise self._thread.error
            return result

        return run_watched

    def _addressed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Note the tensors of a call whose kernels get their addresses as integers."""

        def run_addressed(name: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
            self._thread.addressed = tensors
            try:
                return call(name, tensors, *arguments, **options)
            finally:
                del self._thread.addressed

        return run_addressed

    def _launched(self, grid: int, block: int, shared: int, stream: int, function: int, params: Any) -> None:
        try:
            kernel = self.kernels[function]
            program = _parsed(kernel.asm["ptx"])
            assert program.threads == block, f"{block} threads launched of {program.threads}"
            arguments = {
                name: int.from_bytes(ctypes.string_at(params[i], int(kind[1:]) // 8), "little")
                for i, (kind, name) in enumerate(program.params)
            }
            self.launches.append((kernel.name, grid))
            run(program, grid, arguments, [_buffer(x) for x in self._thread.tensors], shared)
        except Exception as error:  # nothing can be raised through the driver
            self._thread.error = error


class _Stream:
    """The only one there is: everything is in order."""

    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, stream: "_Stream") -> None:
        assert isinstance(stream, _Stream)


@lru_cache(maxsize=1)
def _driver_library() -> Any:
    """Compiled, loaded for the whole process, and named to Triton."""
    folder = Path(tempfile.mkdtemp(prefix="fake-gpu-"))
    library = folder / "libcuda.so.1"
    flags = ["-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-I{_INCLUDE}"]
    subprocess.run(["cc", *flags, "-o", library, _SOURCE], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    triton.knobs.nvidia.libcuda_path = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _driver(capability: tuple[int, int]) -> CudaDriver:
    """Triton's own driver without torch's idea of a device."""
    driver = object.__new__(CudaDriver)
    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher
    driver.get_device_capability = lambda device=0: capability
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    driver.set_current_device = lambda device: None
    return driver


def _load(kernel: CompiledKernel, kernels: dict[int, CompiledKernel]) -> None:
    _LOAD(kernel)
    kernels[kernel.function] = kernel


_LOAD = CompiledKernel._init_handles


class _Table(device_table.Table):
    """In memory that the GPU shares with the host: there is nothing to copy, and nothing to wait for."""

    def __init__(self, content: device_table.Content, device: int) -> None:
        super().__init__(content, -1)


def _of_direct(call: launch.Launch, first: Tensor, second: Tensor, scale: float, *more: int) -> tuple[Any, ...]:
    return first, second, None if call.table is None else call.table_for(0)


@lru_cache(maxsize=512)
def _parsed(text: str) -> Program:
    return parse(text)


def _buffer(x: Tensor) -> Buffer:
    """From the first to the last byte of a tensor."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    nbytes = (last + 1) * x.element_size()
    return Buffer(x.data_ptr(), np.frombuffer((ctypes.c_uint8 * nbytes).from_address(x.data_ptr()), dtype=np.uint8))
