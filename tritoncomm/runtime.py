"""initialize() and destroy(): from a launcher's variables, a mesh or a config to the groups of every mode."""

import atexit
import math
import operator
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from tritoncomm import groups, launchers, variables
from tritoncomm.core.backend import cuda_backend, is_nccl
from tritoncomm.core.validation import members
from tritoncomm.debug import agreement
from tritoncomm.debug.store import job_store
from tritoncomm.errors import ArgumentError, GroupError
from tritoncomm.groups import Group, ParallelMode

__all__ = ["TENSOR_MODES", "Sizes", "destroy", "device_mesh", "initialize", "read_sizes"]

TENSOR_MODES = (None, "1d", "sequence")
_AXES = {
    "data": ("data", "dp"),
    "pipeline": ("pipeline", "pp", "pipe"),
    "context": ("context", "cp"),
    "tensor": ("tensor", "tp", "model"),
}
_KEYS = {"pipeline": ("size",), "tensor": ("size", "mode")}
# ``of_one`` has groups of this rank alone by backend, ``starts`` counts starts of torch.distributed, and ``pid`` is the
# process in which ``_let_workers_end`` is registered.
_state: dict[str, Any] = {"mesh": None, "owns_world": False, "of_one": {}, "starts": 0, "pid": 0}


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
    check: bool | str | None = None,
) -> DeviceMesh:
    """Start torch.distributed if need be and make the process groups of every parallel mode.

    Rank layout: ``rank = ((d*pipeline + p)*context + c)*tensor + t``. Works under torchrun, srun and mpirun (Open MPI,
    MPICH, Intel MPI), in a spawned world with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, alone (one rank), and
    over a default process group that already exists. Under mpirun on several nodes MASTER_ADDR and MASTER_PORT have to
    be set.

    The current GPU becomes that of LOCAL_RANK, unless there is no such variable or the program uses a GPU already: it
    called ``torch.cuda.set_device``, or has memory on one. The variables of this library are read again. One rank
    warns where ranks differ in them or in tuned tables; no rank waits for that. Gloo groups are connected on all of
    their ranks when it returns. Axes of one rank share one group of this rank alone. A rank makes its own groups only;
    a mode over NCCL gets its group for CPU tensors at the first use.

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
        backend: of a process group made here; NCCL where there are GPUs and Gloo otherwise by default.
        timeout: of all process groups made here, a timedelta or seconds; torch's default by default.
        check: check mode, the same on all ranks. True: ranks compare every call before it starts. ``"hash:N"``: they
            compare a digest every N collectives, and no p2p steps. False: nothing. By default what TRITONCOMM_CHECK
            says.

    Returns:
        The device mesh with axes data, pipeline, context, tensor (the given one when ``mesh`` was passed).

    Raises:
        ArgumentError: an argument of the wrong type, a key of ``config`` in the wrong place, ``mesh`` or ``config``
            together with the sizes that they replace, or a text for ``check`` that is no value of TRITONCOMM_CHECK.
        GroupError: already initialized, the sizes do not multiply to the number of ranks, or a launcher's variables
            contradict each other or do not say where the ranks meet.
    """
    if groups.groups:
        raise GroupError("tritoncomm is already initialized; call tritoncomm.destroy() first")
    sizes = read_sizes(tensor, pipeline, data, context, expert, virtual_pipeline, mesh, config)
    variables.read()
    if check is not None:
        variables.set_check(check)
    _start(backend, timeout, sizes)
    if _state["pid"] != os.getpid() and sys.version_info < (3, 14):
        _state["pid"] = os.getpid()
        atexit.register(_let_workers_end)
    try:
        groups.timeout = _as_timedelta(timeout)
        if mesh is None:
            mesh = _make_mesh(sizes.of_world(dist.get_world_size()))
        else:
            groups.check_mesh(mesh, "initialize")
        groups.register(_make_groups(mesh, sizes.expert, sizes.tensor_mode))
        _wait_until_connected()
        agreement.check()
        if variables.CHECK.value or variables.HASH.value:  # a rank that ends without a checked call is named, too
            job_store()
    except BaseException:
        destroy()
        raise
    groups.set_virtual_pipeline_parallel_size(sizes.virtual_pipeline)
    _state["mesh"] = mesh
    return mesh


