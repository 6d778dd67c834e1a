"""What tests run on: the CPU with interpreted kernels, a GPU, or compiled kernels on a stub CUDA driver."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from captures import CapturingDevice
from pool import COLLECTIVE, Pool
from threaded import launches_take_turns
from torch import Tensor
from tritoncomm_kernels import device_table

from tritoncomm.doctor import compute_mode

__all__ = ["Device", "make_device"]

STUBS = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SLEEP = 200_000_000  # cycles, about a tenth of a second
T = TypeVar("T")
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Device:
    """The CPU, with kernels in Triton's interpreter: work is done at once, and what a GPU orders needs no order.

    Attributes:
        at: where tensors are.
        is_large: cases have the size and number that a GPU is worth.
        backend: of process groups.
        path: the code path on which the kernels run.
        compiled: how ``torch.compile`` compiles, and how it captures CUDA graphs.
    """

    at: torch.device = CPU
    is_large: bool = False
    backend: str = "gloo"
    path: str = "triton"
    compiled: tuple[dict[str, str], dict[str, str]] = ({"backend": "aot_eager"}, {"backend": "aot_eager"})

    def pick(self, small: T, large: T) -> T:
        return large if self.is_large else small

    def current(self) -> AbstractContextManager[Any]:
        """What holds during a test."""
        return nullcontext()

    def threads(self) -> AbstractContextManager[Any]:
        """What holds while threads launch kernels."""
        return launches_take_turns()

    def require(self, gib: int) -> None:
        """Skip a large case where the free memory does not suffice."""

    def busy(self) -> None:
        """Keep the current stream busy for a while."""

    def waits_are_errors(self) -> AbstractContextManager[Any]:
        """Where the host waits for the device inside, an error is raised."""
        return nullcontext()

    def side_stream(self) -> AbstractContextManager[Any]:
        """Another stream, behind what the current one has so far; work inside goes to it, and is over afterwards."""
        return nullcontext()

    def captured(self, call: Call, x: Tensor, exchanges: bool = False) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The result of a call that is captured as a graph, and what replays it into that result.

        A call that exchanges anything runs again in place of a replay: Gloo cannot be captured.
        """
        if exchanges:
            return call(x), lambda _: call(x)
        graphs = CapturingDevice()
        with graphs.current():
            call(x)  # as on a GPU, where it compiles
            out = graphs.capture(lambda: call(x))
            device_table.addresses_on.cache_clear()
            for _ in range(3):  # a slab each, for which the others go where nothing is known to need them
                device_table.Table(np.zeros(1 << 16, np.int64), 0).on(1)

        def replay(out: Tensor) -> Tensor:
            with graphs.current():
                graphs.replay()
            return out

        return out, replay

    def begin_step(self) -> None:
        """Outputs of CUDA graphs may be overwritten from here on."""

    def ranks(
        self, backend: str, size: int = 2, limit: timedelta = COLLECTIVE, env: Mapping[str, str] | None = None
    ) -> Pool:
        """So many ranks in processes of their own; ``limit`` is the timeout of their groups, ``env`` more variables."""
        return Pool(size, backend, env, limit=limit)


@dataclass(frozen=True)
class Cuda(Device):
    """The first GPU."""

    at: torch.device = GPU
    is_large: bool = True
    backend: str = "nccl"
    compiled: tuple[dict[str, str], dict[str, str]] = ({"backend": "inductor"}, {"mode": "reduce-overhead"})

    @contextmanager
    def current(self) -> Iterator[None]:
        torch.cuda.set_device(self.at)
        yield
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
        torch.cuda.empty_cache()

    def threads(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def require(self, gib: int) -> None:
        free = torch.cuda.mem_get_info()[0]
        if free < gib * 2**30:
            pytest.skip(f"needs {gib} GiB of free memory, there are {free / 2**30:.0f}")

    def busy(self) -> None:
        torch.cuda._sleep(SLEEP)

    @contextmanager
    def waits_are_errors(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def side_stream(self) -> AbstractContextManager[Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        @contextmanager
        def work() -> Iterator[None]:
            with torch.cuda.stream(side):
                yield
            side.synchronize()

        return work()

    def captured(self, call: Call, x: Tensor, exchanges: bool = False) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        with self.side_stream():
            call(x)  # compiles, and copies tables of sizes to the device
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events meanwhile
            out = call(x)

        def replay(out: Tensor) -> Tensor:
            graph.replay()
            torch.cuda.synchronize()
            return out

        return out, replay

    def begin_step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def ranks(
        self, backend: str, size: int = 2, limit: timedelta = COLLECTIVE, env: Mapping[str, str] | None = None
    ) -> Pool:
        gpus = torch.cuda.device_count()
        if gpus < size and (mode := compute_mode()) not in ("", "Default"):
            pytest.skip(f"needs {size} processes on {gpus} GPUs, whose compute mode is {mode}")
        return Pool(size, backend, env, gpus if backend == "nccl" else 1, limit)


@dataclass(frozen=True)
class Stub(Device):
    """A GPU that Triton compiles and launches for, while the PTX of its kernels runs on the CPU."""

    path: str = "auto"
    fake: Any = None

    def current(self) -> AbstractContextManager[Any]:
        return self.fake.current()

    def require(self, gib: int) -> None:
        if self.is_large and gib > 4:
            pytest.skip(f"{gib} GiB are too much for the CPU")

    def threads(self) -> AbstractContextManager[Any]:
        return nullcontext()


def make_device(name: str, small: bool) -> Device:
    """The device of that name; with ``small`` a GPU gets the small cases too."""
    if name == "cpu":
        return Device()
    if name == "cuda":
        return Cuda(is_large=not small)
    from fake_gpu.device import Device as FakeGpu  # it compiles a driver: not where kernels are interpreted

    return Stub(is_large=not small, fake=FakeGpu(STUBS[name]))
