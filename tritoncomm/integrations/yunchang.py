"""yunchang's ``SeqAllToAll4D`` and ``SeqAllToAll5D``: the all-to-alls of its Ulysses attention, in as few copies."""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ShapeError
from tritoncomm.mappings import all_to_all_dims

__all__ = ["SeqAllToAll4D", "SeqAllToAll5D"]


class _SeqAllToAll:
    """Base of the two classes: ``ndim`` dims, the heads in the last but one."""

    ndim: ClassVar[int]

    @classmethod
    def apply(
        cls, group: ProcessGroup | None, input: Tensor, scatter_idx: int, gather_idx: int, use_sync: bool = False
    ) -> Tensor:
        """Exchange over ``group`` (all ranks by default); ``use_sync`` waits for the device afterwards."""
        heads = cls.ndim - 2
        if input.dim() != cls.ndim or {scatter_idx, gather_idx} != {1, heads}:
            raise ShapeError(
                f"{cls.__name__}: expected {cls.ndim} dims and an exchange between dims 1 and {heads}, not shape "
                f"{tuple(input.shape)}, scatter_idx {scatter_idx}, gather_idx {gather_idx}"
            )
        out = all_to_all_dims(input, scatter_idx, gather_idx, dist.group.WORLD if group is None else group)
        if use_sync and input.is_cuda:
            torch.cuda.synchronize(input.device)
        return out


class SeqAllToAll4D(_SeqAllToAll):
    """Forward: split ``scatter_idx`` over the ranks, concatenate ``gather_idx``. Backward: the dims swapped.

    Shape: ``[b, s, h, d] -> [b, s*world, h/world, d]`` with dims 2, 1, and back with 1, 2.
    """

    ndim = 4


class SeqAllToAll5D(_SeqAllToAll):
    """Forward: split ``scatter_idx`` over the ranks, concatenate ``gather_idx``. Backward: the dims swapped.

    Shape: ``[b, s, 3, h, d] -> [b, s*world, 3, h/world, d]`` with dims 3, 1, and back with 1, 3.
    """

    ndim = 5