_LONGEST_EXIT = 2.0  # seconds
_LOOKS = 3  # in a row that find no worker at work


def _let_workers_end() -> None:
    """Wait as the process ends until Gloo's workers are idle; a function for ``atexit``."""
    # A worker (the thread ``pt_gloo_runloop``) drops the last reference to a finished operation after its ``wait()``
    # has returned, and takes the GIL to free the tensors. If the interpreter is being finalized by then, Python ends
    # the thread inside a destructor. The process then says "terminate called without an active exception", and has exit
    # code -6 after the work is done. TODO: delete when torch has pytorch#189128, or when 3.14 is the oldest Python,
    # in which such threads hang instead.
    if os.getpid() != _state["pid"]:  # a fork has no workers
        return
    end, quiet = time.monotonic() + _LONGEST_EXIT, 0
    while quiet < _LOOKS and time.monotonic() < end:
        time.sleep(0.002)  # without the GIL
        working = [task for task in Path("/proc/self/task").glob("*") if _is_worker(task)]
        if not working:
            return
        quiet = 0 if any(map(_is_running, working)) else quiet + 1


def _is_worker(task: Path) -> bool:
    """Whether a folder of /proc/self/task is that of a thread of Gloo's."""
    try:
        return (task / "comm").read_text().strip() == "pt_gloo_runloop"
    except OSError:  # the thread has ended
        return False


def _is_running(task: Path) -> bool:
    """Whether a thread runs (R) or waits for a device (D); False once it has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in ("R", "D")
    except OSError:
        return False


def destroy() -> None:
    """Forget all groups and destroy those made here, the default group included when initialize() started it."""
    for group in groups.owned:
        if group in members:  # the program may have destroyed it, with the default group for example
            dist.destroy_process_group(group)
    if _state["owns_world"] and dist.is_initialized():
        dist.destroy_process_group()
    groups.register({})
    groups.timeout = None
    groups.owned.clear()
    _state.update(mesh=None, owns_world=False, of_one={})


def device_mesh() -> DeviceMesh:
    """Return the mesh of ``initialize()``."""
    if _state["mesh"] is None:
        raise GroupError("tritoncomm is not initialized; call tritoncomm.initialize() first")
    return _state["mesh"]


def _start(backend: str | None, timeout: timedelta | float | None, sizes: "Sizes") -> None:
    """Start torch.distributed, where the program has not, and where ``sizes`` fit the number of ranks."""
    limit = _as_timedelta(timeout)
    if not isinstance(backend, str | None):
        raise ArgumentError(f"backend must be a name, not {backend!r} ({type(backend).__name__})")
    if dist.is_initialized():
        return
    os.environ.update(launchers.rendezvous(os.environ))
    world = launchers.world_size(os.environ) if "RANK" in os.environ else 1
    if world is not None:
        sizes.of_world(world)
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    options: dict[str, Any] = {"timeout": limit}
    device = _bind_gpu() if is_nccl(backend) else None
    if device is not None and _torch_version() >= (2, 15):
        # From 2.15 on "nccl" binds to the GPU of LOCAL_RANK unless it is told the one that the program chose.
        options["device_id"] = device
    if "RANK" not in os.environ:
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    elif _state["starts"] and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives the groups: what an earlier start left there would be taken for this one's.
        store, rank, world = next(rendezvous("env://"))
        options |= {"store": PrefixStore(f"tritoncomm/{_state['starts']}", store), "rank": rank, "world_size": world}
    _state["starts"] += 1
    dist.init_process_group(backend, **options)
    _state["owns_world"] = True


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """Return a timeout in seconds as a timedelta; None, torch's default, and a timedelta as they are."""
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ArgumentError(f"timeout must be a timedelta or seconds, not {timeout!r} ({type(timeout).__name__})")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ArgumentError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return timedelta(seconds=timeout)


