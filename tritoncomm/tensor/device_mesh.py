"""Device mesh: coordinates, process groups along its axes, and the cost of collectives over an axis."""

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from tritoncomm.errors import ArgumentError, GroupError, ShapeError
from tritoncomm.groups import check_ascending, check_mesh
from tritoncomm.tensor.group_registry import AxisMembers, Line, groups_along

__all__ = ["DeviceMesh", "FlattenDeviceMesh"]


class DeviceMesh:
    """Global ranks as a grid, a process group per line of ranks along an axis, and alpha-beta costs of collectives.

    In the costs ``k`` is the number of ranks along an axis and ``B`` the local size (Alpa, arXiv 2201.12023); the
    constant at the end breaks ties between collectives of the same volume.

    Existing groups are reused; missing ones are made by their members, as for ``ProcessGroup``.

    Args:
        physical_mesh_id: global ranks.
        mesh_shape: the grid; the shape of ``physical_mesh_id`` by default.
        logical_mesh_id: the grid itself, in place of ``mesh_shape``.
        mesh_alpha: latency of each axis, 1 by default.
        mesh_beta: cost per unit of each axis, 1 by default.
        init_process_group: whether to make process groups.
        need_flatten: whether to make ``flatten_device_mesh`` and ``flatten_device_meshes``, for more than one axis.

    Attributes:
        convert_map: coordinates by global rank.
        process_groups_dict: by axis, ``(ranks, group)`` of every line of ranks; a group that this rank is not in is
            torch's ``NON_GROUP_MEMBER``. Empty without process groups.

    Raises:
        ShapeError: ranks and shape, or shape and costs, do not match, or a rank appears twice.
        ArgumentError: a rank is no integer.
        GroupError: groups are requested without torch.distributed, or ranks do not ascend along an axis.
    """

    def __init__(
        self,
        physical_mesh_id: Any,
        mesh_shape: Sequence[int] | None = None,
        logical_mesh_id: Any = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        init_process_group: bool = False,
        need_flatten: bool = True,
    ) -> None:
        self.physical_mesh_id = _as_ranks(physical_mesh_id)
        self._logical_mesh_id = _grid(self.physical_mesh_id, mesh_shape, logical_mesh_id)
        self.mesh_shape = tuple(self._logical_mesh_id.shape)
        coordinates = itertools.product(*map(range, self.mesh_shape))
        ranks = self._logical_mesh_id.flatten().tolist()
        self.convert_map: dict[int, list[int]] = dict(zip(ranks, map(list, coordinates), strict=True))
        if len(self.convert_map) != len(ranks):
            raise ShapeError(f"DeviceMesh: a rank appears twice in {ranks}")
        self.mesh_alpha: Any = self._per_axis(mesh_alpha, "mesh_alpha")
        self.mesh_beta: Any = self._per_axis(mesh_beta, "mesh_beta")
        self.init_process_group = self.need_flatten = False  # until ``_connect`` and ``_add_flattened`` set them
        self.process_groups_dict: dict[int, list[Line]] = {}
        self._members: dict[int, AxisMembers] = {}
        self._merged: dict[tuple[int, ...], DeviceMesh] = {}
        if init_process_group:
            check_ascending(self._logical_mesh_id, "DeviceMesh")
            self._connect(own_groups=[])
        if need_flatten:
            self._add_flattened()

    def _connect(self, own_groups: Sequence[dist.ProcessGroup]) -> None:
        """Set the process groups: ``own_groups`` by axis; if that is empty, existing groups or new ones."""
        self.process_groups_dict, self._members = groups_along(self._logical_mesh_id, own_groups)
        self.init_process_group = True

    shape = property(lambda self: self.mesh_shape, doc="Ranks along each axis.")
    num_devices = property(lambda self: math.prod(self.mesh_shape), doc="Number of ranks.")
    logical_mesh_id = property(lambda self: self._logical_mesh_id, doc="Global ranks as a grid.")

    def global_rank_to_logical_rank(self, rank: int) -> list[int]:
        """Return the coordinates of a global rank.

        Raises:
            GroupError: the rank is not in the mesh.
        """
        if rank not in self.convert_map:
            raise GroupError(f"rank {rank} is not in the mesh of {sorted(self.convert_map)}")
        return self.convert_map[rank]

    def global_rank_to_process_groups_with_logical_rank(self, rank: int) -> dict[int, list[list[int]]]:
        """By axis, the coordinates of the ranks that share all other coordinates with a global rank.

        Example:
            On ranks ``[[0, 1, 2], [3, 4, 5]]`` rank 4 has ``{0: [[0, 1], [1, 1]], 1: [[1, 0], [1, 1], [1, 2]]}``.

        Raises:
            GroupError: the rank is not in the mesh.
        """
        at = self.global_rank_to_logical_rank(rank)
        return {
            axis: [[*at[:axis], index, *at[axis + 1 :]] for index in range(size)]
            for axis, size in enumerate(self.mesh_shape)
        }

    def global_rank_to_process_groups_with_global_rank(self, rank: int) -> dict[int, list[int]]:
        """By axis, the global ranks that share all other coordinates with a global rank.

        Example:
            On ranks ``[[0, 1, 2], [3, 4, 5]]`` rank 4 has ``{0: [1, 4], 1: [3, 4, 5]}``.

        Raises:
            GroupError: the rank is not in the mesh.
        """
        lines = self.global_rank_to_process_groups_with_logical_rank(rank)
        return {axis: [int(self._logical_mesh_id[tuple(at)]) for at in line] for axis, line in lines.items()}

    def flatten(self) -> "DeviceMesh":
        """Merge all ranks into one axis, row-major; alpha and beta are the largest of this mesh."""
        return self._merge(tuple(range(len(self.mesh_shape))))

    def merged(self, axes: Sequence[int]) -> "DeviceMesh":
        """Return a mesh whose axis 0 counts through ``axes``, the last one fastest; alpha and beta are their largest.

        All axes in order are ``flatten()``; otherwise axis 1 counts through the rest. Cached; has groups if this mesh
        has.

        Raises:
            ShapeError: an axis that does not exist or is repeated.
        """
        ndim = len(self.mesh_shape)
        if not axes or any(not -ndim <= axis < ndim for axis in axes) or len({a % ndim for a in axes}) != len(axes):
            raise ShapeError(f"merged: {list(axes)} are not distinct axes of a mesh of shape {self.mesh_shape}")
        merged_axes = tuple(axis % ndim for axis in axes)
        if merged_axes not in self._merged:
            self._merged[merged_axes] = self._merge(merged_axes)
        return self._merged[merged_axes]

    def _merge(self, axes: tuple[int, ...]) -> "DeviceMesh":
        """Return the mesh of ``merged``: axis 1 of ``[[0, 1, 2], [3, 4, 5]]`` gives ``[[0, 3], [1, 4], [2, 5]]``."""
        rest = [axis for axis in range(len(self.mesh_shape)) if axis not in axes]
        ids = self._logical_mesh_id.permute(*axes, *rest)
        ids = ids.reshape(-1, math.prod(self.mesh_shape[axis] for axis in rest)) if rest else ids.flatten()
        # The axis of the rest gets the costs of the merged axes too: ``CommSpec`` asks for axis 0 only.
        costs = [max(values[axis] for axis in axes) for values in (self.mesh_alpha, self.mesh_beta)]
        alpha, beta = ([cost] * ids.dim() for cost in costs)
        mesh = DeviceMesh(self.physical_mesh_id, None, ids, alpha, beta, need_flatten=False)
        if self.init_process_group:
            # Ranks of a group ascend, and ranks along a permuted axis need not; `Members.order` has the permutation.
            mesh._connect(own_groups=[])
        return mesh

    def members(self, axis: int) -> AxisMembers | None:
        """Return this rank's process group along an axis; None on ranks outside the mesh.

        Raises:
            GroupError: the mesh has no process groups.
            ShapeError: no such axis.
        """
        if not self.init_process_group:
            raise GroupError("the mesh has no process groups; make it with init_process_group=True")
        ndim = len(self.mesh_shape)
        if not -ndim <= axis < ndim:
            raise ShapeError(f"axis {axis} is out of range for a mesh of shape {self.mesh_shape}")
        return self._members.get(axis % ndim)

    def all_gather_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """``alpha + beta*(k-1)/k*B + 0.1``."""
        alpha, beta, k = self._costs(mesh_dim)
        return alpha + beta * (k - 1) / k * num_bytes + 0.1

    def all_reduce_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """``alpha + beta*2*(k-1)/k*B + 0.01``."""
        alpha, beta, k = self._costs(mesh_dim)
        return alpha + beta * 2 * (k - 1) / k * num_bytes + 0.01

    def reduce_scatter_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """``alpha + beta*(k-1)/k*B + 0.001``."""
        alpha, beta, k = self._costs(mesh_dim)
        return alpha + beta * (k - 1) / k * num_bytes + 0.001

    def all_to_all_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """``alpha + beta*(k-1)/k**2*B*(k/2) + 0.001``; the last factor penalizes many small messages."""
        alpha, beta, k = self._costs(mesh_dim)
        return alpha + beta * (k - 1) / k / k * num_bytes * (k / 2) + 0.001

    @classmethod
    def from_torch(
        cls,
        mesh: TorchMesh,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        need_flatten: bool = True,
    ) -> "DeviceMesh":
        """Return the grid of a torch mesh, over its process groups; all ranks of the mesh call.

        Raises:
            GroupError: ranks do not ascend along an axis.
        """
        check_mesh(mesh, "from_torch")
        result = cls(mesh.mesh, None, None, mesh_alpha, mesh_beta, need_flatten=False)
        inside = mesh.get_coordinate() is not None
        result._connect([mesh.get_group(axis) for axis in range(mesh.ndim)] if inside else [])
        if need_flatten:
            result._add_flattened()
        return result

    def to_torch(self, device_type: str = "cpu", mesh_dim_names: Sequence[str] | None = None) -> TorchMesh:
        """Return a torch mesh over the same process groups; axes are named ``axis0``, ``axis1``, ... by default.

        Raises:
            GroupError: the mesh has no process groups, this rank is not in it, or ranks do not ascend along an axis.
        """
        check_ascending(self._logical_mesh_id, "to_torch")
        axes = range(len(self.mesh_shape))
        own_groups = [members.group for axis in axes if (members := self.members(axis)) is not None]
        if not own_groups:
            raise GroupError(f"to_torch: rank {dist.get_rank()} is not in the mesh of {sorted(self.convert_map)}")
        names = tuple(f"axis{axis}" for axis in axes) if mesh_dim_names is None else tuple(mesh_dim_names)
        return TorchMesh.from_group(own_groups, device_type, self._logical_mesh_id, mesh_dim_names=names)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceMesh":
        """Return a copy that shares the process groups."""
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        for name, value in vars(self).items():
            shared = name in ("process_groups_dict", "_members")
            setattr(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin

    def _per_axis(self, values: Sequence[float] | None, name: str) -> tuple[float, ...]:
        costs = tuple(values) if values is not None else (1,) * len(self.mesh_shape)
        if len(costs) != len(self.mesh_shape):
            raise ShapeError(f"DeviceMesh: {name} has {len(costs)} values for a mesh of shape {self.mesh_shape}")
        return costs

    def _costs(self, mesh_dim: int) -> tuple[float, float, int]:
        """Alpha, beta and the number of ranks of an axis."""
        return self.mesh_alpha[mesh_dim], self.mesh_beta[mesh_dim], self.mesh_shape[mesh_dim]

    def _add_flattened(self) -> None:
        """Make the two flattened meshes over all ranks."""
        self.need_flatten = True
        if len(self.mesh_shape) > 1:
            self.flatten_device_mesh = self.flatten()
            self._merged[tuple(range(len(self.mesh_shape)))] = self.flatten_device_mesh
            self.flatten_device_meshes = self.over_all_ranks()

    def over_all_ranks(self) -> "FlattenDeviceMesh":
        """Return the mesh for all-gathers over all ranks at once."""
        ids, shape = self._logical_mesh_id, self.mesh_shape
        return FlattenDeviceMesh(ids, shape, self.mesh_alpha, self.mesh_beta, need_flatten=False)


class FlattenDeviceMesh(DeviceMesh):
    """Mesh for all-gathers over all ranks at once, with the largest alpha and the smallest beta.

    Attributes:
        process_number_dict: linear indices of the grid; with axis 0 fastest (key 0), and with the last fastest (key 1).
    """

    def __init__(
        self,
        physical_mesh_id: Any,
        mesh_shape: Sequence[int] | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        init_process_group: bool = False,
        need_flatten: bool = True,
    ) -> None:
        super().__init__(physical_mesh_id, mesh_shape, None, mesh_alpha, mesh_beta, init_process_group, need_flatten)
        self.mesh_alpha, self.mesh_beta = max(self.mesh_alpha), min(self.mesh_beta)  # numbers, no longer by axis
        coordinates = torch.arange(self.num_devices, device="cpu").view(self.mesh_shape)
        fastest_first = coordinates.permute(*reversed(range(coordinates.dim())))
        self.process_number_dict = {0: fastest_first.flatten().tolist(), 1: coordinates.flatten().tolist()}

    def mix_gather_cost(self, num_bytes: float) -> float:
        """Return ``alpha + beta*(N-1)/N*B + 0.1`` over all ``N`` ranks."""
        alpha, beta, k = self.mesh_alpha, self.mesh_beta, self.num_devices
        return alpha + beta * (k - 1) / k * num_bytes + 0.1

    def _costs(self, mesh_dim: int) -> tuple[float, float, int]:
        return self.mesh_alpha, self.mesh_beta, self.mesh_shape[mesh_dim]


def _as_ranks(ids: Any) -> Tensor:
    """Return global ranks as integers; ``torch.Tensor([0, 1])`` and numpy's defaults are floats."""
    ranks = torch.as_tensor(ids, device="cpu")
    if not ranks.is_floating_point():
        return ranks
    if not bool((ranks == ranks.round()).all()):
        raise ArgumentError(f"DeviceMesh: global ranks are integers, not {ranks.tolist()}")
    return ranks.to(torch.int64)


def _grid(physical: Tensor, shape: Sequence[int] | None, logical: Any) -> Tensor:
    """Return the grid of global ranks."""
    if logical is not None:
        ids = _as_ranks(logical)
        if sorted(ids.flatten().tolist()) != sorted(physical.flatten().tolist()):
            raise ShapeError("DeviceMesh: logical_mesh_id and physical_mesh_id have different ranks")
        if shape is not None and tuple(shape) != tuple(ids.shape):
            raise ShapeError(f"DeviceMesh: logical_mesh_id has shape {tuple(ids.shape)}, mesh_shape is {tuple(shape)}")
        return ids
    if shape is None:
        return physical
    if math.prod(shape) != physical.numel():
        raise ShapeError(f"DeviceMesh: {physical.numel()} ranks do not fill a mesh of shape {tuple(shape)}")
    return physical.reshape(tuple(shape))
