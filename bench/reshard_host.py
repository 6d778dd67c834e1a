"""Host time of resharding: planning 1,000 tensors from 64 to 64 ranks, and a bucket of a plan that is replayed.

Replays run over a no-op process group with small CPU tensors: what is measured is the host, not the exchange.

    PYTHONPATH=.:kernels python bench/reshard_host.py
"""

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm.reshard import Layout, reshard_plan

__all__ = ["planning", "replay"]

GRID = np.arange(64)
CASES = {
    "S0*64 to S1*64": ((GRID, [0]), (GRID, [1])),
    "R*8,S0*8 to R*16,S0*4": ((GRID.reshape(8, 8), [None, 0]), (GRID.reshape(16, 4), [None, 0])),
    "S0*8,S1*8 to S1*16,R*4": ((GRID.reshape(8, 8), [0, 1]), (GRID.reshape(16, 4), [1, None])),
}


def planning(name: str) -> float:
    """Seconds to plan 1,000 tensors of different shapes on one rank, layouts and checks included."""
    started = time.perf_counter()
    shapes = {f"w{i}": (1024 + 8 * (i % 500), 1024 + 8 * (i // 2)) for i in range(1000)}
    sides = [{key: Layout.on_mesh(s, *side) for key, s in shapes.items()} for side in CASES[name]]
    reshard_plan(dict.fromkeys(shapes, torch.bfloat16), *sides, ranks=range(64), rank=3)
    return time.perf_counter() - started


def replay(world: int = 2, rounds: int = 300) -> float:
    """Seconds of the host per bucket, median: one tensor, shards of dim 0 to shards of dim 1."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    source, target = (Layout.on_mesh((64, 64), range(world), [dim]) for dim in (0, 1))
    x = torch.ones(64 // world, 64)
    plan = reshard_plan(x, source, target)
    assert len(plan.transfers.buckets) == 1
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan.run([x], None)
        times.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return statistics.median(times)


if __name__ == "__main__":
    for case in CASES:
        print(f"plan of 1,000 tensors, {case}: {planning(case):.2f} s")
    for ranks in (2, 8):
        print(f"replay of a bucket over {ranks} ranks: {replay(ranks) * 1e6:.1f} us")