def _bind_gpu() -> torch.device | None:
    """Make LOCAL_RANK's GPU the current one, unless the program uses one; None without that variable."""
    count = torch.cuda.device_count()
    if not count:
        return None
    bindings: Any = torch._C  # the attribute is in builds with CUDA only
    # Memory on GPU 0 counts as the program's choice too: torch does not distinguish it from ``set_device(0)``.
    uses_gpu = torch.cuda.is_initialized() and (torch.cuda.current_device() != 0 or bindings._cuda_hasPrimaryContext(0))
    if not uses_gpu:
        local_rank = launchers.local_rank(os.environ)
        if local_rank is None:
            return None
        torch.cuda.set_device(local_rank % count)
    return torch.device("cuda", torch.cuda.current_device())


def _torch_version() -> tuple[int, ...]:
    """Return major and minor of torch's version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _device_type() -> str:
    """Return ``cuda`` if the default group has NCCL, else ``cpu``."""
    return "cuda" if is_nccl(dist.get_backend_config(dist.group.WORLD)) else "cpu"


def _make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Make the mesh of all ranks, with one group for each axis, made axis by axis on every rank."""
    ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
    coordinate, rest = [0] * len(shape), dist.get_rank()
    for axis in reversed(range(len(shape))):
        rest, coordinate[axis] = divmod(rest, shape[axis])
    made = []
    for name, size in zip(_AXES, shape, strict=True):
        mode = ParallelMode[name.upper()]
        backend = _lazy_backend() if mode is ParallelMode.PIPELINE and size > 1 else None
        made.append(_new_group(mode, groups.ranks_of_mode(mode, ranks, coordinate), backend))
    return DeviceMesh.from_group(made, _device_type(), mesh=ranks, mesh_dim_names=tuple(_AXES))


def _lazy_backend() -> str | None:
    """Return backends that connect two ranks at their first exchange; None for the default group's."""
    # For the pipeline's group and groups of one rank: nccl2 makes a communicator with every group, and sends all
    # transfers of a group over one stream. A group of nccl-lazy has a communicator and a stream for each pair of
    # stages.
    world = dist.group.WORLD
    assert world is not None
    if cuda_backend(world) != "nccl2" or not dist.is_backend_available("nccl-lazy"):
        return None
    parts = [part.rpartition(":") for part in dist.get_backend_config(world).split(",")]
    return ",".join(f"{kind}{colon}{'nccl-lazy' if is_nccl(name) else name}" for kind, colon, name in parts)


def _make_groups(mesh: DeviceMesh, expert: int, tensor_mode: str | None) -> dict[ParallelMode, Group]:
    """Make the groups of all modes; groups that no axis of the mesh has are made mode by mode on every rank."""
    names = mesh.mesh_dim_names or ()
    axis = {ours: next((n for n in names if n in known), None) for ours, known in _AXES.items()}
    unknown = set(names) - set(axis.values())
    if unknown or axis["tensor"] is None:
        known = ", ".join("/".join(names) for names in _AXES.values())
        raise GroupError(f"mesh axes {names} must be among {known}, with a tensor axis")
    dims = [None if name is None else names.index(name) for name in axis.values()]
    ranks, place = _grid(mesh, dims, expert)
    modes = [ParallelMode[ours.upper()] for ours in axis]
    made: dict[ParallelMode, dist.ProcessGroup | None] = {ParallelMode.GLOBAL: dist.group.WORLD}
    made |= {mode: None if dim is None else mesh.get_group(dim) for mode, dim in zip(modes, dims, strict=True)}
    # None: no axis of the mesh has the group, and it is made below.
    made[ParallelMode.MODEL] = None
    if expert > 1:
        made[ParallelMode.EXPERT] = None
    if tensor_mode == "sequence":
        made[ParallelMode.SEQUENCE_DP] = None
    of_modes: dict[ParallelMode, Group] = {}
    shared: dict[dist.ProcessGroup, Group] = {}  # modes with one group have one CPU group, too
    for mode, existing in made.items():
        group = existing or _new_group(mode, groups.ranks_of_mode(mode, ranks, place, expert))
        of_modes[mode] = shared.setdefault(group, Group(group, mode))
    if alias := {"sequence": ParallelMode.SEQUENCE, "1d": ParallelMode.PARALLEL_1D}.get(tensor_mode or ""):
        of_modes[alias] = of_modes[ParallelMode.TENSOR]
    return of_modes


