"""Conversion from and to torch's DTensor, without a copy."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritoncomm.errors import UnsupportedError
from tritoncomm.reshard import Layout
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.distspec import ReplicaSpec, ShardSpec, _DistSpec
from tritoncomm.tensor.layout import LocalShard, plain
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import layout_over
from tritoncomm.tensor.tensor_spec import ColoTensorSpec

__all__ = ["spec_of", "to_dtensor"]


def spec_of(tensor: DTensor) -> ColoTensorSpec:
    """Return the process group and the layout of a DTensor over all ranks of its mesh."""
    mesh = tensor.device_mesh
    spec = _placed(tuple(tensor.shape), tuple(mesh.shape), tensor.placements)
    # The ranks of a mesh of several axes are one tensor-parallel group, counted row-major. ``over_device_mesh`` raises
    # unless such a group exists and its ranks ascend.
    pg = ProcessGroup.from_device_mesh(mesh) if mesh.ndim == 1 else ProcessGroup.over_device_mesh(mesh)
    return ColoTensorSpec(pg, spec)


def _placed(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]) -> _DistSpec:
    """Return the layout of a DTensor of global ``shape``; reject shards that no ``ShardSpec`` describes."""
    parts: dict[int, int] = {}
    replicated = False
    for size, placement in zip(mesh, placements, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] = parts.get(placement.dim, 1) * size
        elif isinstance(placement, Replicate):
            replicated = replicated or size > 1
        else:
            raise UnsupportedError(f"from_dtensor: {placement} is neither Shard nor Replicate; redistribute first")
    prefix = f"from_dtensor: {list(placements)} on a mesh of {mesh}"
    if not parts:
        return ReplicaSpec()
    if replicated:
        raise UnsupportedError(f"{prefix} shards along some axes only; redistribute first")
    counts = tuple((dim, count) for dim, count in parts.items() if count > 1)  # a spec may have dims of one part, too
    ranks = tuple(range(math.prod(mesh)))
    # DTensor splits a dim axis by axis, a ``ShardSpec`` at once, so their shards agree only where the dim divides. No
    # rule about placements is needed: the shards are compared.
    if Layout.on_mesh(shape, np.reshape(ranks, mesh), placements) != layout_over(shape, counts, ranks):
        raise UnsupportedError(f"{prefix} gives {list(shape)} shards that no ShardSpec describes; redistribute first")
    return ShardSpec(list(parts), list(parts.values()))


def to_dtensor(tensor: LocalShard) -> DTensor:
    """Return a DTensor over the tensor-parallel ranks, with a mesh axis per sharded dim; shares memory and gradients.

    Missing process groups of a mesh of several axes are made as by ``ProcessGroup``.
    """
    shape = torch.Size(tensor.global_shape)
    parts = dict(tensor.partitions)
    mesh = _mesh(tensor.process_group, tuple(parts.values()), tensor.device.type)
    placements: list[Any] = [Shard(dim) for dim in parts] or [Replicate()]
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(plain(tensor), mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh(pg: ProcessGroup, sizes: tuple[int, ...], device_type: str) -> TorchMesh:
    if len(sizes) < 2:
        return pg.device_mesh(device_type)
    ranks = dist.get_process_group_ranks(pg.tp_process_group())
    return DeviceMesh(ranks, sizes, init_process_group=True, need_flatten=False).to_torch(device_type)
