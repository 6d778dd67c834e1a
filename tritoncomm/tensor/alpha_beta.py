"""Measured alpha-beta costs of a device mesh, for the cost model of ColossalAI's contract (``DeviceMesh``)."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import eager
from tritoncomm.core.backend import cuda_backend, default_device
from tritoncomm.errors import GroupError, ShapeError
from tritoncomm.tensor.device_mesh import DeviceMesh

__all__ = ["measure_mesh"]


def measure_mesh(mesh: DeviceMesh, *, small: int = 256, large: int = 1 << 20, repeats: int = 10) -> DeviceMesh:
    """Return the mesh with measured alpha (microseconds) and beta (microseconds per fp32 element) of each axis.

    Both are fitted to all-reduces of two sizes: ``t(B) = alpha + 2*beta*(k-1)/k*B`` for k ranks that hold B elements.
    All ranks of the mesh call and get the numbers of the slowest rank. All groups of an axis run at once, so that links
    they share are measured under load. Runs on the GPU if the groups have a backend for CUDA tensors other than Gloo
    (``nccl``, ``cpu:gloo,cuda:nccl``), otherwise on the CPU.

    Args:
        mesh: with process groups.
        small: elements of the small all-reduce, which is dominated by latency.
        large: elements of the large one.
        repeats: all-reduces of each size, of which the median is taken.

    Raises:
        GroupError: the mesh has no process groups, or this rank is not in it.
        ShapeError: ``small`` is not less than ``large``.
    """
    if not 0 < small < large or repeats < 1:
        raise ShapeError(f"measure_mesh: sizes {small} and {large}, {repeats} repeats")
    members = [mesh.members(axis) for axis in range(len(mesh.mesh_shape))]
    groups = [each.group for each in members if each is not None]
    if len(groups) < len(members):
        raise GroupError(f"measure_mesh: rank {dist.get_rank()} is not in the mesh")
    alpha, beta = [], []
    for group, k in zip(groups, mesh.mesh_shape, strict=True):
        if k == 1:
            alpha.append(0.0)
            beta.append(0.0)
            continue
        short, long = (_microseconds(group, size, repeats) for size in (small, large))
        slope = max(long - short, 0.0) / (2 * (k - 1) / k * (large - small))
        alpha.append(max(short - 2 * slope * (k - 1) / k * small, 0.0))
        beta.append(slope)
    costs = torch.tensor([alpha, beta], dtype=torch.float64, device="cpu")
    # Maxima along one axis after the other: every rank then has those of the whole mesh.
    for group in groups:
        costs = eager.all_reduce(
            costs.to(default_device(cuda_backend(group))), group, "measure_mesh", dist.ReduceOp.MAX
        ).cpu()
    alpha, beta = costs.tolist()
    measured = DeviceMesh(mesh.physical_mesh_id, None, mesh.logical_mesh_id, alpha, beta, need_flatten=False)
    measured._connect(groups)
    if mesh.need_flatten:
        measured._add_flattened()
    return measured


def _microseconds(group: ProcessGroup, size: int, repeats: int) -> float:
    """Return the median time of an all-reduce of ``size`` fp32 elements, after two warm-up calls."""
    # A group may have one backend per device (``cpu:gloo,cuda:nccl``).
    x = torch.ones(size, device=default_device(cuda_backend(group)))
    times = []
    for _ in range(repeats + 2):
        _wait(x)
        started = time.perf_counter()
        eager.all_reduce(x, group, "measure_mesh", dist.ReduceOp.MAX, in_place=True)
        _wait(x)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[2:])


def _wait(x: Tensor) -> None:
    """Wait until the device of a tensor has completed all work; a CPU has none left."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
