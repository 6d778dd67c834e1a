"""One collective between two sharding specs: what it costs, and what it does to a tensor, forward and backward."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritoncomm import engine, record
from tritoncomm.autograd import direct
from tritoncomm.dims import checked_dim, wants_grad
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.tensor.device_mesh import DeviceMesh, Members
from tritoncomm.tensor.sharding_spec import ShardingSpec

__all__ = ["CollectiveCommPattern", "CommSpec"]


class CollectiveCommPattern(enum.Enum):
    """A collective and its adjoint, which gradients go through."""

    GATHER_FWD_SPLIT_BWD = "gather_fwd_split_bwd"
    ALL2ALL_FWD_ALL2ALL_BWD = "all2all_fwd_all2all_bwd"
    SPLIT_FWD_GATHER_BWD = "split_fwd_gather_bwd"
    ALLREDUCE_FWD_IDENTITY_BWD = "all_reduce_fwd_identity_bwd"
    IDENTITY_FWD_ALLREDUCE_BWD = "identity_fwd_all_reduce_bwd"
    MIXGATHER_FWD_SPLIT_BWD = "mixgather_fwd_split_bwd"


@dataclass(frozen=True, slots=True)
class _Move:
    """One movement of a tensor over a group.

    Attributes:
        kind: name of a function in ``_MOVES``.
        members: the group.
        cut: dim that is cut; of a mixed gather nothing.
        join: dim that is joined.
        mixed: of a mixed gather, (dim, mesh axes) of every cut dim.
        mesh_shape: of a mixed gather.
        place: coordinates of this rank, for a mixed gather.
        name: for errors and the record.
        backward: whether the tensor is a gradient, whose memory is its giver's.
    """

    kind: str
    members: Members
    name: str
    cut: int = 0
    join: int = 0
    mixed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    mesh_shape: tuple[int, ...] = ()
    place: tuple[int, ...] = ()
    backward: bool = False

    def adjoint(self) -> "_Move":
        """What gradients go through."""
        kind, name = _ADJOINTS[self.kind], self.name.removesuffix(".backward") + ".backward"
        return replace(self, kind=kind, cut=self.join, join=self.cut, name=name, backward=True)

    def run(self, x: Tensor) -> Tensor:
        """The result; never in the memory of a gradient, nor, except for cutting dim 0, of ``x``."""
        return _MOVES[self.kind](x, self)


_ADJOINTS = {
    "gather": "split",
    "split": "gather",
    "exchange": "exchange",
    "all_reduce": "identity",
    "identity": "all_reduce",
    "mix_gather": "mix_split",
    "mix_split": "mix_gather",
}
