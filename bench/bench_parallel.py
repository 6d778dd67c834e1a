"""Styles of ``parallelize_module``: host time of a step of a parallel MLP, ours against torch's.

Norm, column-parallel and row-parallel linear layers, forward and backward, in small tensors over a no-op process group
of two ranks: parameters are DTensors for both, activations plain tensors for ours.
``python bench/bench_parallel.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor.parallel as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from bench.guard import row_target
from bench.harness import Clock, Part, Row
from bench.hosts import no_op_group
from tritoncomm import parallel

WORLD, INNER = 2, 5
CASES = ["tensor parallel", "tensor and sequence parallel"]


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh over the no-op group."""
    with no_op_group(WORLD) as group:
        yield DeviceMesh.from_group(group, "cpu")


def plan(styles: Any, sequence: bool) -> dict[str, Any]:
    """Styles of the layers, from torch's module or from ours."""
    if not sequence:
        return {"1": styles.ColwiseParallel(), "3": styles.RowwiseParallel()}
    return {
        "0": styles.SequenceParallel(),
        "1": styles.ColwiseParallel(input_layouts=Shard(1)),
        "3": styles.RowwiseParallel(output_layouts=Shard(1)),
    }


def step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        out = model(x)
        out.sum().backward()

    return run


def measure(case: str, mesh: DeviceMesh, clock: Clock) -> Iterator[Row]:
    """A step of both; the outputs have the same bits (the no-op group moves nothing, for both)."""
    sequence = case == CASES[1]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(2, 8 // WORLD if sequence else 8, 16, requires_grad=True)
    calls = {}
    for name, styles in (("ours", parallel), ("torch", theirs)):
        model = theirs.parallelize_module(copy.deepcopy(plain), mesh, plan(styles, sequence), src_data_rank=None)
        calls[name] = step(model, x)
    yield clock.time(f"{case}, step", calls, INNER, mode="step", **row_target())


PART = Part(
    name="parallel",
    unit="microseconds per step",
    cases=CASES,
    measure=measure,
    host=mesh_of_one,
    peer="torch",
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
