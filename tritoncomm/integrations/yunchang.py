"""yunchang's ``SeqAllToAll4D`` and ``SeqAllToAll5D``: the all-to-alls of its Ulysses attention, in as few copies."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ShapeError
from tritoncomm.mappings import all_to_all_dims

__all__ = ["SeqAllToAll4D", "SeqAllToAll5D"]


class SeqAllToAll4D:
    """Forward: split ``scatter_idx`` over the ranks, concatenate ``gather_idx``. Backward: the dims swapped.

    Shape: ``[b, s, h, d] -> [b, s*world, h/world, d]`` with dims 2, 1, and back with 1, 2.
    """

    @staticmethod
    def apply(
        group: ProcessGroup | None, input: Tensor, scatter_idx: int, gather_idx: int, use_sync: bool = False
    ) -> Tensor:
        """The exchange over ``group`` (all ranks by default); ``use_sync`` waits for the device afterwards."""
        return _exchange("SeqAllToAll4D", 4, group, input, scatter_idx, gather_idx, use_sync)


class SeqAllToAll5D:
    """Forward: split ``scatter_idx`` over the ranks, concatenate ``gather_idx``. Backward: the dims swapped.

    Shape: ``[b, s, 3, h, d] -> [b, s*world, 3, h/world, d]`` with dims 3, 1, and back with 1, 3.
    """

    @staticmethod
    def apply(
        group: ProcessGroup | None, input: Tensor, scatter_idx: int, gather_idx: int, use_sync: bool = False
    ) -> Tensor:
        """The exchange over ``group`` (all ranks by default); ``use_sync`` waits for the device afterwards."""
        return _exchange("SeqAllToAll5D", 5, group, input, scatter_idx, gather_idx, use_sync)


def _exchange(
    name: str, ndim: int, group: Any, x: Tensor, scatter_dim: int, gather_dim: int, synchronize: bool
) -> Tensor:
    """Either class; heads are in the last dim but one.

    Raises:
        ShapeError: another number of dims, or dims other than sequence and heads.
    """
    if x.dim() != ndim or {scatter_dim, gather_dim} != {1, ndim - 2}:
        raise ShapeError(
            f"{name}: expected {ndim} dims and an exchange between dims 1 and {ndim - 2}, not shape {tuple(x.shape)}, "
            f"scatter_idx {scatter_dim}, gather_idx {gather_dim}"
        )
    out = all_to_all_dims(x, scatter_dim, gather_dim, dist.group.WORLD if group is None else group)
    if synchronize and x.is_cuda:
        torch.cuda.synchronize(x.device)
    return out
