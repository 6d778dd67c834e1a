"""Process groups that carry CUDA tensors only, as NCCL's do, on a machine without GPUs."""

import math
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["cuda_mesh"]


@lru_cache(maxsize=4)
def cuda_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks with such groups, made once in a process."""
    grid = torch.arange(math.prod(shape)).view(shape)
    made = []
    for axis, size in enumerate(shape):
        lists = grid.movedim(axis, -1).reshape(-1, size).tolist()
        made.append(dist.new_subgroups_by_enumeration(lists, backend="cuda:gloo")[0])
    return DeviceMesh.from_group(made, "cuda", mesh=grid, mesh_dim_names=names)
