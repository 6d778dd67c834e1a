"""Parallel modes and their process groups: who talks to whom, and which rank lists they are made of."""

import enum
import hashlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup, distributed_c10d
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
    "make_group",
    "rank_lists",
    "ranks_of_mode",
    "resolve",
    "resolve_sequence",
    "set_virtual_pipeline_parallel_rank",
    "set_virtual_pipeline_parallel_size",
    "wait_until_connected",
]


class ParallelMode(enum.Enum):
    """The ways to split a job; ColossalAI's own enum members are accepted by value everywhere."""

    __hash__ = object.__hash__  # Enum's own hashes the name in Python, and every mapping looks its group up

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


class Group:
    """The process group of a mode that this rank is in.

    Attributes:
        group: carries tensors of the job's device.
        mode: the first mode that has this group; others may share it.
    """

    def __init__(self, group: ProcessGroup, mode: ParallelMode) -> None:
        self.group, self.mode = group, mode
        self._cpu_group = group if _cpu in group._device_types else None
        self._lock = Lock()  # threads of a rank make one group; each mode has its own, as ranks take modes in any order

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, in group order."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def cpu_group(self) -> ProcessGroup:
        """Process group that carries CPU tensors: ``group`` if it does, else a Gloo group of the same ranks.

        All ranks of the group make the Gloo group together, each at its first use. Jobs that need none have none: it
        takes a socket for every other rank.
        """
        if self._cpu_group is None:
            with self._lock:
                if self._cpu_group is None:
                    group = make_group(f"{self.mode.value}-cpu", self.ranks, "gloo")
                    owned.append(group)
                    wait_until_connected(group)
                    self._cpu_group = group
        return self._cpu_group

    @property
    def existing(self) -> list[ProcessGroup]:
        """Process groups of these ranks that exist: ``group``, and ``cpu_group`` once it is made."""
        # None: no CPU group was needed yet. Else it may be ``group`` itself.
        return [self.group] if self._cpu_group in (None, self.group) else [self.group, self._cpu_group]


_cpu = torch.device("cpu")
groups: dict[ParallelMode, Group] = {}
owned: list[ProcessGroup] = []
"""Process groups that ``destroy()`` has to destroy."""
derived: dict[Any, Any] = {}
"""What other modules worked out from ``groups``, under keys of their own; emptied whenever the groups are replaced."""
timeout: timedelta | None = None
"""Of process groups that are made from now on: that of ``initialize()``; torch's default if None."""
# Model chunks per stage, and the chunk at work; None without interleaved schedules.
_virtual: dict[str, int | None] = {"size": None, "rank": None}
# For each default group the calls of ``make_group`` by the name, which their numbers complete.
_counts: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()
_AXES_OF = {
    ParallelMode.GLOBAL: (0, 1, 2, 3),
    ParallelMode.DATA: (0,),
    ParallelMode.PIPELINE: (1,),
    ParallelMode.CONTEXT: (2,),
    ParallelMode.TENSOR: (3,),
    ParallelMode.MODEL: (1, 2, 3),
    ParallelMode.SEQUENCE_DP: (0, 3),
}
"""Axes that the ranks of a mode differ in, among data, pipeline, context and tensor."""
GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str
"""What stands for a process group in the public functions; see ``as_group``."""


