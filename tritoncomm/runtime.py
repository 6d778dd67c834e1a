"""initialize() and destroy(): from a launcher's variables, a mesh or a config to the groups of every mode."""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tritoncomm import agreement, groups
from tritoncomm.errors import ArgumentError, GroupError
from tritoncomm.groups import Group, ParallelMode
from tritoncomm.meshes import check_mesh

__all__ = ["destroy", "device_mesh", "initialize"]

_AXES = {
    "data": ("data", "dp"),
    "pipeline": ("pipeline", "pp", "pipe"),
    "context": ("context", "cp"),
    "tensor": ("tensor", "tp", "model"),
}
_TENSOR_MODES = (None, "1d", "sequence")
_state: dict[str, Any] = {"mesh": None, "owns_world": False, "owned": []}


def initialize(
    tensor: int = 1,
    pipeline: int = 1,
    data: int | None = None,
    *,
    context: int = 1,
    expert: int = 1,
    virtual_pipeline: int | None = None,
    mesh: DeviceMesh | None = None,
    config: Mapping[str, Any] | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
) -> DeviceMesh:
    """Start torch.distributed if need be and make the process groups of every parallel mode.

    Rank layout: ``rank = ((d*pipeline + p)*context + c)*tensor + t``. Works under torchrun, under Slurm (srun), in a
    spawned world with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, alone (one rank), and over a default process
    group that already exists. One rank warns where ranks differ in tuned tables or in the variables that choose tables
    and paths; nobody waits for that.

    Args:
        tensor: ranks that share one layer.
        pipeline: stages.
        data: replicas; what is left over by default.
        context: ranks that share one sequence.
        expert: ranks of the data axis that share one set of experts; divides ``data``.
        virtual_pipeline: model chunks per stage.
        mesh: an existing mesh with axes named data/dp, pipeline/pp, context/cp, tensor/tp; instead of the sizes. Its
            ranks have to ascend along every axis, as they do in torch's groups, or GroupError is raised on all ranks.
        config: ColossalAI's ``dict(parallel=dict(pipeline=..., tensor=dict(size=..., mode=...)))``; instead of sizes.
        backend: of a process group made here; Gloo for CPU tensors and NCCL for CUDA tensors by default.
        timeout: of a process group made here, a timedelta or seconds.

    Returns:
        The device mesh with axes data, pipeline, context, tensor (the given one when ``mesh`` was passed).

    Raises:
        GroupError: already initialized, or the sizes do not multiply to the number of ranks.
    """
    if groups.groups:
        raise GroupError("tritoncomm is already initialized; call tritoncomm.destroy() first")
    tensor_mode = None
    if config is not None:
        tensor, pipeline, tensor_mode = _read_config(config)
    _start(backend, timeout)
    try:
        if mesh is None:
            sizes = _sizes(dist.get_world_size(), tensor, pipeline, data, context, expert)
            mesh = init_device_mesh(_device_type(), sizes, mesh_dim_names=tuple(_AXES))
            _state["owned"] += [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
        groups.register(_make_groups(mesh, expert, tensor_mode))
        agreement.check()
    except BaseException:
        destroy()
        raise
    groups.set_virtual_pipeline_parallel_size(virtual_pipeline)
    _state["mesh"] = mesh
    return mesh


def destroy() -> None:
    """Forget all groups and destroy those made here, the default group included when initialize() started it."""
    for group in _state["owned"]:
        dist.destroy_process_group(group)
    if _state["owns_world"] and dist.is_initialized():
        dist.destroy_process_group()
    groups.register({})
    _state.update(mesh=None, owns_world=False, owned=[])


def device_mesh() -> DeviceMesh:
    """The mesh of ``initialize()``."""
    if _state["mesh"] is None:
        raise GroupError("tritoncomm is not initialized; call tritoncomm.initialize() first")
    return _state["mesh"]


def _read_config(config: Mapping[str, Any]) -> tuple[int, int, str | None]:
    parallel = config.get("parallel", {})
    pipeline, tensor = parallel.get("pipeline", 1), parallel.get("tensor", 1)
    if isinstance(pipeline, Mapping):
        pipeline = pipeline["size"]
    mode = None
    if isinstance(tensor, Mapping):
        tensor, mode = tensor.get("size", 1), tensor.get("mode")
    if mode not in _TENSOR_MODES:
        raise ArgumentError(f"tensor mode {mode!r} is not supported; supported are {_TENSOR_MODES}")
    return tensor, pipeline, mode


def _sizes(world: int, tensor: int, pipeline: int, data: int | None, context: int, expert: int) -> tuple[int, ...]:
    model = tensor * pipeline * context
    replicas = data if data is not None else world // max(model, 1)
    if min(tensor, pipeline, context) < 1 or replicas * model != world:
        raise GroupError(
            f"data {replicas} * pipeline {pipeline} * context {context} * tensor {tensor} is not {world}, "
            "the number of ranks"
        )
    if expert < 1 or replicas % expert:
        raise GroupError(f"expert {expert} does not divide data {replicas}")
    return replicas, pipeline, context, tensor


def _start(backend: str | None, timeout: timedelta | float | None) -> None:
    if dist.is_initialized():
        return
    environment = _launcher_environment()
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    _state["owns_world"] = True


def _launcher_environment() -> dict[str, str]:
    """torchrun's variables from Slurm's when only those are there; nothing in any other case."""
    env = os.environ
    if "RANK" in env or "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", "1")) < 2:
        return {}
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "localhost")
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or "0"
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": _first_node(nodes),
        "MASTER_PORT": str(20000 + int(job) % 20000),
    }


