"""Parallel modes and their process groups: who talks to whom, and which rank lists they are made of."""

import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tritoncomm.errors import ArgumentError, GroupError

__all__ = [
    "Group",
    "GroupLike",
    "ParallelMode",
    "as_group",
    "as_mode",
    "check_ascending",
    "check_mesh",
    "get_cpu_group",
    "get_global_rank",
    "get_group",
    "get_local_rank",
    "get_next_global_rank",
    "get_prev_global_rank",
    "get_ranks_in_group",
    "get_world_size",
    "group_for",
    "is_first_rank",
    "is_initialized",
    "is_last_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "rank_lists",
    "resolve",
    "resolve_sequence",
    "set_virtual_pipeline_parallel_rank",
    "set_virtual_pipeline_parallel_size",
]


class ParallelMode(enum.Enum):
    """The ways to split a job; ColossalAI's own enum members are accepted by value everywhere."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_3D_INPUT_X_WEIGHT = "3d_input_x_weight"
    PARALLEL_3D_OUTPUT_X_WEIGHT = "3d_output_x_weight"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"
    CONTEXT = "context"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of one mode that this rank is in.

    Attributes:
        group: carries tensors of the job's device.
        cpu_group: carries CPU tensors; the same object when ``group`` can do both.
        ranks: global ranks, in group order.
    """

    group: ProcessGroup
    cpu_group: ProcessGroup
    ranks: tuple[int, ...]


groups: dict[ParallelMode, Group] = {}
derived: dict[Any, Any] = {}
"""What other modules worked out from ``groups``, under keys of their own; emptied whenever the groups are replaced."""
timeout: timedelta | None = None
"""Of process groups that are made from now on: that of ``initialize()``; torch's default if None."""
_virtual: dict[str, int | None] = {"size": None, "rank": None}
GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str
"""What stands for a process group in the public functions; see ``as_group``."""


