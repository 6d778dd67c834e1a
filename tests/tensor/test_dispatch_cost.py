"""Host cost of redistribution: calls of the project's functions before the collective starts."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import tritoncomm_kernels
from pool import Pool
from shards import ranks_of
from torch.distributed import ProcessGroup as TorchGroup

import tritoncomm
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ShardSpec

FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (tritoncomm, tritoncomm_kernels))
MOST_CALLS = 30


def run_count(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    x = ColoTensor(torch.randn(2, 4 * world), ColoTensorSpec(pg, ShardSpec([0], [world])))
    target = ShardSpec([1], [world])
    for _ in range(3):
        x.redistribute(target)
    calls: list[str] = []
    started: list[bool] = []

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and "alltoall" in arg.__name__:
            started.append(True)
        elif event == "call" and not started and frame.f_code.co_filename.startswith(FOLDERS):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        x.redistribute(target)
    finally:
        sys.setprofile(None)
    assert calls[0] == "redistribute"
    assert "all_to_all" in calls, calls
    assert len(calls) <= MOST_CALLS, calls


def test_calls_before_the_collective(pool: Pool) -> None:
    pool.run(run_count, world=2)
