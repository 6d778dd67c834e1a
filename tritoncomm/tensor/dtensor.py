"""Over to torch's DTensor and back, without a copy."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.dispatch import plain, wrap
from tritoncomm.tensor.distspec import ReplicaSpec, ShardSpec, partitions
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["from_dtensor", "to_dtensor"]


def from_dtensor(tensor: DTensor) -> ColoTensor:
    """A DTensor on a mesh of one axis; shares its memory, and gradients arrive at it.

    Raises:
        UnsupportedError: several axes, or a partial placement.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1:
        raise UnsupportedError(f"from_dtensor: the mesh has {mesh.ndim} axes; redistribute to one axis first")
    (placement,) = placements
    if isinstance(placement, Shard):
        spec = ShardSpec([placement.dim], [mesh.size()])
    elif isinstance(placement, Replicate):
        spec = ReplicaSpec()
    else:
        raise UnsupportedError(f"from_dtensor: {placement} is neither Shard nor Replicate; redistribute first")
    return wrap(tensor.to_local(), ProcessGroup.from_device_mesh(mesh), spec, tuple(tensor.shape))


def to_dtensor(tensor: ColoTensor) -> DTensor:
    """On a mesh over the tensor-parallel group; shares the memory, and gradients arrive at ``tensor``.

    Raises:
        UnsupportedError: cut along several dims.
    """
    parts = partitions(tensor.dist_spec, len(tensor.size_global()))
    if len(parts) > 1:
        raise UnsupportedError(f"to_dtensor: {tensor.dist_spec} needs a mesh of {len(parts)} axes")
    mesh = tensor.process_group.device_mesh(tensor.device.type)
    placement: Any = Shard(next(iter(parts))) if parts else Replicate()
    shape = torch.Size(tensor.size_global())
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(plain(tensor), mesh, [placement], run_check=False, shape=shape, stride=stride)
