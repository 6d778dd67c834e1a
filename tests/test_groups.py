"""Rank lists, initialize() and destroy(), from sizes, a mesh, a config and Slurm's variables."""

import enum
import os
import random
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed import ProcessGroup

from tritoncomm import ArgumentError, GroupError, ParallelMode, groups, mappings, runtime

M = ParallelMode


def test_the_contracts_examples() -> None:
    found = groups.rank_lists(4, tensor=2, pipeline=2)
    assert found[M.PIPELINE] == [[0, 2], [1, 3]]
    assert found[M.TENSOR] == [[0, 1], [2, 3]]
    assert found[M.MODEL] == [[0, 1, 2, 3]]
    assert found[M.GLOBAL] == [[0, 1, 2, 3]]
    assert groups.rank_lists(4, pipeline=4)[M.PIPELINE] == [[0, 1, 2, 3]]
    found = groups.rank_lists(8, tensor=2, pipeline=2)
    assert found[M.DATA] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found[M.PIPELINE] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found[M.TENSOR] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found[M.MODEL] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("t", "p", "c", "d"), [(1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 2, 4), (1, 5, 1, 2), (4, 3, 1, 1)])
def test_layout_formula(t: int, p: int, c: int, d: int) -> None:
    world = t * p * c * d
    found = groups.rank_lists(world, t, p, c)
    sizes = {M.TENSOR: (t, 1), M.CONTEXT: (c, t), M.PIPELINE: (p, t * c), M.DATA: (d, t * c * p)}
    for mode, (size, step) in sizes.items():
        assert sorted(rank for ranks in found[mode] for rank in ranks) == list(range(world))
        for ranks in found[mode]:
            assert ranks == [ranks[0] + i * step for i in range(size)]
    for mode in found:
        assert sorted(rank for ranks in found[mode] for rank in ranks) == list(range(world))