def _first_node(nodes: str) -> str:
    """First host of a Slurm node list: ``gpu[03-07,12],x`` is gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise GroupError(f"cannot read a host name from the Slurm node list {nodes!r}")
    return match.group(1) + (match.group(2) or "")


def _device_type() -> str:
    return "cuda" if "nccl" in dist.get_backend_config(dist.group.WORLD) else "cpu"


def _make_groups(mesh: DeviceMesh, expert: int, tensor_mode: str | None) -> dict[ParallelMode, Group]:
    check_mesh(mesh, "initialize")
    names = mesh.mesh_dim_names or ()
    axis = {ours: next((n for n in names if n in known), None) for ours, known in _AXES.items()}
    unknown = set(names) - set(axis.values())
    if unknown or axis["tensor"] is None:
        known = ", ".join("/".join(names) for names in _AXES.values())
        raise GroupError(f"mesh axes {names} must be among {known}, with a tensor axis")
    lists = _lists_of(mesh, axis, expert)
    members = {ParallelMode.GLOBAL: _world()}
    for mode, ours in (("DATA", "data"), ("PIPELINE", "pipeline"), ("CONTEXT", "context"), ("TENSOR", "tensor")):
        made = mesh.get_group(name) if (name := axis[ours]) is not None else None
        members[ParallelMode[mode]] = _own_group(lists[ParallelMode[mode]], made)
    extra = [ParallelMode.MODEL]
    if expert > 1:
        extra.append(ParallelMode.EXPERT)
    if tensor_mode == "sequence":
        extra.append(ParallelMode.SEQUENCE_DP)
        members[ParallelMode.SEQUENCE] = members[ParallelMode.TENSOR]
    if tensor_mode == "1d":
        members[ParallelMode.PARALLEL_1D] = members[ParallelMode.TENSOR]
    for mode in extra:
        members[mode] = _own_group(lists[mode], None)
    return members


def _lists_of(mesh: DeviceMesh, axis: dict[str, str | None], expert: int) -> dict[ParallelMode, list[list[int]]]:
    names = mesh.mesh_dim_names or ()
    sizes = {ours: mesh.size(names.index(name)) if name else 1 for ours, name in axis.items()}
    order = [names.index(name) for ours in _AXES if (name := axis[ours]) is not None]
    ranks = mesh.mesh.permute(order).flatten().tolist()
    if len(ranks) != dist.get_world_size():
        raise GroupError(f"the mesh has {len(ranks)} ranks, the job {dist.get_world_size()}")
    if expert < 1 or sizes["data"] % expert:
        raise GroupError(f"expert {expert} does not divide data {sizes['data']}")
    lists = groups.rank_lists(len(ranks), sizes["tensor"], sizes["pipeline"], sizes["context"], expert)
    return {mode: [[ranks[i] for i in one] for one in found] for mode, found in lists.items()}


def _world() -> Group:
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(range(dist.get_world_size()))
    return Group(world, _cpu_twin([list(ranks)], world), ranks)


def _own_group(lists: list[list[int]], made: dist.ProcessGroup | None) -> Group:
    """This rank's group among ``lists``; every rank makes every group, in the same order."""
    rank = dist.get_rank()
    mine = next(ranks for ranks in lists if rank in ranks)
    group = made if made is not None else _new_group(lists, None)
    return Group(group, _cpu_twin(lists, group), tuple(sorted(mine)))  # torch sorts the ranks of a group


def _new_group(lists: list[list[int]], backend: str | None) -> dist.ProcessGroup:
    if len(lists) == 1 and len(lists[0]) == dist.get_world_size() and backend is None and dist.group.WORLD is not None:
        return dist.group.WORLD
    mine, _ = dist.new_subgroups_by_enumeration(lists, backend=backend)
    assert isinstance(mine, dist.ProcessGroup)
    _state["owned"].append(mine)
    return mine


def _cpu_twin(lists: list[list[int]], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A Gloo group over the same ranks when ``group`` cannot carry CPU tensors."""
    if torch.device("cpu") in group._device_types:
        return group
    return _new_group(lists, "gloo")
