"""Bench of tiles on a GPU: every tile's output is compared with plain torch before its time counts.

A tile's time is the median of CUDA events around one launch, the L2 cache flushed before each. Where ``evict_first`` is
an axis, the time includes a pass that reads the result, as a collective or a product does next. The crossover between
the paths is host time as a caller sees it: calls back to back, with their allocations, until the GPU has finished.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import torch_path
from tritoncomm_kernels.tables import EVICT_UNITS

from tritoncomm.core import ops
from tritoncomm.tune.candidates import Candidate
from tritoncomm.tune.cases import Case
from tritoncomm.tune.machine_code import TARGETS

__all__ = ["Bench", "architecture", "open_gpu"]

_FLUSH_BYTES = 2**28  # more than any L2 cache holds
_REPEATS = 25
_CALLS = 20
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass
class Bench:
    """A torch device as a search uses it.

    Attributes:
        device_name, sm_count: the key of its tables.
        target: key of ``TARGETS``, None if it is none of them.
        stopwatch: microseconds of one call.
        synchronize: waits for the device.
    """

    device: torch.device
    device_name: str
    sm_count: int
    target: str | None
    lanes: int
    stopwatch: Callable[[Callable[[], Any]], float]
    synchronize: Callable[[], Any]
    _prepared: tuple[Case, Tensor, Tensor, Tensor] | None = field(init=False, default=None)

    def check(self, case: Case, candidate: Candidate) -> str:
        """Return how many elements of a candidate's output differ from torch's in any bit; empty if none does."""
        _, target, expected = self._prepare(case)
        _bits(target).fill_(-1)  # the last candidate's output is still there
        self._launch(case, candidate)()
        wrong = int((_bits(target) != _bits(expected)).sum())
        return f"{wrong} of {expected.numel()} elements differ from plain torch" if wrong else ""

    def time(self, case: Case, candidate: Candidate) -> float:
        """Return the microseconds of one launch, after warming up; see the module for a pass behind it."""
        launch = self._launch(case, candidate)
        if case.op == "reduce" or case.unit not in EVICT_UNITS:
            return self.stopwatch(launch)
        written = self._prepare(case)[1].view(-1).view(torch.int64)
        return self.stopwatch(lambda: (launch(), written.sum()))

    def paths(self, case: Case) -> tuple[float, float]:
        """Return the microseconds of a call on torch's path and on triton's: medians over rounds back to back."""
        # Arguments of ``ops`` after the tensor: dim and ranks, for unpack behind the shape of the result.
        arguments = {"pack": (1, case.world), "unpack": ((case.outer, case.row), 1, case.world), "reduce": ()}
        call = partial(getattr(ops, case.op), self._prepare(case)[0], *arguments[case.op])
        times: dict[Literal["torch", "triton"], list[float]] = {"torch": [], "triton": []}
        for round_ in range(8):
            # Every round runs both paths, so that disturbances hit both.
            for path, samples in times.items():
                with ops.path(path):
                    self.synchronize()
                    started = time.perf_counter()
                    for _ in range(_CALLS):
                        call()
                    self.synchronize()
                if round_:  # the first round warms up
                    samples.append((time.perf_counter() - started) / _CALLS * 1e6)
        return median(times["torch"]), median(times["triton"])

    def _launch(self, case: Case, candidate: Candidate) -> Callable[[], Any]:
        """Return the call of the case's kernel with the candidate's tile."""
        source, target, _ = self._prepare(case)
        cols = case.row if case.op == "reduce" else case.world * case.run
        config = candidate.config(case.op, case.unit, case.outer, cols * case.dtype.itemsize)
        return partial(getattr(kernels, case.op), source, target, config=config)

    def _prepare(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        """Return source, target and expected target of a case; the last case's tensors are cached."""
        if self._prepared is None or self._prepared[0] != case:
            self._prepared = None  # frees the memory first
            rows, wire = (case.outer, case.row), (case.world, case.outer, case.run)
            shapes = {"pack": (rows, wire), "unpack": (wire, rows), "reduce": ((case.world, case.row), (case.row,))}
            source = self._random(shapes[case.op][0], case)
            target = torch.empty(shapes[case.op][1], dtype=case.dtype, device=self.device)
            expected = torch.empty_like(target)
            getattr(torch_path, case.op)(source, expected)
            self._prepared = case, source, target, expected
        return self._prepared[1:]

    def _random(self, shape: tuple[int, ...], case: Case) -> Tensor:
        """Return any bits for copies; small integers for sums."""
        size = case.dtype.itemsize
        if case.op == "reduce":
            return torch.randint(-8, 8, shape, device=self.device).to(case.dtype)
        numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device=self.device)
        return numbers.view(case.dtype) if case.dtype is not torch.bool else (numbers & 1).view(torch.bool)


def open_gpu() -> Bench | None:
    """Return the current GPU, None where there is none."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = torch.device("cuda", torch.cuda.current_device())
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def stopwatch(call: Callable[[], Any]) -> float:
        """Return the median of the microseconds of one call, with an empty L2 cache."""
        call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
        for start, end in events:
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return median(start.elapsed_time(end) * 1e3 for start, end in events)

    synchronize = partial(torch.cuda.synchronize, device)
    target = architecture(gpu) if architecture(gpu) in TARGETS else None
    return Bench(device, gpu.name, gpu.multi_processor_count, target, gpu.warp_size, stopwatch, synchronize)


def architecture(properties: Any) -> str:
    """Return the name of a GPU's architecture, as in ``TARGETS``: ``sm_90``, ``gfx942``."""
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _bits(x: Tensor) -> Tensor:
    """View elements as integers of their size, so that a comparison sees every bit."""
    return x.view(_INTEGER[x.dtype.itemsize])