def test_experts_are_runs_of_the_data_axis() -> None:
    found = groups.rank_lists(8, tensor=2, expert=2)
    assert found[M.DATA] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found[M.EXPERT] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_modes_by_value() -> None:
    class Theirs(enum.Enum):
        TENSOR = "tensor"
        UNKNOWN = "sideways"

    assert groups.as_mode(Theirs.TENSOR) is M.TENSOR
    assert groups.as_mode(M.DATA) is M.DATA
    for bad in (Theirs.UNKNOWN, None, 3):
        with pytest.raises(ArgumentError):
            groups.as_mode(bad)
    values = {mode.name: mode.value for mode in M}
    assert values["PIPELINE"] == "pipe"
    assert values["PARALLEL_2P5D_XZ"] == "2p5d_xz"
    assert values["PARALLEL_3D_INPUT_X_WEIGHT"] == "3d_input_x_weight"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu3", "gpu3"),
        ("gpu3,gpu4", "gpu3"),
        ("gpu[03-07,12],x", "gpu03"),
        ("a-b[1,5]", "a-b1"),
        ("node-001.cluster", "node-001.cluster"),
        ("localhost", "localhost"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert runtime._first_node(nodes) == first


def test_a_node_list_without_a_name() -> None:
    with pytest.raises(GroupError, match="node list"):
        runtime._first_node("")


def _slurm(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    _slurm(
        monkeypatch, SLURM_PROCID="5", SLURM_NTASKS="16", SLURM_LOCALID="1", SLURM_JOB_ID="123456",
        SLURM_STEP_NODELIST="gpu[03-07]",
    )  # fmt: skip
    found = runtime._launcher_environment()
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "5",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
    }
    assert 1024 < int(found["MASTER_PORT"]) < 65536
    monkeypatch.setenv("RANK", "0")
    assert runtime._launcher_environment() == {}, "torchrun inside Slurm"


def test_slurm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _slurm(monkeypatch)
    assert runtime._launcher_environment() == {}
    _slurm(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_JOB_NODELIST="gpu1")
    assert runtime._launcher_environment() == {}


def run_sizes(group: ProcessGroup) -> None:
    import tritoncomm as tc

    rank = dist.get_rank()
    for _ in range(2):
        mesh = tc.initialize(tensor=2, pipeline=2, virtual_pipeline=3)
        assert mesh.mesh_dim_names == ("data", "pipeline", "context", "tensor")
        assert tc.device_mesh() is mesh
        d, p, t = rank // 4, rank // 2 % 2, rank % 2
        assert groups.get_ranks_in_group(M.TENSOR) == [rank - t, rank - t + 1]
        assert groups.get_ranks_in_group(M.PIPELINE) == [4 * d + t, 4 * d + t + 2]
        assert groups.get_ranks_in_group(M.DATA) == [rank % 4, rank % 4 + 4]
        assert groups.get_ranks_in_group(M.MODEL) == list(range(4 * d, 4 * d + 4))
        assert groups.get_ranks_in_group(M.GLOBAL) == list(range(8))
        for mode, local in ((M.TENSOR, t), (M.PIPELINE, p), (M.DATA, d), (M.GLOBAL, rank)):
            ranks = groups.get_ranks_in_group(mode)
            assert groups.get_local_rank(mode) == local
            assert groups.get_world_size(mode) == len(ranks)
            assert groups.is_first_rank(mode) == (local == 0)
            assert groups.is_last_rank(mode) == (local == len(ranks) - 1)
            assert groups.get_next_global_rank(mode) == ranks[(local + 1) % len(ranks)]
            assert groups.get_prev_global_rank(mode) == ranks[(local - 1) % len(ranks)]
            assert groups.is_initialized(mode)
            assert list(groups.ranks_of(groups.get_group(mode))) == ranks
            assert groups.get_cpu_group(mode) is groups.get_group(mode)
        assert groups.get_global_rank() == rank
        assert not groups.is_initialized(M.PARALLEL_1D)
        with pytest.raises(GroupError):
            groups.get_group(M.PARALLEL_1D)
        with pytest.raises(GroupError, match="already"):
            tc.initialize()
        for chunk in range(3):
            groups.set_virtual_pipeline_parallel_rank(chunk)
            assert groups.is_pipeline_first_stage() == (p == 0 and chunk == 0)
            assert groups.is_pipeline_last_stage() == (p == 1 and chunk == 2)
            assert groups.is_pipeline_first_stage(ignore_virtual=True) == (p == 0)
            assert groups.is_pipeline_last_stage(ignore_virtual=True) == (p == 1)
        groups.set_virtual_pipeline_parallel_size(None)
        assert groups.is_pipeline_first_stage() == (p == 0)
        tc.destroy()
        assert not groups.is_initialized(M.TENSOR)
        assert dist.is_initialized()
    tc.destroy()
    with pytest.raises(GroupError, match="not initialized"):
        tc.device_mesh()
    for bad in ({"tensor": 3}, {"tensor": 2, "data": 3}, {"tensor": 16}, {"expert": 3}, {"tensor": 0}):
        with pytest.raises(GroupError):
            tc.initialize(**bad)  # pyright: ignore[reportArgumentType]
    assert not groups.is_initialized(M.GLOBAL)


def test_sizes_twice_and_virtual_stages(pool: Pool) -> None:
    pool.run(run_sizes, world=8)


def run_meshes(group: ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import tritoncomm as tc

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert tc.initialize(mesh=mesh, expert=2) is mesh
    assert groups.get_ranks_in_group(M.TENSOR) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups.get_group(M.TENSOR) is mesh.get_group("tp")
    assert groups.get_ranks_in_group(M.CONTEXT) == [rank & ~2, rank | 2]
    assert groups.get_ranks_in_group(M.DATA) == [rank & ~4, rank | 4]
    assert groups.get_ranks_in_group(M.EXPERT) == [rank & ~4, rank | 4]
    assert groups.get_world_size(M.PIPELINE) == 1
    tc.destroy()
    assert mesh.get_group("tp").size() == 2, "the caller's groups stay"
    crossed = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "pp", "dp"))
    tc.initialize(mesh=crossed, expert=2)  # tensor is the slowest axis: the ranks of a stage are not next to each other
    for mode in groups.groups:
        group = groups.get_group(mode)
        assert groups.get_ranks_in_group(mode) == dist.get_process_group_ranks(group), mode
        assert groups.get_local_rank(mode) == group.rank(), mode
    assert groups.get_ranks_in_group(M.MODEL) == [rank & 1 | each for each in (0, 2, 4, 6)]
    tc.destroy()
    for names in (("dp", "cp", "sideways"), ("dp", "cp", "pp")):
        odd = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        with pytest.raises(GroupError, match="mesh axes"):
            tc.initialize(mesh=odd)

    config: dict[str, Any] = {"parallel": {"pipeline": {"size": 2}, "tensor": {"size": 2, "mode": "1d"}}}
    tc.initialize(config=config)
    assert config["parallel"]["tensor"] == {"size": 2, "mode": "1d"}, "the caller's dict is left alone"
    assert groups.get_group(M.PARALLEL_1D) is groups.get_group(M.TENSOR)
    assert groups.get_ranks_in_group(M.PIPELINE) == [rank & ~2, rank | 2]
    tc.destroy()
    tc.initialize(config={"parallel": {"tensor": {"size": 4, "mode": "sequence"}}})
    assert groups.get_group(M.SEQUENCE) is groups.get_group(M.TENSOR)
    assert groups.get_world_size(M.SEQUENCE_DP) == 8
    tc.destroy()
    tc.initialize(config={"parallel": {"pipeline": 1, "tensor": 8}})
    assert groups.get_world_size(M.TENSOR) == 8
    tc.destroy()
    tc.initialize(config={})
    assert groups.get_world_size(M.DATA) == 8
    tc.destroy()
    with pytest.raises(ArgumentError, match="2d"):
        tc.initialize(config={"parallel": {"tensor": {"size": 4, "mode": "2d"}}})


