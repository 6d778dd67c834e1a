"""Notes of ``shard_batch`` on the tensors that it makes, for the layers that get them or views of them."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

__all__ = ["DOCUMENTS", "GROUP", "LARGEST", "LAYER_MASK", "MADE", "PADDED", "SHARD", "BatchShard", "note", "noted"]

# Attributes of position_ids: the group's name, positions added to a sequence without a mask, a BatchShard, a mask of
# this rank's positions, which has the BatchShard, too, and the largest position of the batch, without those added.
GROUP, PADDED, SHARD = "tritoncomm_sequence_group", "tritoncomm_padded", "tritoncomm_shard"
LAYER_MASK, LARGEST = "tritoncomm_layer_mask", "tritoncomm_largest_position"
# Attributes of masks: made by ours; the documents that it stands for.
MADE, DOCUMENTS = "tritoncomm_made", "tritoncomm_documents"


class BatchShard(NamedTuple):
    """Shard of a batch, as recurrent layers need it beside their tensors.

    Attributes:
        documents: global starts of packed documents, of each row; None for one document.
        columns: this rank's columns of the padding mask, ``[b, s]``; None without padding.
    """

    documents: list[list[int]] | None
    columns: Tensor | None


def note(x: Tensor, name: str, value: Any) -> None:
    """Set an attribute of a tensor, where torch.compile sees it, and of its storage, which views share."""
    for holder in (x, x.untyped_storage()):
        setattr(holder, name, value)


def noted(x: Any, name: str) -> Any:
    """Return an attribute that ``note`` has set; None without one."""
    if not isinstance(x, Tensor):
        return None
    return getattr(x if is_compiling() else x.untyped_storage(), name, None)
