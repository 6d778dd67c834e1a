"""CommSpec of ColossalAI's contract: one collective between two sharding specs, its cost and its action on a tensor."""

import enum
import math
from typing import Any

from torch import Tensor

from tritoncomm.core.validation import checked_dim
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.group_registry import AxisMembers
from tritoncomm.tensor.mesh_collectives import MeshCollective, mixed_gather, run_collective
from tritoncomm.tensor.sharding_spec import ShardingSpec

__all__ = ["CollectiveCommPattern", "CommSpec"]


class CollectiveCommPattern(enum.Enum):
    """A collective, and its adjoint for the gradients."""

    GATHER_FWD_SPLIT_BWD = "gather_fwd_split_bwd"
    ALL2ALL_FWD_ALL2ALL_BWD = "all2all_fwd_all2all_bwd"
    SPLIT_FWD_GATHER_BWD = "split_fwd_gather_bwd"
    ALLREDUCE_FWD_IDENTITY_BWD = "all_reduce_fwd_identity_bwd"
    IDENTITY_FWD_ALLREDUCE_BWD = "identity_fwd_all_reduce_bwd"
    MIXGATHER_FWD_SPLIT_BWD = "mixgather_fwd_split_bwd"


_Pattern = CollectiveCommPattern
_KINDS = {pattern: pattern.value.partition("_fwd_")[0] for pattern in _Pattern}  # keys of `mesh_collectives`


