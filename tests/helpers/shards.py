"""Process groups, layouts and shards for tests of ColoTensors."""

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.distspec import _DistSpec

__all__ = ["layouts", "ranks_of", "shard_of", "sharded"]


def ranks_of(group: TorchGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroup(ranks=ranks, tp_degree=len(ranks))


def layouts(ndim: int, world: int) -> list[_DistSpec]:
    """Replica, every dim of the first three, the last one counted from the end, and several dims in both orders."""
    result = [ReplicaSpec(), ShardSpec([-1], [world]), *(ShardSpec([dim], [world]) for dim in range(min(ndim, 3)))]
    if world > 2 and ndim > 1:
        result += [ShardSpec([0, 1], [2, world // 2]), ShardSpec([-1, 0], [world // 2, 2])]
    return result


def shard_of(full: Tensor, spec: _DistSpec, rank: int) -> Tensor:
    """A rank's shard, by ``torch.chunk``."""
    dims, counts = getattr(spec, "dims", ()), getattr(spec, "num_partitions", ())
    for place, dim in enumerate(dims):
        index = rank // math.prod(counts[place + 1 :]) % counts[place]
        shards = full.chunk(counts[place], dim)
        full = shards[index] if index < len(shards) else full.narrow(dim, 0, 0)
    return full.clone()


def sharded(full: Tensor, spec: _DistSpec, pg: ProcessGroup) -> ColoTensor:
    return ColoTensor(shard_of(full, spec, pg.tp_local_rank()), ColoTensorSpec(pg, spec), full.shape)
