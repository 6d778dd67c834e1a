"""Host time of resharding: planning 1,000 tensors from 64 to 64 ranks, and a bucket of a plan that is replayed.

Replays run over a no-op process group with small tensors: on the CPU, where passes are torch's, and on a stub CUDA
driver, where they are launched as on a GPU and nothing runs (that needs a C compiler, and a machine without a CUDA
device). What is measured is the host, not the exchange; the no-op group's own time, which grows with its ranks, is
shown beside it.

    PYTHONPATH=.:kernels python bench/reshard_host.py
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from bench.bench_launch import missing
from bench.hosts import helpers, no_op_group
from tritoncomm.core import backend
from tritoncomm.reshard import Layout, reshard, reshard_plan

__all__ = ["planning", "replay"]

GRID = np.arange(64)
CASES = {
    "S0*64 to S1*64": ((GRID, [0]), (GRID, [1])),
    "R*8,S0*8 to R*16,S0*4": ((GRID.reshape(8, 8), [None, 0]), (GRID.reshape(16, 4), [None, 0])),
    "S0*8,S1*8 to S1*16,R*4": ((GRID.reshape(8, 8), [0, 1]), (GRID.reshape(16, 4), [1, None])),
}
ROUNDS = 400


def planning(name: str) -> float:
    """Seconds to plan 1,000 tensors of different shapes on one rank, layouts and checks included."""
    started = time.perf_counter()
    shapes = {f"w{i}": (1024 + 8 * (i % 500), 1024 + 8 * (i // 2)) for i in range(1000)}
    sides = [{key: Layout.on_mesh(s, *side) for key, s in shapes.items()} for side in CASES[name]]
    reshard_plan(dict.fromkeys(shapes, torch.bfloat16), *sides, ranks=range(64), rank=3)
    return time.perf_counter() - started


def median(call: Callable[[], Any]) -> float:
    """Microseconds of a warm call."""
    for _ in range(20):
        call()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def replay(host: Any, world: int, tensors: int, buckets: int) -> dict[str, float]:
    """Microseconds per bucket of a plan, also into given tensors, of a cached plan, and of the no-op group alone."""
    with host, no_op_group(world) as group:
        source, target = (Layout.on_mesh((64, 64), range(world), [dim]) for dim in (0, 1))
        given = {f"w{i}": torch.ones(64 // world, 64) for i in range(tensors)}
        out = {name: torch.empty(64, 64 // world) for name in given}
        sent = 4 * 64 // world * 64 // world * (world - 1) * tensors
        limit: dict[str, Any] = {"bucket_bytes": sent // buckets}
        plan = reshard_plan(given, source, target, **limit)
        wire = torch.empty(sent // buckets, dtype=torch.uint8)
        counts = tuple(0 if peer == 0 else len(wire) // (world - 1) for peer in range(world))
        assert (len(plan.transfers.buckets), plan.transfers.local_copies) == (buckets, 0)
        assert plan.transfers.buckets[0].send.counts == counts
        return {
            "plan.execute": median(lambda: plan.execute(given)) / buckets,
            "plan.execute(out=)": median(lambda: plan.execute(given, out=out)) / buckets,
            "reshard": median(lambda: reshard(given, source, target, **limit)) / buckets,
            "the group alone": median(lambda: backend.all_to_all(wire, wire, counts, counts, group, "reshard")),
        }


if __name__ == "__main__":
    for case in CASES:
        print(f"plan of 1,000 tensors, {case}: {planning(case):.2f} s")
    torch.set_num_threads(1)  # the no-op group copies what is sent, and waits for threads that other work keeps busy
    stub = "" if missing() else "stub CUDA driver"
    for where in filter(None, ("CPU", stub)):
        for ranks, count, parts in ((2, 1, 1), (8, 1, 1), (2, 8, 1), (2, 8, 8), (8, 8, 8), (2, 32, 1)):
            host = helpers("fake_gpu.device").Device().current(runs=False) if where == stub else nullcontext()
            figures = ", ".join(f"{name} {us:.1f}" for name, us in replay(host, ranks, count, parts).items())
            print(f"{where}, {ranks} ranks, {count} tensors in {parts} buckets, us per bucket: {figures}")