def rank_lists(
    world: int, tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1
) -> dict[ParallelMode, list[list[int]]]:
    """Return the rank lists of every mode: ``rank = ((d*P + p)*C + c)*T + t``, tensor fastest and data slowest.

    Example:
        ``rank_lists(4, tensor=2, pipeline=2)`` has TENSOR [0,1],[2,3] and PIPELINE [0,2],[1,3].
    """
    data = world // (tensor * pipeline * context)
    mesh = torch.arange(world, device="cpu").view(data, pipeline, context, tensor)

    def lists(*axes: int) -> list[list[int]]:
        rest = [axis for axis in range(4) if axis not in axes]
        return mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.shape[axis] for axis in axes)).tolist()

    by_expert = mesh.view(data // expert, expert, pipeline, context, tensor)
    expert_lists = by_expert.permute(0, 2, 3, 4, 1).reshape(-1, expert).tolist()
    return {mode: lists(*axes) for mode, axes in _AXES_OF.items()} | {ParallelMode.EXPERT: expert_lists}


def ranks_of_mode(mode: ParallelMode, ranks: Tensor, coordinate: Sequence[int], expert: int = 1) -> list[int]:
    """Return the ascending ranks of the group of ``mode`` with the rank at ``coordinate``: one list of ``rank_lists``.

    Args:
        mode: a mode of ``rank_lists``.
        ranks: global ranks as a grid of the axes data, pipeline, context, tensor.
        coordinate: indices of a rank in that grid.
        expert: ranks of the data axis that share one set of experts.
    """
    if mode is ParallelMode.EXPERT:
        # Groups of ``expert`` neighbours along the data axis; ``first`` is where this rank's begins.
        first = coordinate[0] // expert * expert
        return sorted(ranks[(slice(first, first + expert), *coordinate[1:])].tolist())
    axes = _AXES_OF[mode]
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return sorted(ranks[index].flatten().tolist())


def make_group(label: str, ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
    """Make a process group. Its members alone call this, each in the same order among the groups that it makes.

    The members meet in the job's store under a name of the label, the ranks, and the number of earlier calls with both.
    torch's own names count all groups that a rank has made, so ranks that differ in that would not meet.

    If the default group is bound to a GPU, all its ranks call this together, each for its own group: NCCL splits such a
    group as a whole.

    Args:
        label: a word for the name of the group.
        ranks: ascending global ranks, this rank among them.
        backend: the default group's by default.

    Raises:
        GroupError: a member did not come within the timeout, or died.
    """
    world: Any = dist.group.WORLD
    digest = hashlib.blake2b(array("q", ranks).tobytes(), digest_size=6).hexdigest()
    name = f"{label}.{ranks[0]}-{ranks[-1]}.{digest}"
    counter = _counts.setdefault(world, Counter())
    counter[name] += 1
    name = f"{name}.{counter[name]}"
    c10d: Any = distributed_c10d
    kind, store = c10d.Backend(backend or dist.get_backend()), c10d._get_default_store()
    # With a key for every member an error below can say which ranks are missing. Gloo connects all members with each
    # other anyway, so that one more request costs little; other backends send none.
    if kind == "gloo":
        store.set(f"{name}/came/{dist.get_rank()}", "")
    try:
        # ``new_group`` takes no name: its members meet under a number, or a hash, of the groups that a rank has made.
        group, _ = c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), list(ranks), kind, store, name,
            timeout=timeout or c10d._get_default_timeout(kind),  # ``groups.timeout``, which a program may set
            device_id=None if kind == "gloo" else world.bound_device_id,
            group_desc=label,
        )  # fmt: skip
    except RuntimeError as error:
        missing = [rank for rank in ranks if kind == "gloo" and not store.check([f"{name}/came/{rank}"])]
        absent = f"ranks {missing} did not come: " if missing else ""
        raise GroupError(f"the group {name} of {len(ranks)} ranks was not made: {absent}{error}") from error
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def wait_until_connected(group: ProcessGroup) -> None:
    """Wait until all ranks of a Gloo group have connected, which torch does not.

    A rank that went on and ended, or destroyed its groups, would fail those that still connect to it.
    """
    backend: Any = group._get_backend(_cpu) if group.size() > 1 and _cpu in group._device_types else None
    if backend is not None and backend.name().lower() == "gloo":
        backend.barrier().wait()


