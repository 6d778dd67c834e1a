"""What ``torch.distributed.checkpoint`` asks of a tensor of which a rank holds a piece."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tritoncomm.tensor.distspec import cuts
from tritoncomm.tensor.layout import plain

__all__ = ["chunks", "shard_at", "write_items"]


def chunks(tensor: Any) -> list[ChunkStorageMetadata]:
    """Where this rank's piece lies in the whole; nothing when it is empty."""
    sizes, offsets = plain(tensor).shape, [0] * plain(tensor).dim()
    if tensor._parts:
        for dim, start, _ in cuts(tensor._global_shape, dict(tensor._parts), tensor.process_group.tp_local_rank()):
            offsets[dim] = start
        if not sizes.numel():
            return []
    return [ChunkStorageMetadata(torch.Size(offsets), sizes)]


def write_items(tensor: Any, fqn: str) -> list[WriteItem]:
    """This rank's piece; pieces that several ranks hold are written once."""
    piece = plain(tensor)
    properties, size = TensorProperties.create_from_tensor(piece), torch.Size(tensor._global_shape)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, TensorWriteData(chunk, properties, size)
        )
        for chunk in chunks(tensor)
    ]


def shard_at(tensor: Any, index: MetadataIndex) -> Tensor:
    """The piece that begins at ``index.offset``.

    Raises:
        ValueError: it is not the one that this rank holds.
    """
    for chunk in chunks(tensor):
        if index.offset is None or chunk.offsets == index.offset:
            return plain(tensor).detach()
    raise ValueError(f"{index.fqn}: this rank has no piece at {index.offset}")
