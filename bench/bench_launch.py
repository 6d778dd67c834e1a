"""Host time of a kernel launch without a GPU: Triton's launcher over a stub CUDA driver.

Ours is the launch of a prepared call, and ``ops.pack`` with everything around it: the plan, the choice of the path, the
wire that is allocated. The peer is the ordinary ``fn[grid](...)`` of the same kernel with the same arguments, after the
same allocation where there is one. The driver's own time is not in these figures, nor is a real allocator's;
`gpu_bench.py` measures all of it on a GPU. ``python bench/bench_launch.py`` prints the table; ``--json PATH`` writes it
with versions. Needs a C compiler, and a machine without a CUDA device.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from tritoncomm_kernels.launch import Launch, stream_of

from bench.harness import Clock, Part, Row
from bench.hosts import helpers
from tritoncomm.core import ops

INNER = 100
PEER = "fn[grid](...)"
CASES = (
    "launch, pack",
    "launch, reduce",
    "plan, path and launch, pack",
    "plan, path and launch, unpack",
    "plan, path and launch, reduce",
)
SHAPE, WORLD = (16, 256), 4
Calls = tuple[Callable[[], Any], Callable[[], Any]]


def missing() -> str:
    """Why nothing can be measured here, empty if it can."""
    if torch.cuda.is_available():
        return "there is a CUDA device here, and gpu_bench.py measures the launch on it"
    if shutil.which("cc") is None:
        return "there is no C compiler here"
    return "kernels are interpreted: TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") == "1" else ""


def seen(call: Callable[[], Any]) -> Launch:
    """The prepared launch that a call makes."""
    launches: list[Launch] = []
    ordinary = Launch.__call__

    def note(self: Launch, *arguments: Any) -> None:
        launches.append(self)
        ordinary(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", note)
        call()
    (launch,) = launches
    return launch


def ready(launch: Launch, first: Tensor, second: Tensor) -> Callable[[], Any]:
    """Call Triton's C launcher with ready arguments: the launch without our host time.

    Where there is no such launcher, as in the interpreter, the prepared launch is called.
    """
    launch(first, second, 1.0)
    variant = launch.variants.get(float)
    if variant is None or launch.table is not None:
        return lambda: launch(first, second, 1.0)
    arguments: tuple[Any, ...] = (first.data_ptr(), second.data_ptr(), 1.0, *launch.tail)
    run, head = variant.run, (launch.grid, 1, 1, stream_of(launch.device), *variant.fixed)
    arguments = (arguments,) if variant.packed else arguments
    return lambda: run(*head, *arguments)


def by_hand(launch: Launch, first: Tensor, second: Tensor) -> Callable[[], Any]:
    """Launch the kernel the ordinary way, as a wrapper around it does."""
    kernel, grid, arguments = launch.kernel, (launch.grid,), launch.arguments
    constants = {**launch.constants, "num_warps": launch.num_warps, "enable_fp_fusion": False}
    return lambda: kernel[grid](first, second, 1.0, *arguments, **constants)


def calls() -> tuple[Calls, ...]:
    """Ours and the peer's, in the order of the cases; to be called where the device is current."""
    x = torch.randn(SHAPE)
    wire, out = torch.empty(WORLD, SHAPE[0], SHAPE[1] // WORLD), torch.empty(SHAPE[0] * SHAPE[1] // WORLD)
    parts = wire.view(WORLD, -1)
    pack, unpack = seen(lambda: ops.pack(x, 1, WORLD)), seen(lambda: ops.unpack(wire, SHAPE, 1, WORLD))
    reduce = seen(lambda: ops.reduce(parts))

    def after(call: Callable[[], Any], shape: tuple[int, ...]) -> Callable[[], Any]:
        def allocated() -> None:
            torch.empty(shape)
            call()

        return allocated

    kernels = {
        "pack": by_hand(pack, x, wire),
        "unpack": by_hand(unpack, x, wire),
        "reduce": by_hand(reduce, parts, out),
    }
    return (
        (lambda: pack(x, wire, 1.0), kernels["pack"]),
        (lambda: reduce(parts, out, 1.0), kernels["reduce"]),
        (lambda: ops.pack(x, 1, WORLD), after(kernels["pack"], wire.shape)),
        (lambda: ops.unpack(wire, SHAPE, 1, WORLD), after(kernels["unpack"], SHAPE)),
        (lambda: ops.reduce(parts), after(kernels["reduce"], out.shape)),
    )


@contextmanager
def host() -> Iterator[dict[str, Calls]]:
    """The stub driver's device as the current one; the calls of every case."""
    with helpers("fake_gpu.device").Device().current(runs=False):
        yield dict(zip(CASES, calls(), strict=True))


def measure(case: str, timed: dict[str, Calls], clock: Clock) -> Iterator[Row]:
    """No launch may cost more than Triton's own."""
    yield clock.time(case, dict(zip(("ours", PEER), timed[case], strict=True)), INNER, limit=1.0)


PART = Part(
    name="launch",
    unit="microseconds per call, the driver's left out",
    cases=CASES,
    measure=measure,
    host=host,
    peer=PEER,
    missing=missing,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