def as_mode(mode: Any) -> ParallelMode:
    """Return a ``ParallelMode`` from one of ours or any enum member with the same value."""
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
    """Return the group of a mode that this rank is in; raise if ``initialize()`` made none."""
    mode = as_mode(parallel_mode)
    entry = groups.get(mode)
    if entry is None:
        made = f"there are {', '.join(m.name for m in groups)}" if groups else "call tritoncomm.initialize() first"
        raise GroupError(f"there is no process group for {mode.name}; {made}")
    return entry


def get_group(parallel_mode: Any) -> ProcessGroup:
    """Return the process group of this rank for a mode."""
    return _entry(parallel_mode).group


def get_cpu_group(parallel_mode: Any) -> ProcessGroup:
    """Return the group that carries CPU tensors; the same as ``get_group`` where that carries both.

    Over NCCL alone it is a Gloo group that all ranks of the mode make together, each at its first call of this or with
    a CPU tensor.

    Raises:
        GroupError: another rank of the mode did not come within the timeout.
    """
    return _entry(parallel_mode).cpu_group


def get_ranks_in_group(parallel_mode: Any) -> list[int]:
    """Return the global ranks of this rank's group, in group order."""
    return list(_entry(parallel_mode).ranks)


def get_world_size(parallel_mode: Any) -> int:
    """Return the number of ranks in this rank's group."""
    return _entry(parallel_mode).group.size()


def get_global_rank() -> int:
    """Return the rank of this process in the job."""
    return dist.get_rank()


def get_local_rank(parallel_mode: Any) -> int:
    """Return the index of this process in the group's rank list."""
    return _entry(parallel_mode).group.rank()


def _neighbour(parallel_mode: Any, step: int) -> int:
    """Return the global rank that is ``step`` places on along the group's ring, cached until the groups change."""
    key = "neighbour", as_mode(parallel_mode), step
    if key not in derived:
        entry = _entry(parallel_mode)
        derived[key] = entry.ranks[(entry.group.rank() + step) % entry.group.size()]
    return derived[key]


def get_next_global_rank(parallel_mode: Any) -> int:
    """Return the global rank of the next member on the ring: after the last comes the first."""
    return _neighbour(parallel_mode, 1)


def get_prev_global_rank(parallel_mode: Any) -> int:
    """Return the global rank of the previous member on the ring: before the first comes the last."""
    return _neighbour(parallel_mode, -1)


def is_first_rank(parallel_mode: Any) -> bool:
    """Whether this process is first in its group."""
    return get_local_rank(parallel_mode) == 0


def is_last_rank(parallel_mode: Any) -> bool:
    """Whether this process is last in its group."""
    return get_local_rank(parallel_mode) == get_world_size(parallel_mode) - 1


def set_virtual_pipeline_parallel_size(size: int | None) -> None:
    """Set the number of model chunks per pipeline stage (interleaved schedules)."""
    _virtual["size"] = size


