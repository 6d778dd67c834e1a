"""Which meshes of ranks can be used: those whose ranks ascend along every axis."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tritoncomm.errors import GroupError

__all__ = ["check_ascending", "check_mesh"]


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
