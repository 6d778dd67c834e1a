"""The ``torch.distributed.checkpoint`` protocol of a ColoTensor."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritoncomm.tensor.distspec import shard_box
from tritoncomm.tensor.layout import plain

__all__ = ["chunks", "shard_at", "write_items"]


def chunks(tensor: Any) -> list[ChunkStorageMetadata]:
    """Return offsets and sizes of this rank's shard in the global tensor; an empty shard has no chunk."""
    sizes, parts = plain(tensor).shape, tensor.partitions
    if parts and not sizes.numel():
        return []
    box = shard_box(tensor.global_shape, parts, tensor.process_group.tp_local_rank() if parts else 0)
    return [ChunkStorageMetadata(torch.Size([start for start, _ in box]), sizes)]


def write_items(tensor: Any, fqn: str) -> list[WriteItem]:
    """Return the write items of this rank's shard; a checkpoint writes shards that several ranks hold once."""
    local = plain(tensor)
    properties, size = TensorProperties.create_from_tensor(local), torch.Size(tensor.global_shape)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, TensorWriteData(chunk, properties, size)
        )
        for chunk in chunks(tensor)
    ]


def shard_at(tensor: Any, index: MetadataIndex) -> Tensor:
    """Return the local shard; raise if it does not start at ``index.offset``."""
    for chunk in chunks(tensor):
        if index.offset is None or chunk.offsets == index.offset:
            return plain(tensor).detach()
    raise ValueError(f"{index.fqn}: this rank has no shard at {index.offset}")
