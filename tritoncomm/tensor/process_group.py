"""Tensor- and data-parallel process groups of ColoTensors."""

import math
import reprlib
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from tritoncomm.errors import ArgumentError, GroupError
from tritoncomm.groups import check_ascending, check_mesh
from tritoncomm.tensor.group_registry import adopt, find, group_over, lookup, make_groups

__all__ = ["ProcessGroup"]

_LAYOUT = frozenset(["_cpu", "_dp", "_dp_ranks", "_lists", "_rank", "_ranks", "_tp", "_tp_ranks"])


class ProcessGroup:
    """``ranks`` as a grid: TP group i is ``ranks[i*tp : (i+1)*tp]``, DP group j is ``ranks[j::tp]``.

    Groups are made once and shared by equal layouts, and existing groups are reused. Only ``ranks`` have to call; if
    torch itself waits for the full job (a default group bound to a device, or ``TORCH_DIST_INIT_BARRIER``), every
    process calls.
    Before torch.distributed is initialized the object is empty, and its methods raise ``GroupError``. Compares by rank,
    lists and degrees. A loaded pickle looks up the groups of the loading process and never makes one.

    Args:
        rank: this process's global rank; checked.
        ranks: global ranks in any order, all by default.
        tp_degree: ranks of a tensor-parallel group; derived when only ``dp_degree`` is given, 1 when neither is.
        dp_degree: ranks of a data-parallel group.

    Raises:
        AssertionError: a wrong rank, or degrees whose product is not the number of ranks.
    """

    def __init__(
        self,
        rank: int | None = None,
        ranks: list[int] | None = None,
        tp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        self.is_init = dist.is_initialized()
        if not self.is_init:
            return
        assert rank is None or rank == dist.get_rank(), f"rank {rank} given, but this is rank {dist.get_rank()}"
        members = sorted(ranks) if ranks is not None else list(range(dist.get_world_size()))
        self._set_layout(tuple(members), *_degrees(len(members), tp_degree, dp_degree))
        make_groups(self._lists, self._rank)

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes: all layout attributes before torch.distributed is initialized."""
        if name in _LAYOUT:
            raise GroupError(
                "ProcessGroup: torch.distributed was not initialized when this was made, so it has no ranks; call "
                "tritoncomm.initialize() first, then make process groups and ColoTensors"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _set_layout(self, ranks: tuple[int, ...], tp: int, dp: int) -> None:
        """Set ranks and degrees, the ranks of all groups, and of the two that have this rank (None without one)."""
        self._rank = dist.get_rank()
        self._ranks, self._tp, self._dp, self._cpu = ranks, tp, dp, False
        tp_lists = [ranks[i * tp : (i + 1) * tp] for i in range(dp)]
        dp_lists = [ranks[j::tp] for j in range(tp)]
        self._lists = [*tp_lists, *dp_lists]
        self._tp_ranks = next((members for members in tp_lists if self._rank in members), None)
        self._dp_ranks = next((members for members in dp_lists if self._rank in members), None)

    @classmethod
    def from_device_mesh(
        cls, mesh: TorchMesh, tp_axis: str | int | None = None, dp_axis: str | int | None = None
    ) -> "ProcessGroup":
        """Take the groups of a torch mesh; by default its last axis is tensor-parallel, the one before data-parallel.

        Raises:
            GroupError: ranks that do not ascend along an axis, or a mesh that is not data-parallel rows of
                consecutive tensor-parallel ranks.
        """
        check_mesh(mesh, "from_device_mesh")
        tp_index = _axis(mesh, tp_axis, mesh.ndim - 1)
        dp_index = _axis(mesh, dp_axis, mesh.ndim - 2) if mesh.ndim > 1 else None
        tp, dp = mesh.size(tp_index), 1 if dp_index is None else mesh.size(dp_index)
        members = mesh.mesh.flatten().tolist()
        axes = [index for index in (dp_index, tp_index) if index is not None]
        if len(axes) != mesh.ndim or axes != sorted(axes) or members != sorted(members):
            raise GroupError(
                f"from_device_mesh: {mesh} with ranks {mesh.mesh.tolist()} is not a grid of data-parallel rows "
                "of tensor-parallel ranks in row-major order"
            )
        for index in axes:
            adopt(mesh.get_group(index))
        return cls(ranks=members, tp_degree=tp, dp_degree=dp)

    @classmethod
    def over_device_mesh(cls, mesh: TorchMesh) -> "ProcessGroup":
        """Take all ranks of a torch mesh, in row-major order, as one tensor-parallel group; only they call.

        Raises:
            GroupError: the ranks do not ascend, or no process group over all of them exists.
        """
        check_mesh(mesh, "over_device_mesh")
        check_ascending(mesh.mesh.flatten(), "over_device_mesh", f"{mesh}, in row-major order,")
        members = tuple(mesh.mesh.flatten().tolist())
        if find(dist.get_backend(), members) is None and len(members) > 1:
            make = f"ProcessGroup(ranks={list(members)}, tp_degree={len(members)})"
            raise GroupError(f"over_device_mesh: no process group over {mesh}; have its ranks call {make} first")
        return cls(ranks=list(members), tp_degree=len(members))

    def device_mesh(self, device_type: str = "cpu") -> TorchMesh:
        """Return the tensor-parallel group as a torch mesh with the axis ``tensor``."""
        return TorchMesh.from_group(self.tp_process_group(), device_type, mesh_dim_names=("tensor",))

    def rank(self) -> int:
        """Return this process's global rank."""
        return self._rank

    def ranks_in_group(self) -> list[int]:
        """Return all ranks, tensor- and data-parallel."""
        return list(self._ranks)

    def world_size(self) -> int:
        """Return the number of all ranks."""
        return len(self._ranks)

    def tp_rank_list(self) -> list[int] | None:
        """Return the ranks of this rank's tensor-parallel group; None if it is in none."""
        return None if self._tp_ranks is None else list(self._tp_ranks)

    def dp_rank_list(self) -> list[int] | None:
        """Return the ranks of this rank's data-parallel group; None if it is in none."""
        return None if self._dp_ranks is None else list(self._dp_ranks)

    get_ranks_in_tp = tp_rank_list
    get_ranks_in_dp = dp_rank_list

    def tp_local_rank(self) -> int:
        """Return the rank of this process in its tensor-parallel group."""
        return self._require_member(self._tp_ranks).index(self._rank)

    def dp_local_rank(self) -> int:
        """Return the rank of this process in its data-parallel group."""
        return self._require_member(self._dp_ranks).index(self._rank)

    def tp_world_size(self) -> int:
        """Return the number of ranks of a tensor-parallel group."""
        return self._tp

    def dp_world_size(self) -> int:
        """Return the number of ranks of a data-parallel group."""
        return self._dp

    def tp_process_group(self) -> dist.ProcessGroup:
        """Return the tensor-parallel process group, the same object for equal layouts."""
        return self._lookup(self._tp_ranks)

    def dp_process_group(self) -> dist.ProcessGroup:
        """Return the data-parallel process group."""
        return self._lookup(self._dp_ranks)

    def replica_groups(self, is_sharded: bool, data_parallel: bool) -> list[tuple[str, list[int], dist.ProcessGroup]]:
        """Return (label, ranks, group) of every group with this rank whose ranks hold the same bits of a tensor.

        Args:
            is_sharded: whether the tensor is sharded over the tensor-parallel ranks, or a replica there.
            data_parallel: whether to include the data-parallel ranks.
        """
        groups = []
        if self._tp > 1 and not is_sharded:
            groups.append(("tensor-parallel ", self.tp_rank_list() or [], self.tp_process_group()))
        if self._dp > 1 and data_parallel:
            groups.append(("data-parallel ", self.dp_rank_list() or [], self.dp_process_group()))
        return groups

    @property
    def has_cpu_groups(self) -> bool:
        """Whether ``set_cpu_groups()`` was called."""
        return self._cpu

    def set_cpu_groups(self) -> None:
        """Make Gloo groups over the same ranks."""
        make_groups(self._lists, self._rank, "gloo")
        self._cpu = True

    def cpu_tp_process_group(self) -> dist.ProcessGroup:
        """Return the Gloo group over the tensor-parallel ranks."""
        assert self._cpu, "call set_cpu_groups() first"
        return self._lookup(self._tp_ranks, "gloo")

    def cpu_dp_process_group(self) -> dist.ProcessGroup:
        """Return the Gloo group over the data-parallel ranks."""
        assert self._cpu, "call set_cpu_groups() first"
        return self._lookup(self._dp_ranks, "gloo")

    def _require_member(self, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        if ranks is None:
            raise GroupError(f"rank {self._rank} is not among {list(self._ranks)}")
        return ranks

    def _lookup(self, ranks: tuple[int, ...] | None, backend: str | None = None) -> dist.ProcessGroup:
        """Return the existing group over ranks; raise if there is none, or if this rank is in none (None)."""
        ranks, backend = self._require_member(ranks), dist.get_backend() if backend is None else backend
        group = lookup(backend, ranks)
        if group is None and len(ranks) == 1:  # made at once, as no other rank has to call
            return group_over(ranks, self._rank, backend)
        if group is None:
            raise GroupError(f"no process group over {list(ranks)} exists here; make one with ProcessGroup(...) first")
        return group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def _identity(self) -> tuple[Any, ...]:
        return (self._rank, self._ranks, self._tp, self._dp) if self.is_init else ()

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_init:
            return {"ranks": None}  # made before torch.distributed was initialized, and the copy stays so
        return {"ranks": list(self._ranks), "tp": self._tp, "dp": self._dp, "cpu": self._cpu}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the layout of a pickle, or a process group without one; the state may be of any file."""
        ranks = state.get("ranks", ()) if isinstance(state, dict) else ()
        if ranks is not None and not _is_layout(state):
            raise ArgumentError(f"ProcessGroup: a damaged file: this is no layout of ranks: {reprlib.repr(state)}")
        self.is_init = dist.is_initialized() and ranks is not None
        if ranks is not None and self.is_init:
            self._set_layout(tuple(ranks), state["tp"], state["dp"])
            self._cpu = state["cpu"]

    def __repr__(self) -> str:
        if not self.is_init:
            return "ProcessGroup not initialized"
        return f"ProcessGroup(ranks={list(self._ranks)},\n             rank={self._rank}, dp={self._dp}, tp={self._tp})"


def _is_layout(state: Any) -> bool:
    """Whether a state, of any file, is one that ``__getstate__`` returns for a group with ranks."""
    if not isinstance(state, dict):
        return False
    ranks = state.get("ranks")
    degrees: list[Any] = [state.get(name) for name in ("tp", "dp")]
    if type(ranks) is not list or not all(type(each) is int and each >= 0 for each in (*ranks, *degrees)):
        return False
    return 0 < len({*ranks}) == len(ranks) == math.prod(degrees) and type(state.get("cpu")) is bool


def _axis(mesh: TorchMesh, axis: str | int | None, default: int) -> int:
    """Return the index of a mesh axis that is given by name or index; ``default`` for None."""
    if not isinstance(axis, str):
        return default if axis is None else axis
    names = list(mesh.mesh_dim_names or [])
    if axis not in names:
        raise GroupError(f"from_device_mesh: the mesh has no axis {axis!r}, but {names}")
    return names.index(axis)


def _degrees(size: int, tp: int | None, dp: int | None) -> tuple[int, int]:
    """Return (tp, dp) with ``tp * dp == size``; tp is 1 when neither is given."""
    if not tp or not dp:
        degree = tp or dp or 1
        assert size % degree == 0, f"a degree of {degree} does not divide {size} ranks"
        return (size // degree, degree) if dp else (degree, size // degree)
    assert tp * dp == size, f"tp {tp} * dp {dp} is not {size}, the number of ranks"
    return tp, dp