def set_virtual_pipeline_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that this process works on now."""
    _virtual["rank"] = rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the first stage and, with virtual stages, its first chunk."""
    if not ignore_virtual and _virtual["size"] is not None and _virtual["rank"] != 0:
        return False
    return is_first_rank(ParallelMode.PIPELINE)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this is the last stage and, with virtual stages, its last chunk."""
    if not ignore_virtual and _virtual["size"] is not None and _virtual["rank"] != _virtual["size"] - 1:
        return False
    return is_last_rank(ParallelMode.PIPELINE)


def resolve(group: GroupLike | None, name: str) -> ProcessGroup:
    """Return the group of a mapping: the one given, else our tensor group, else Megatron's.

    Raises:
        ArgumentError: no kind of group.
        GroupError: there is none, or this rank is not in it.
    """
    if group is not None:  # None first: `isinstance(None, ProcessGroup)` takes the slow Python `__instancecheck__`
        return group if isinstance(group, ProcessGroup) else as_group(group, name)
    tensor = groups.get(ParallelMode.TENSOR)
    if tensor is not None:
        return tensor.group
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        return megatron.get_tensor_model_parallel_group()
    raise GroupError(f"{name}: group is None and no tensor group exists; call tritoncomm.initialize() or pass one")


def resolve_sequence(group: GroupLike | None, name: str) -> ProcessGroup:
    """Run ``resolve`` for ranks that hold one sequence: no default where these may be those of the context axis.

    Raises:
        ArgumentError: no kind of group.
        GroupError: as ``resolve``, or none is given and ``initialize()`` made a context axis of several ranks.
    """
    if group is None and ParallelMode.CONTEXT in groups and groups[ParallelMode.CONTEXT].group.size() > 1:
        raise GroupError(
            f"{name}: group is None, which is the tensor group, and there is a context axis; pass the ranks that hold "
            "the sequence: tritoncomm.groups.get_group(ParallelMode.CONTEXT), or that of ParallelMode.TENSOR"
        )
    return resolve(group, name)


def resolve_experts(group: GroupLike | None, name: str) -> ProcessGroup:
    """Return the ranks that share the experts: the group given, else the expert group of ``initialize()``.

    Raises:
        ArgumentError: no kind of group.
        GroupError: none is given and ``initialize()`` made no expert group, or this rank is not in it.
    """
    if group is not None:
        return group if isinstance(group, ProcessGroup) else as_group(group, name)
    if ParallelMode.EXPERT not in groups:
        raise GroupError(f"{name}: group is None and there is no expert group; call tritoncomm.initialize(expert=...) "
                         "or pass one")  # fmt: skip
    return groups[ParallelMode.EXPERT].group


def as_group(group: Any, name: str) -> ProcessGroup:
    """Return the process group that any kind of group stands for.

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
    """Return the process group that torch registered under a name; a constant to torch.compile."""
    return _resolve_process_group(name)


# What torch.compiler.assume_constant_result does, which imports torch._dynamo: 1.5 s more for every import of this.
_group_of_name._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _group_of_mesh(mesh: DeviceMesh, dim: Any, name: str) -> ProcessGroup:
    """Return the group of one dim of a mesh; ``dim`` is its name or index, None for the only dim."""
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


_ascending: "WeakKeyDictionary[DeviceMesh, set[int]]" = WeakKeyDictionary()  # axes of a mesh, which holds its groups


def _check_axis(mesh: DeviceMesh, axis: int, name: str) -> None:
    """Reject ranks that descend along an axis, once for each mesh: see ``check_ascending``."""
    if axis in _ascending.get(mesh, ()):
        return
    if mesh.ndim == 1:
        check_mesh(mesh, name)
    else:
        check_ascending(mesh.mesh, name, mesh, [axis])
    _ascending.setdefault(mesh, set()).add(axis)


def group_for(parallel_mode: Any, x: Tensor, name: str) -> ProcessGroup:
    """Return the group that moves ``x``: a mode's device group, or its CPU group for CPU tensors; else ``as_group``."""
    if not isinstance(parallel_mode, ParallelMode):
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
    """Reject a grid of ranks that descends along an axis.

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
        if (ranks.diff(dim=axis) < 0).any():
            ordered = ranks.flatten().sort().values.view(ranks.shape)
            raise GroupError(
                f"{name}: the ranks {ranks.tolist()} of {mesh} do not ascend along axis {axis}, but torch sorts the "
                f"ranks of a process group; make the mesh in ascending order, {ordered.tolist()}"
            )


def check_mesh(mesh: DeviceMesh, name: str) -> None:
    """Run ``check_ascending`` of a torch mesh.

    A slice of a mesh has this rank's line of ranks only. The mesh that it was sliced from is checked along the same
    axes, so that all ranks raise and none waits for another.
    """
    root = mesh._get_root_mesh()
    sliced = [axis for axis, each in enumerate(root.mesh_dim_names or ()) if each in (mesh.mesh_dim_names or ())]
    check_ascending(root.mesh, name, root, sliced)
    check_ascending(mesh.mesh, name, mesh)
