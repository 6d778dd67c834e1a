"""Process groups and shards for tests of ColoTensors."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import (
    ColoTensor,
    ColoTensorSpec,
    ProcessGroup,
)
from tritoncomm.tensor.distspec import _DistSpec, partitions, shard_bounds

__all__ = ["ranks_of", "shard_of", "sharded"]


def ranks_of(group: TorchGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroup(ranks=ranks, tp_degree=len(ranks))


def shard_of(x: Tensor, spec: _DistSpec, rank: int) -> Tensor:
    parts = partitions(spec, x.dim())
    for dim, start, size in shard_bounds(x.shape, parts, rank) if parts else ():
        x = x.narrow(dim, start, size)
    return x.clone()


def sharded(full: Tensor, spec: _DistSpec, pg: ProcessGroup) -> ColoTensor:
    return ColoTensor(shard_of(full, spec, pg.tp_local_rank()), ColoTensorSpec(pg, spec), full.shape)
