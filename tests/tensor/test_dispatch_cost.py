"""Host cost of redistribution: calls of the project's functions, the collective among them."""

import torch
from host_calls import calls_of
from shards import ranks_of
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ShardSpec

MOST_CALLS = 36


def test_calls_of_a_warm_redistribution(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    x = ColoTensor(torch.randn(2, 4 * world), ColoTensorSpec(pg, ShardSpec([0], [world])))
    target = ShardSpec([1], [world])
    for _ in range(3):
        x.redistribute(target)
    calls = calls_of(lambda: x.redistribute(target))
    assert calls[0] == "redistribute"
    assert "all_to_all" in calls, calls
    assert len(calls) <= MOST_CALLS, calls
