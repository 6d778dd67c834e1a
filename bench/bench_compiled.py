"""Compiled layers around mappings against megatron-core's mappings and plain torch, each compiled in the same way.

``torch.compile(fullgraph=True)`` makes one graph of a layer: two mappings with a GELU or a matrix product between them,
a product before and a sum after. The process group is a no-op, so a call is inductor's kernels and the host's work.
Times are CPU times of the one thread that runs. Subnormal numbers, which unwritten memory may hold, count as zeros:
they would slow down single calls. "By hand" is plain torch of ``tritoncomm/bench/by_hand.py``. A pass is a kernel, a
copy or a matrix product that inductor's output code calls.
``python bench/bench_compiled.py`` prints the table; ``--json PATH`` writes it with versions. Needs a C++ compiler.
"""

import math
import os
import re
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import gelu

from bench.guard import COUNTED, row_target
from bench.harness import Clock, Row, Samples
from bench.hosts import megatron_part, missing_megatron, no_op_group, peer, run_backward
from bench.timing import quiet_host
from tritoncomm import mappings
from tritoncomm.bench import by_hand

__all__ = ["CASES", "Case", "Compiled", "compiled", "host", "layer", "missing", "passes"]

WORLD = 4
LARGE = 1 << 16  # elements of an input from which on kernels take longer than the host
SP2HP = "all_to_all_sp2hp", "all_to_all_hp2sp"
SEQUENCE = "gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"
LAST = "all_gather_last_dim_from_tensor_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region"


@dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
        mappings: names of the first mapping, and of the second if there is one.
        shape: shape of this rank's input.
        weight: shape of the matrix between the mappings; None for a GELU.
    """

    mappings: tuple[str, ...]
    shape: tuple[int, int]
    weight: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        between = "gelu" if self.weight is None else f"linear {list(self.weight)}"
        return ", ".join((self.mappings[0], between, *self.mappings[1:], str(list(self.shape))))


CASES = [
    Case(SP2HP, (64, 256)),
    Case(SP2HP, (512, 1024)),
    Case(LAST, (512, 256)),
    Case(SEQUENCE, (128, 256), (256, 256)),
    Case(LAST, (128, 64), (256, 256)),
]


def layer(module: Any, case: Case, group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The layer of a case with the mappings of ``module``."""
    first, *second = (getattr(module, name) for name in case.mappings)
    weight = None if case.weight is None else torch.randn(case.weight)

    def call(x: Tensor) -> Tensor:
        hidden = first(x * 3, group=group)
        hidden = gelu(hidden) if weight is None else hidden @ weight
        for mapping in second:
            hidden = mapping(hidden, group=group)
        return hidden + 1

    return call


@contextmanager
def on_cpu(module: Any) -> Iterator[Any]:
    """Let Megatron's ``module`` allocate on the CPU; ``hosts.cpu_device`` would break the graphs."""
    stand_in = types.ModuleType("torch_on_cpu")
    stand_in.__dict__.update({name: value for name, value in vars(torch).items() if not name.startswith("__")})
    stand_in.__dict__["cuda"] = types.SimpleNamespace(current_device=lambda: "cpu")
    module.torch = stand_in
    try:
        yield module
    finally:
        module.torch = torch


def passes(codes: Sequence[str]) -> int:
    """Return the number of kernels, copies and matrix products that inductor's output ``codes`` call."""
    calls = r"cpp_fused\w*(?=\()|extern_kernels\.\w+|torch\.ops\.(?:aten|tritoncomm)\.\w+|aten\.\w+(?=\()|\.copy_\("
    found = [name for code in codes for name in re.findall(calls, code[code.index("def call") :])]
    return sum(name != "torch.ops.tritoncomm.count" for name in found)


@contextmanager
def host() -> Iterator[dict[str, Any]]:
    """The providers' modules, and the group under "group"."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # inductor writes the number into its kernels
    torch.set_flush_denormal(True)
    try:
        with no_op_group(WORLD) as group, on_cpu(peer("tensor_parallel.mappings")) as megatron:
            yield {"ours": mappings, "megatron": megatron, "by hand": by_hand, "group": group}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Compiled:
    """The compiled layer of one provider.

    Attributes:
        forward: call without gradients.
        both: call with a gradient, and its backward.
        passes: number of passes in the forward without gradients; in the forward and backward of ``both``.
    """

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]
    passes: tuple[int, int]


def compiled(case: Case, module: Any, group: ProcessGroup) -> Compiled:
    """Compile the layer of a case with the mappings of ``module``, and run it once."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    function = torch.compile(layer(module, case, group), fullgraph=True)
    x = torch.randn(case.shape)
    leaf = x.clone().requires_grad_()
    out, code = run_and_get_code(function, x)
    gradient = torch.randn(out.shape)

    def both() -> tuple[Tensor, ...]:
        return run_backward((function(leaf),), (gradient,), False, False, (leaf,), True, accumulate_grad=False)

    (grad,), codes = run_and_get_code(both)
    assert tuple(grad.shape) == case.shape, (case.label, grad.shape)
    return Compiled(lambda: function(x), both, (passes(code), passes(codes)))


def sampled(calls: dict[str, Callable[[], Any]], rounds: int, inner: int) -> Samples:
    """Microseconds of CPU time per call of every provider, one sample per round; who comes first alternates."""
    samples: Samples = {name: [] for name in calls}
    with quiet_host():
        for i in range(rounds):
            for name in list(calls)[:: -1 if i % 2 else 1]:
                started = time.thread_time_ns()
                for _ in range(inner):
                    calls[name]()
                samples[name].append((time.thread_time_ns() - started) / inner / 1000)
    return samples


def measure(case: Case, host: dict[str, Any], clock: Clock) -> Iterator[Row]:
    """A row for a forward, and one for a forward and a backward."""
    torch.compiler.reset()
    made = {name: compiled(case, host[name], host["group"]) for name in ("ours", "megatron", "by hand")}
    inner = 10 if math.prod(case.shape) > LARGE else 40
    for i, mode in enumerate(("forward", "forward + backward")):
        calls = {name: (each.forward, each.both)[i] for name, each in made.items()}
        counted = {name: each.passes[i] for name, each in made.items()}
        yield clock.row(
            f"{case.label}, {mode}",
            lambda calls=calls: sampled(calls, clock.rounds, inner),
            mode=mode,
            passes=counted,
            **row_target(COUNTED),
        )


def targets(row: Row) -> list[str]:
    """Passes beyond Megatron's."""
    ours, theirs = row["passes"]["ours"], row["passes"]["megatron"]
    return [f"{row['row']}: {ours} passes, megatron {theirs}"] if ours > theirs else []


def missing() -> str:
    """Reason why nothing can be measured here; empty if it can."""
    if not (shutil.which("g++") or shutil.which("c++")):
        return "inductor needs a C++ compiler"
    return missing_megatron()


PART = replace(
    megatron_part(name="compiled", cases=CASES, measure=measure, host=host, rounds=60, targets=targets),
    missing=missing,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