def _grid(mesh: DeviceMesh, dims: Sequence[int | None], expert: int) -> tuple[torch.Tensor, list[int]]:
    """Return the ranks of a mesh as a grid of data, pipeline, context and tensor, and this rank's place in it.

    ``dims`` are the mesh's dim of each of these axes, None for an axis that it does not have.
    """
    if mesh.mesh.numel() != dist.get_world_size():
        raise GroupError(f"the mesh has {mesh.mesh.numel()} ranks, the job {dist.get_world_size()}")
    own = mesh.get_coordinate()
    assert own is not None, "a mesh of all ranks has this one"
    shape = [1 if dim is None else mesh.mesh.shape[dim] for dim in dims]
    if expert < 1 or shape[0] % expert:
        raise GroupError(f"expert {expert} does not divide data {shape[0]}")
    ranks = mesh.mesh.permute([dim for dim in dims if dim is not None]).reshape(shape)
    return ranks, [0 if dim is None else own[dim] for dim in dims]


def _new_group(mode: ParallelMode, ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a group of ``ranks``: the default group for all, a shared one for this rank alone, else a new one."""
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size() and backend is None and world is not None:
        return world
    if len(ranks) == 1:
        return _group_of_one(backend)
    group = groups.make_group(mode.value, ranks, backend)
    groups.owned.append(group)
    return group


def _group_of_one(backend: str | None) -> dist.ProcessGroup:
    """Return this rank's group without peers, one for all axes of one rank; a rank makes it alone."""
    made: dict[str | None, dist.ProcessGroup] = _state["of_one"]
    if backend not in made:
        made[backend] = groups.make_group("one", [dist.get_rank()], backend or _lazy_backend())
        groups.owned.append(made[backend])
    return made[backend]


def _wait_until_connected() -> None:
    """Wait for the other ranks of the Gloo groups made here to connect."""
    for group in [*groups.owned, *[dist.group.WORLD] * _state["owns_world"]]:
        groups.wait_until_connected(group)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranks along every axis.

    Attributes:
        tensor: ranks that share one layer.
        data: replicas, None for the ranks that are left over.
        context: ranks that share one sequence.
        expert: ranks of the data axis that share one set of experts.
        virtual_pipeline: model chunks per stage.
        tensor_mode: ColossalAI's mode of the tensor axis, one of ``TENSOR_MODES``.
    """

    tensor: int
    pipeline: int
    data: int | None
    context: int
    expert: int
    virtual_pipeline: int | None
    tensor_mode: str | None = None

    def of_world(self, world: int) -> tuple[int, int, int, int]:
        """Return the data, pipeline, context and tensor size for ``world`` ranks, which they have to multiply to."""
        for name in ("tensor", "pipeline", "context", "data"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise GroupError(f"{name} must be 1 or more, not {size}")
        model = self.tensor * self.pipeline * self.context
        data = world // model if self.data is None else self.data
        if data * model != world:
            sizes = f"pipeline {self.pipeline} * context {self.context} * tensor {self.tensor}"
            problem = f"{sizes} does not divide" if self.data is None else f"data {data} * {sizes} is not"
            ranks, command = f"{world} ranks", ""
            if world == 1:  # most often a script without a launcher
                need = model * (self.data or 1)
                ranks, command = "1 rank", f", for example with `torchrun --nproc-per-node {need} SCRIPT.py`"
            raise GroupError(
                f"{problem} the {ranks} of this job: start as many as the sizes need{command}, or change the sizes"
            )
        if self.expert < 1 or data % self.expert:
            raise GroupError(f"expert {self.expert} does not divide data {data}")
        return data, self.pipeline, self.context, self.tensor


def read_sizes(
    tensor: Any, pipeline: Any, data: Any, context: Any, expert: Any, virtual_pipeline: Any, mesh: Any, config: Any
) -> Sizes:
    """Return the sizes that the arguments of ``initialize()`` give; reject sizes that are given twice."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh must be torch's DeviceMesh, not {type(mesh).__name__}; ours has .to_torch()")
    given = {"tensor": tensor, "pipeline": pipeline, "data": data, "context": context}
    for name, source, replaced in (("mesh", mesh, tuple(given)), ("config", config, ("tensor", "pipeline"))):
        doubled = [f"{size}={given[size]!r}" for size in replaced if given[size] not in (1, None)]
        if source is not None and doubled:
            raise ArgumentError(f"{name} says the sizes of {', '.join(replaced)}: leave out {', '.join(doubled)}")
    mode = None
    if config is not None:
        if mesh is not None:
            raise ArgumentError("mesh and config both say the sizes: give one of them")
        tensor, pipeline, mode = _read_config(config)
    return Sizes(
        tensor=_integer("tensor", tensor),
        pipeline=_integer("pipeline", pipeline),
        data=None if data is None else _integer("data", data),
        context=_integer("context", context),
        expert=_integer("expert", expert),
        virtual_pipeline=None if virtual_pipeline is None else _integer("virtual_pipeline", virtual_pipeline),
        tensor_mode=mode,
    )