def test_meshes_and_configs(pool: Pool) -> None:
    pool.run(run_meshes, world=8)


ALONE = """
import torch, torch.distributed as dist
import tritoncomm as tc
from tritoncomm import groups
for _ in range(2):
    tc.initialize(timeout=20)
    assert dist.get_world_size() == 1
    assert groups.get_world_size(tc.ParallelMode.TENSOR) == 1
    assert groups.is_pipeline_first_stage() and groups.is_pipeline_last_stage()
    x = torch.ones(2)
    assert tc.collective.all_reduce(x, tc.ParallelMode.TENSOR) is x
    tc.destroy()
    assert not dist.is_initialized()
print("good")
"""


def test_alone_without_a_launcher() -> None:
    drop = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, timeout=100)
    assert ran.stdout.strip() == "good", ran.stderr


SLURM = """
import torch, torch.distributed as dist, tritoncomm
from tritoncomm import groups
tritoncomm.initialize(tensor=2)
x = torch.full((2,), float(dist.get_rank()))
print(groups.get_ranks_in_group(groups.ParallelMode.TENSOR), tritoncomm.mappings.all_gather_dim(x, 0).tolist())
tritoncomm.destroy()
"""


def free_port(ports: range) -> int:
    for port in random.SystemRandom().sample(ports, 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no free port")


def test_two_tasks_of_slurm() -> None:
    drop = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    job = free_port(range(20000, 40000)) - 20000  # the port follows from the job
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", SLURM],
            env=env | {
                "SLURM_PROCID": str(task), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(task),
                "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost",
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for task in range(2)
    ]  # fmt: skip
    try:
        told = [task.communicate(timeout=100) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [out.strip() for out, _ in told] == ["[0, 1] [0.0, 0.0, 1.0, 1.0]"] * 2, told


def run_megatron_group(group: ProcessGroup) -> None:
    state: Any = ModuleType("megatron.core.parallel_state")
    state.initialized = False
    state.model_parallel_is_initialized = lambda: state.initialized
    state.get_tensor_model_parallel_group = lambda: group
    x = torch.full((2,), float(group.rank()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.parallel_state", state)
        with pytest.raises(GroupError, match="no tensor group exists"):
            mappings.all_gather_dim(x, 0)
        state.initialized = True
        assert mappings.all_gather_dim(x, 0).tolist() == [0, 0, 1, 1]
        groups.register({ParallelMode.TENSOR: groups.Group(dist.group.WORLD, dist.group.WORLD, tuple(range(8)))})
        try:
            assert groups.resolve(None, "mapping") is dist.group.WORLD, "our own group goes first"
        finally:
            groups.register({})


def test_no_group_finds_megatrons(pool: Pool) -> None:
    pool.run(run_megatron_group)