class CommSpec:
    """A collective on tensors with the layout ``sharding_spec``.

    | pattern | forward | backward |
    |---|---|---|
    | GATHER_FWD_SPLIT_BWD | all-gather ``gather_dim`` over the axis | split ``gather_dim`` |
    | SPLIT_FWD_GATHER_BWD | split ``shard_dim`` | all-gather ``shard_dim`` |
    | ALL2ALL_FWD_ALL2ALL_BWD | all-to-all: split ``shard_dim``, concatenate ``gather_dim`` | the dims swapped |
    | ALLREDUCE_FWD_IDENTITY_BWD | all-reduce | identity |
    | IDENTITY_FWD_ALLREDUCE_BWD | identity | all-reduce |
    | MIXGATHER_FWD_SPLIT_BWD | all-gather of two dims, or of one over two axes, over the full mesh | split |

    Args:
        comm_pattern: the pattern, or a member of another enum with an equal value.
        sharding_spec: layout of the input; its mesh has the process groups.
        gather_dim: the dim that is gathered, ``shard_dim`` by default; for a mixed gather the first result of
            ``mix_gather_simulator``.
        shard_dim: the dim that is split, ``gather_dim`` by default.
        logical_process_axis: the mesh axis; a list of axes is merged into one, the last counting fastest. For a mixed
            gather the second result of ``mix_gather_simulator``.
        forward_only: whether the backward costs nothing.
        mix_gather: redundant with the pattern; kept for ColossalAI's signature.
        shard_cost: of splitting a tensor locally, ColossalAI's constant; no bytes are sent, so 0 is realistic.

    Raises:
        ArgumentError: unknown pattern, or a mixed gather without its two lists.
        ShapeError: axes that the mesh does not have.
    """

    def __init__(
        self,
        comm_pattern: Any,
        sharding_spec: ShardingSpec,
        gather_dim: Any = None,
        shard_dim: int | None = None,
        logical_process_axis: Any = None,
        forward_only: bool = False,
        mix_gather: bool = False,
        *,
        shard_cost: float = 100,
    ) -> None:
        self.comm_pattern, self.sharding_spec = _as_pattern(comm_pattern), sharding_spec
        self.gather_dim: Any = gather_dim
        self.shard_dim: Any = shard_dim
        self.logical_process_axis = logical_process_axis
        self.forward_only, self.shard_cost = forward_only, shard_cost
        self.device_mesh = sharding_spec.device_mesh
        if self.comm_pattern is _Pattern.MIXGATHER_FWD_SPLIT_BWD:
            self._init_mix_gather()
        elif mix_gather:
            raise ArgumentError(f"CommSpec: mix_gather requires MIXGATHER_FWD_SPLIT_BWD, not {self.comm_pattern.name}")
        elif isinstance(logical_process_axis, list | tuple):
            self.device_mesh = self.device_mesh.merged(logical_process_axis)
            self.logical_process_axis = 0  # the merged one
        # A gather and a split are along one dim, which may be given under either name.
        if self.comm_pattern in (_Pattern.GATHER_FWD_SPLIT_BWD, _Pattern.SPLIT_FWD_GATHER_BWD):
            self.gather_dim = shard_dim if gather_dim is None else gather_dim
            self.shard_dim = gather_dim if shard_dim is None else shard_dim

    def _init_mix_gather(self) -> None:
        """Check the dims and axes of a mixed gather, and make its two meshes over all ranks."""
        mesh, axes = self.sharding_spec.device_mesh, self.logical_process_axis
        if not isinstance(self.gather_dim, list | tuple) or not isinstance(axes, list | tuple):
            raise ArgumentError("CommSpec: a mixed gather needs lists of gather_dim and logical_process_axis")
        if len(mesh.mesh_shape) != 2 or any(axis not in (0, 1) for axis in axes) or len(axes) != 2:
            raise ShapeError(
                f"CommSpec: a mixed gather over axes {list(axes)} needs a mesh of two axes, not {mesh.shape}"
            )
        # Two different axes shard two dims. One axis twice stands for both axes on one dim, with this one fastest.
        if len(self.gather_dim) != 1 + (axes[0] != axes[1]):
            raise ShapeError(f"CommSpec: dims {list(self.gather_dim)} do not match axes {list(axes)}")
        self.logical_process_axes = list(axes)
        self.device_mesh = mesh.merged((0, 1))  # has the group that gathers
        self.device_meshes = mesh.over_all_ranks()  # has the cost, see ``get_comm_cost``

    def get_comm_cost(self) -> dict[str, float]:
        """Return the costs ``forward``, ``backward`` and ``total`` under the mesh's alpha-beta model.

        The volume is the number of elements of the local tensor before the collective.

        Raises:
            ArgumentError: no ``logical_process_axis``.
        """
        # ``shard_cost`` is that of a local slice, the adjoint of a gather.
        size, mesh = math.prod(self.sharding_spec.get_sharded_shape_per_device()), self.device_mesh
        kind = _KINDS[self.comm_pattern]
        if kind == "mixgather":
            forward, backward = self.device_meshes.mix_gather_cost(size), self.shard_cost
        elif kind == "all2all":
            forward = backward = mesh.all_to_all_cost(size, self._axis())
        elif kind in ("gather", "split"):
            forward, backward = mesh.all_gather_cost(size, self._axis()), self.shard_cost
        else:
            forward, backward = mesh.all_reduce_cost(size, self._axis()), 0
        # These two are computed above as their adjoints, so forward and backward change places.
        if kind in ("split", "identity"):
            forward, backward = backward, forward
        backward = 0 if self.forward_only else backward
        return {"forward": forward, "backward": backward, "total": forward + backward}

    def covert_spec_to_action(self, tensor: Tensor) -> Any:
        """Run the collective on the local tensor; differentiable any number of times.

        The result is new contiguous memory, also over an axis of one rank, with these exceptions: a split of dim 0 and
        the identity return views of ``tensor``, and a split or an all-reduce over one rank returns ``tensor`` itself,
        detached if grad mode is off and it requires grad.

        Returns:
            The tensor; None on a rank outside the mesh.

        Raises:
            ArgumentError: dims or axis that the pattern needs are missing.
            ShapeError: a dim that does not exist or does not divide, or a gradient that would be split along another
                dim than the forward gathers.
            GroupError: the mesh has no process groups.
        """
        members = self.device_mesh.members(self._axis())
        if members is None:
            return None
        if self.comm_pattern is not _Pattern.MIXGATHER_FWD_SPLIT_BWD:
            return run_collective(tensor, self._collective(tensor, members))
        dims = [checked_dim(tensor, dim, self.comm_pattern.value) for dim in self.gather_dim]
        first, second = self.logical_process_axes
        # If one dim is sharded over both axes, ``first`` varies fastest: list it last.
        axes_by_dim = ((first,), (second,)) if first != second else ((1 - first, first),)
        mesh = self.sharding_spec.device_mesh
        return mixed_gather(tensor, dict(zip(dims, axes_by_dim, strict=True)), mesh, members.group)

    convert_spec_to_action = covert_spec_to_action

    def _axis(self) -> int:
        """Return the axis of ``device_mesh`` over which the collective runs."""
        if self.comm_pattern is _Pattern.MIXGATHER_FWD_SPLIT_BWD:
            return 0  # of the merged mesh, which has no other
        if self.logical_process_axis is None:
            raise ArgumentError(f"CommSpec: {self.comm_pattern.name} needs a logical_process_axis")
        return self.logical_process_axis

    def _collective(self, x: Tensor, members: AxisMembers) -> MeshCollective:
        """Return the collective of a pattern other than the mixed gather, with its dims checked against a tensor."""
        kind, name = _KINDS[self.comm_pattern], self.comm_pattern.value
        if kind in ("all_reduce", "identity"):
            return MeshCollective(kind, members, name)
        if self.gather_dim is None or self.shard_dim is None:
            raise ArgumentError(f"{name}: gather_dim is {self.gather_dim}, shard_dim is {self.shard_dim}")
        gather_dim, shard_dim = checked_dim(x, self.gather_dim, name), checked_dim(x, self.shard_dim, name)
        if kind != "all2all" and gather_dim != shard_dim and wants_grad(x):
            raise ShapeError(
                f"{name}: gather_dim {gather_dim} and shard_dim {shard_dim} differ, so the pattern has no adjoint"
            )
        return MeshCollective(kind, members, name, shard_dim, gather_dim)

    def __repr__(self) -> str:
        dims = f"gather_dim:{self.gather_dim}, shard_dim:{self.shard_dim}, "
        axis, name = f"logical_process_axis:{self.logical_process_axis}", self.comm_pattern.name
        if self.comm_pattern is _Pattern.ALL2ALL_FWD_ALL2ALL_BWD:
            axis = f"logical_process_axis: {self.logical_process_axis}"
        elif self.comm_pattern is _Pattern.MIXGATHER_FWD_SPLIT_BWD:
            dims, axis = f"gather_dim:{self.gather_dim}, ", f"logical_process_axes:{self.logical_process_axes}"
        elif _KINDS[self.comm_pattern] in ("all_reduce", "identity"):
            dims = ""
        return f"CommSpec:(comm_pattern:{name}, {dims}{axis})"


def _as_pattern(pattern: Any) -> CollectiveCommPattern:
    """Return the pattern for itself, for a member of another enum with an equal value, or for the value."""
    try:
        return _Pattern(pattern.value if isinstance(pattern, enum.Enum) else pattern)
    except ValueError:
        raise ArgumentError(f"CommSpec: {pattern!r} is not a CollectiveCommPattern") from None