def _integer(name: str, value: Any) -> int:
    """Return an argument as an int; reject a bool, and anything that is no integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, not {value!r} ({type(value).__name__})") from None


def _read_config(config: Any) -> tuple[Any, Any, str | None]:
    """Return tensor size, pipeline size and tensor mode of ``dict(parallel=dict(pipeline=..., tensor=...))``."""
    if not isinstance(config, Mapping):
        raise ArgumentError(f"config must be a dict, not {type(config).__name__}")
    for name in _KEYS:
        if name in config:
            example = f"dict(parallel=dict({name}={config[name]!r}))"
            raise ArgumentError(f"config[{name!r}] belongs in config['parallel']: config={example}")
    parallel = config.get("parallel", {})
    if not isinstance(parallel, Mapping):
        raise ArgumentError(f"config['parallel'] must be a dict, not {type(parallel).__name__}")
    unknown = [name for name in parallel if name not in (*_KEYS, "data")]  # data is always derived from the others
    if unknown:
        raise ArgumentError(f"config['parallel'] has no key {unknown[0]!r}; it takes {', '.join(_KEYS)}")
    pipeline, _ = _read_axis("pipeline", parallel.get("pipeline", 1))
    tensor, tensor_mode = _read_axis("tensor", parallel.get("tensor", 1))
    return tensor, pipeline, tensor_mode


def _read_axis(name: str, value: Any) -> tuple[Any, str | None]:
    """Return size and mode of one axis, given as a number or as a dict."""
    place = f"config['parallel'][{name!r}]"
    if not isinstance(value, Mapping):
        return _integer(place, value), None
    mode = value.get("mode")
    if mode not in TENSOR_MODES:
        raise ArgumentError(f"tensor mode {mode!r} is not supported; supported are {TENSOR_MODES}")
    unknown = [key for key in value if key not in _KEYS[name]]
    if unknown or "size" not in value:
        what = f"has no key {unknown[0]!r}" if unknown else "has no size"
        raise ArgumentError(f"{place} {what}; it takes {', '.join(_KEYS[name])}")
    return _integer(f"{place}['size']", value["size"]), mode