def rank_lists(
    world: int, tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1
) -> dict[ParallelMode, list[list[int]]]:
    """The rank lists of every mode: ``rank = ((d*P + p)*C + c)*T + t``, tensor fastest and data slowest.

    Example:
        ``rank_lists(4, tensor=2, pipeline=2)`` has TENSOR [0,1],[2,3] and PIPELINE [0,2],[1,3].
    """
    data = world // (tensor * pipeline * context)
    mesh = torch.arange(world).view(data, pipeline, context, tensor)

    def lists(*axes: int) -> list[list[int]]:
        rest = [axis for axis in range(4) if axis not in axes]
        return mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.shape[axis] for axis in axes)).tolist()

    by_expert = mesh.view(data // expert, expert, pipeline, context, tensor)
    return {
        ParallelMode.GLOBAL: lists(0, 1, 2, 3),
        ParallelMode.DATA: lists(0),
        ParallelMode.PIPELINE: lists(1),
        ParallelMode.CONTEXT: lists(2),
        ParallelMode.TENSOR: lists(3),
        ParallelMode.MODEL: lists(1, 2, 3),
        ParallelMode.SEQUENCE_DP: lists(0, 3),
        ParallelMode.EXPERT: by_expert.permute(0, 2, 3, 4, 1).reshape(-1, expert).tolist(),
    }


def as_mode(mode: Any) -> ParallelMode:
    """A ``ParallelMode`` from one of ours or any enum member with the same value."""
    if isinstance(mode, ParallelMode):
        return mode
    if isinstance(mode, enum.Enum):
        try:
            return ParallelMode(mode.value)
        except ValueError:
            pass
    raise ArgumentError(f"expected the argument parallel_mode to be of enum ParallelMode, but got {mode!r}")


def is_initialized(parallel_mode: Any = ParallelMode.GLOBAL) -> bool:
    """Whether ``initialize()`` made a group for this mode."""
    return as_mode(parallel_mode) in groups


def _entry(parallel_mode: Any) -> Group:
    mode = as_mode(parallel_mode)
    if mode not in groups:
        made = f"there are {', '.join(m.name for m in groups)}" if groups else "call tritoncomm.initialize() first"
        raise GroupError(f"there is no process group for {mode.name}; {made}")
    return groups[mode]


def get_group(parallel_mode: Any) -> ProcessGroup:
    """The process group of this rank for a mode."""
    return _entry(parallel_mode).group


def get_cpu_group(parallel_mode: Any) -> ProcessGroup:
    """The group that carries CPU tensors; the same as ``get_group`` where one backend does both."""
    return _entry(parallel_mode).cpu_group


def get_ranks_in_group(parallel_mode: Any) -> list[int]:
    """Global ranks of this rank's group, in group order."""
    return list(_entry(parallel_mode).ranks)


def get_world_size(parallel_mode: Any) -> int:
    """Ranks in this rank's group."""
    return len(_entry(parallel_mode).ranks)


def get_global_rank() -> int:
    """This process's rank in the job."""
    return dist.get_rank()


def get_local_rank(parallel_mode: Any) -> int:
    """This process's index in the group's rank list."""
    mode = as_mode(parallel_mode)
    rank = derived.get(mode)
    if rank is None:
        rank = derived[mode] = _entry(mode).ranks.index(dist.get_rank())
    return rank


def _neighbour(parallel_mode: Any, step: int) -> int:
    ranks = _entry(parallel_mode).ranks
    return ranks[(ranks.index(dist.get_rank()) + step) % len(ranks)]


def get_next_global_rank(parallel_mode: Any) -> int:
    """Global rank of the next member on the ring: after the last comes the first."""
    return _neighbour(parallel_mode, 1)


def get_prev_global_rank(parallel_mode: Any) -> int:
    """Global rank of the previous member on the ring: before the first comes the last."""
    return _neighbour(parallel_mode, -1)


def is_first_rank(parallel_mode: Any) -> bool:
    """Whether this process is first in its group."""
    return get_local_rank(parallel_mode) == 0


def is_last_rank(parallel_mode: Any) -> bool:
    """Whether this process is last in its group."""
    return get_local_rank(parallel_mode) == get_world_size(parallel_mode) - 1


def set_virtual_pipeline_parallel_size(size: int | None) -> None:
    """Number of model chunks per pipeline stage (interleaved schedules)."""
    _virtual["size"] = size


def set_virtual_pipeline_parallel_rank(rank: int | None) -> None:
    """The model chunk this process works on now."""
    _virtual["rank"] = rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """First stage and, with virtual stages, its first chunk."""
    if not ignore_virtual and _virtual["size"] is not None and _virtual["rank"] != 0:
        return False
    return is_first_rank(ParallelMode.PIPELINE)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Last stage and, with virtual stages, its last chunk."""
    if not ignore_virtual and _virtual["size"] is not None and _virtual["rank"] != _virtual["size"] - 1:
        return False
    return is_last_rank(ParallelMode.PIPELINE)


def resolve(group: GroupLike | None, name: str) -> ProcessGroup:
    """The group of a mapping: the one given, else our tensor group, else Megatron's.

    Raises:
        ArgumentError: no kind of group.
        GroupError: there is none, or this rank is not in it.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is not None:
        return as_group(group, name)
    if ParallelMode.TENSOR in groups:
        return groups[ParallelMode.TENSOR].group
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        return megatron.get_tensor_model_parallel_group()
    raise GroupError(f"{name}: group is None and no tensor group exists; call tritoncomm.initialize() or pass one")


def resolve_sequence(group: GroupLike | None, name: str) -> ProcessGroup:
    """``resolve`` for ranks that hold one sequence: no default where these may be those of the context axis.

    Raises:
        ArgumentError: no kind of group.
        GroupError: as ``resolve``, or none is given and ``initialize()`` made a context axis of several ranks.
    """
    if group is None and ParallelMode.CONTEXT in groups and len(groups[ParallelMode.CONTEXT].ranks) > 1:
        raise GroupError(
            f"{name}: group is None, which is the tensor group, and there is a context axis; pass the ranks that hold "
            "the sequence: tritoncomm.groups.get_group(ParallelMode.CONTEXT), or that of ParallelMode.TENSOR"
        )
    return resolve(group, name)


def as_group(group: Any, name: str) -> ProcessGroup:
    """The process group that any kind of group stands for.

    A mesh is looked up on every call, which takes some microseconds: hot loops pass ``mesh.get_group()``.

    Args:
        group: a process group, a ``DeviceMesh`` of one dim, ``(mesh, dim)`` with the dim's name or index, or the name
            of a group.
        name: the function that was called.

    Raises:
        ArgumentError: anything else.
        GroupError: a mesh of several dims without a dim, a dim that it does not have, ranks that do not ascend, an
            unknown name, or a group that this rank is not in.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(f"{name}: this rank is not a member of the group")
    if isinstance(group, str):
        try:
            return _group_of_name(group)
        except (RuntimeError, ValueError):
            hint = "; a dim of a mesh is mesh['tensor'] or (mesh, 'tensor')"
            raise GroupError(f"{name}: there is no process group of the name {group!r} with this rank{hint}") from None
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, DeviceMesh):
        if isinstance(group, ParallelMode):
            raise ArgumentError(f"{name}: {group} is no group; pass tritoncomm.groups.get_group({group})")
        kinds = "a process group, a DeviceMesh of one dim, (mesh, dim) or the name of a group"
        raise ArgumentError(f"{name}: group must be {kinds}, not {type(group).__name__}")
    return _group_of_mesh(mesh, dim, name)


def _group_of_name(name: Any) -> ProcessGroup:
    return _resolve_process_group(name)


# What torch.compiler.assume_constant_result does, which imports torch._dynamo: 1.5 s more for every import of this.
_group_of_name._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _group_of_mesh(mesh: DeviceMesh, dim: Any, name: str) -> ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if dim is None and mesh.ndim == 1:
        axis = 0
    elif dim is None:
        dims = " or ".join(f"mesh[{each!r}]" for each in names) or "(mesh, dim)"
        raise GroupError(f"{name}: a mesh of {mesh.ndim} dims is not one group; pass {dims}")
    elif isinstance(dim, int) and -mesh.ndim <= dim < mesh.ndim:
        axis = dim % mesh.ndim
    elif dim in names:
        axis = names.index(dim)
    else:
        raise GroupError(f"{name}: the mesh has no dim {dim!r}; it has {names or mesh.ndim}")
    if mesh.get_coordinate() is None:
        raise GroupError(f"{name}: this rank is not in the mesh")
    if not is_dynamo_compiling():
        _check_axis(mesh, axis, name)
    return mesh.get_group(axis)


@lru_cache(maxsize=64)
def _check_axis(mesh: DeviceMesh, axis: int, name: str) -> None:
    if mesh.ndim == 1:
        check_mesh(mesh, name)
    else:
        check_ascending(mesh.mesh, name, mesh, [axis])


def group_for(parallel_mode: Any, x: Tensor, name: str) -> ProcessGroup:
    """The group that moves ``x``: a mode's device group, or its CPU group for CPU tensors; else ``as_group``."""
    if isinstance(parallel_mode, ProcessGroup):
        return parallel_mode
    if parallel_mode is None:
        raise ArgumentError(f"{name}: parallel_mode must be a ParallelMode or a group, not None")
    if isinstance(parallel_mode, DeviceMesh | tuple | str) or parallel_mode is dist.GroupMember.NON_GROUP_MEMBER:
        return as_group(parallel_mode, name)
    entry = _entry(parallel_mode)
    return entry.group if x.is_cuda else entry.cpu_group


def register(members: dict[ParallelMode, Group]) -> None:
    """Replace all groups (the runtime calls this)."""
    groups.clear()
    derived.clear()
    groups.update(members)
    _virtual.update(size=None, rank=None)


def check_ascending(ranks: Tensor, name: str, mesh: object = "the mesh", axes: Sequence[int] | None = None) -> None:
    """Refuse a grid of ranks that descends along an axis.

    torch sorts the ranks of a process group. Along such an axis the index of a rank in the mesh is not its rank in the
    group, and a tensor split by one of them would be gathered by the other.

    Args:
        ranks: global ranks, of any number of dims. The full grid, so that every rank of the job raises.
        name: the function that was called.
        mesh: what the message calls the mesh.
        axes: the axes to check, all by default.

    Raises:
        GroupError: names the mesh, its ranks and the sorted order.
    """
    for axis in range(ranks.dim()) if axes is None else axes:
        if not torch.equal(ranks.sort(axis).values, ranks):
            ordered = ranks.flatten().sort().values.view(ranks.shape)
            raise GroupError(
                f"{name}: the ranks {ranks.tolist()} of {mesh} do not ascend along axis {axis}, but torch sorts the "
                f"ranks of a process group; make the mesh in ascending order, {ordered.tolist()}"
            )


def check_mesh(mesh: DeviceMesh, name: str) -> None:
    """``check_ascending`` of a torch mesh.

    A slice of a mesh has this rank's line of ranks only. The mesh that it was sliced from is checked along the same
    axes, so that all ranks raise and none waits for another.
    """
    root = mesh._get_root_mesh()
    sliced = [axis for axis, each in enumerate(root.mesh_dim_names or ()) if each in (mesh.mesh_dim_names or ())]
    check_ascending(root.mesh, name, root, sliced)
    check_ascending(mesh.mesh, name, mesh)
