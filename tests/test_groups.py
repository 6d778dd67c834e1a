"""Rank lists, initialize() and destroy(), from sizes, a mesh and a config; the GPU of a rank."""

import enum
import inspect
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_groups import cuda_mesh
from pool import Pool
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend that sends nothing

from tritoncomm import (
    ArgumentError,
    GroupError,
    ParallelMode,
    PeerError,
    collective,
    experts,
    groups,
    mappings,
    p2p,
    parallel,
    recurrent,
    runtime,
    ulysses,
)
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.runtime import read_sizes
from tritoncomm.ulysses import UlyssesAttention

M = ParallelMode
MODULES = {
    "collective": collective, "experts": experts, "mappings": mappings, "p2p": p2p, "parallel": parallel,
    "recurrent": recurrent, "ulysses": ulysses,
}  # fmt: skip
SIZES = read_sizes(1, 1, None, 1, 1, None, None, None)


@contextmanager
def creations() -> Iterator[list[tuple[str, list[int], str]]]:
    """Label, ranks and backend of every process group that this rank makes meanwhile."""
    made: list[tuple[str, list[int], str]] = []
    helper = dist.distributed_c10d._new_process_group_helper

    def make(size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **options: Any) -> Any:
        made.append((options["group_desc"], ranks, str(backend)))
        return helper(size, rank, ranks, backend, *rest, **options)

    with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", make):
        yield made


@contextmanager
def simulated(world: int, rank: int, backend: str) -> Iterator[None]:
    """A default group of ``world`` ranks, of which this process is one and the others do not exist."""
    dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize(
    ("t", "p", "c", "d", "e"), [(1, 1, 1, 1, 1), (2, 2, 2, 4, 2), (3, 1, 2, 4, 4), (1, 5, 1, 2, 1)]
)
def test_the_ranks_of_a_mode_are_one_of_the_lists(t: int, p: int, c: int, d: int, e: int) -> None:
    grid = torch.arange(t * p * c * d).view(d, p, c, t)
    for mode, lists in groups.rank_lists(t * p * c * d, t, p, c, e).items():
        for ranks in lists:
            for rank in ranks:
                place = (grid == rank).nonzero()[0].tolist()
                assert groups.ranks_of_mode(mode, grid, place, e) == ranks
    assert groups.ranks_of_mode(M.MODEL, grid.flip(3), [0] * 4) == sorted(grid[0].flatten().tolist())


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


BAD_SIZES: list[tuple[dict[str, Any], str]] = [
    ({"tensor": 3}, r"pipeline 1 \* context 1 \* tensor 3 does not divide the 8 ranks of this job: start as many"),
    ({"tensor": 16}, "tensor 16 does not divide the 8 ranks"),
    ({"tensor": 2, "data": 3}, r"data 3 \* pipeline 1 \* context 1 \* tensor 2 is not the 8 ranks of this job"),
    ({"tensor": 0}, "tensor must be 1 or more, not 0"),
    ({"data": -1}, "data must be 1 or more, not -1"),
    ({"expert": 3}, "expert 3 does not divide data 8"),
]


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
            assert dist.get_process_group_ranks(groups.get_group(mode)) == ranks
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
    for bad, words in BAD_SIZES:
        with pytest.raises(GroupError, match=words):
            tc.initialize(**bad)
    assert not groups.is_initialized(M.GLOBAL)


def run_waits_until_connected(group: ProcessGroup, folder: str) -> None:
    import tritoncomm as tc

    rank, wait = dist.get_rank(), runtime._wait_until_connected

    def last() -> None:
        if rank == 3:
            time.sleep(0.3)
        (Path(folder) / str(rank)).touch()
        wait()

    with mock.patch.object(runtime, "_wait_until_connected", last):
        tc.initialize(tensor=2)
    groups_of = [groups.get_ranks_in_group(mode) for mode in (M.TENSOR, M.DATA)]
    assert all((Path(folder) / str(other)).exists() for ranks in groups_of for other in ranks)
    tc.destroy()


def test_a_rank_leaves_initialize_when_its_groups_are_connected(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_waits_until_connected, str(tmp_path), world=8)


SIZES_AT_SCALE = {"tensor": 8, "pipeline": 8, "context": 2, "expert": 4}
OWN_GROUPS = [(M.DATA, 128), (M.PIPELINE, 8), (M.CONTEXT, 2), (M.TENSOR, 8), (M.MODEL, 128), (M.EXPERT, 4)]


@pytest.mark.parametrize("backend", ["fake", "cuda:fake"])  # one that carries CPU tensors, and one that does not
def test_a_rank_of_16384_makes_its_own_groups_only(backend: str) -> None:
    rank, world = 12345, 16384
    with simulated(world, rank, backend), creations() as made:
        runtime.initialize(**SIZES_AT_SCALE)
        assert [(label, len(ranks)) for label, ranks, _ in made] == [(mode.value, size) for mode, size in OWN_GROUPS]
        assert all(rank in ranks and kind == backend for _, ranks, kind in made)
        lists = groups.rank_lists(world, 8, 8, 2, 4)
        for mode in groups.groups:
            assert groups.get_ranks_in_group(mode) == next(ranks for ranks in lists[mode] if rank in ranks)
        assert groups.get_next_global_rank(M.DATA) == (rank + 128) % world
        runtime.destroy()


def test_destroy_after_the_program_has_destroyed_the_default_group() -> None:
    with simulated(8, 3, "fake"):
        runtime.initialize(tensor=2)
        dist.destroy_process_group()
        runtime.destroy()
        assert not groups.is_initialized()
        dist.init_process_group("fake", store=HashStore(), rank=3, world_size=8)
        runtime.initialize(tensor=4)
        assert groups.get_ranks_in_group(M.TENSOR) == [0, 1, 2, 3]
        runtime.destroy()


def calls_of(function: Callable[[], Any]) -> int:
    """The number of calls of our functions, and of others by ours, while ``function`` runs."""
    count, folder = 0, str(Path(runtime.__file__).parent)

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            caller = frame.f_back if event == "call" else frame
            count += any(each is not None and each.f_code.co_filename.startswith(folder) for each in (frame, caller))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_initialize_does_not_call_more_functions_for_more_ranks() -> None:
    counts: dict[int, int] = {}
    for world in (512, 16384):
        with simulated(world, world // 2 + 1, "fake"):
            for _ in range(2):  # the first one fills caches
                sizes = {"tensor": 8, "pipeline": world // 64, "data": 8}
                counts[world] = calls_of(lambda sizes=sizes: runtime.initialize(**sizes))
                runtime.destroy()
    assert counts[16384] < counts[512] * 1.02, counts


@pytest.mark.ranks(8)
def test_ranks_that_made_different_numbers_of_groups_meet(group: ProcessGroup) -> None:
    """Ranks that made different numbers of groups before meet in the groups of initialize() and in CPU groups."""
    import tritoncomm as tc

    rank, world, mesh = dist.get_rank(), dist.distributed_c10d._world, cuda_mesh((4, 2), ("dp", "tp"))
    alone = [groups.make_group("alone", [rank]) for _ in range(rank)]
    before, names = world.group_count, set()
    world.group_count += rank  # torch's hashed names have this number from 2.14 on, before that the groups that exist
    try:
        for _ in range(2):
            with creations() as made:
                tc.initialize(mesh=mesh, timeout=30)
                names.add(groups.get_group(M.MODEL).group_name)
                x = torch.ones(2)
                assert collective.all_reduce(x, M.TENSOR).tolist() == [2.0, 2.0]
                assert collective.all_reduce(torch.ones(1), M.DATA).item() == 4
            assert [label for label, _, kind in made if kind == "gloo"] == ["one", "model", "tensor-cpu", "data-cpu"]
            tc.destroy()
        assert len(names) == 2, "one of its own for each initialize()"
        assert all(name.startswith(f"model.{rank // 2 * 2}-{rank // 2 * 2 + 1}.") for name in names)
    finally:
        world.group_count = before
        for each in alone:
            dist.destroy_process_group(each)


@pytest.mark.ranks(8)
def test_cpu_groups_are_made_at_their_first_use(group: ProcessGroup) -> None:
    """CPU groups are made at their first use, by their ranks, once; threads and modes with one group share one."""
    import tritoncomm as tc

    me, mesh = dist.get_rank(), cuda_mesh((4, 2), ("dp", "tp"))
    for _ in range(2):
        with creations() as made:
            tc.initialize(mesh=mesh, timeout=30)
            assert groups.get_cpu_group(M.GLOBAL) is groups.get_group(M.GLOBAL)
            assert groups.get_cpu_group(M.PIPELINE) is groups.get_group(M.CONTEXT), "one rank, made over Gloo"
            assert [label for label, _, _ in made] == ["one", "model"]
            made.clear()
            found: list[Any] = []
            use = partial(lambda found: found.append(groups.get_cpu_group(M.TENSOR)), found)
            threads = [Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == [groups.get_cpu_group(M.TENSOR)] * 3
            assert [label for label, _, _ in made] == ["tensor-cpu"]
            if me % 2 == 0:  # the odd ranks never use theirs
                assert collective.broadcast(torch.tensor([me]), 0, M.DATA).item() == 0
                assert collective.reduce(torch.tensor([1]), 4, M.DATA).item() == 4 or me != 4
                assert dist.get_process_group_ranks(groups.get_cpu_group(M.DATA)) == [0, 2, 4, 6]
            assert groups.get_cpu_group(M.TENSOR) is not groups.get_group(M.TENSOR)
        cpu_group = groups.get_cpu_group(M.TENSOR)
        tc.destroy()
        assert cpu_group not in dist.distributed_c10d._world.pg_names, "destroyed with the others"
    assert mesh.get_group("tp").size() == 2, "the caller's groups stay"


@pytest.mark.ranks(8)
def test_a_cpu_group_that_a_rank_does_not_use_ends_in_an_error(group: ProcessGroup) -> None:
    import tritoncomm as tc

    me = dist.get_rank()
    tc.initialize(mesh=cuda_mesh((4, 2), ("dp", "tp")), timeout=2)
    if me in (0, 4, 6):  # rank 2 does not come
        with pytest.raises(
            GroupError, match=r"the group data-cpu\.0-6\..* of 4 ranks was not made: ranks \[2\] did not come: "
        ):
            groups.get_cpu_group(M.DATA)
    elif me in (2, 3):
        assert collective.all_reduce(torch.ones(1), M.TENSOR).item() == 2
    tc.destroy()


def test_a_root_is_found_in_a_time_that_does_not_grow(group: ProcessGroup) -> None:
    """Roots are found without a list of all ranks of the group."""
    me = dist.get_rank()
    for root in (0, np.int64(1), torch.tensor(1)):
        with mock.patch.object(dist, "get_process_group_ranks", side_effect=AssertionError):
            assert collective.broadcast(torch.tensor([me]), root, group).item() == root  # pyright: ignore[reportArgumentType]
            out = collective.reduce(torch.tensor([1]), root, group)  # pyright: ignore[reportArgumentType]
        assert out.item() == 2 or me != root
    for wrong in (2, -1, 7, 100, "0", None, 1.5, [0]):
        with pytest.raises(
            GroupError, match=rf"broadcast: global rank {re.escape(repr(wrong))} is not in the group \[0, 1"
        ):
            collective.broadcast(torch.ones(1), wrong, group)  # pyright: ignore[reportArgumentType]
    everyone = dist.group.WORLD
    with pytest.raises(GroupError, match="reduce: global rank 8 is not in the group"):
        collective.reduce(torch.ones(1), 8, everyone)


def test_sizes_twice_and_virtual_stages(pool: Pool) -> None:
    pool.run(run_sizes, world=8)


def run_meshes(group: ProcessGroup) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor": 2.0}, "tensor must be an integer, not 2.0 (float)"),
        ({"tensor": "2"}, "tensor must be an integer, not '2' (str)"),
        ({"pipeline": None}, "pipeline must be an integer, not None"),
        ({"data": True}, "data must be an integer, not True (bool)"),
        ({"context": [1]}, "context must be an integer"),
        ({"expert": "all"}, "expert must be an integer"),
        ({"virtual_pipeline": 1.5}, "virtual_pipeline must be an integer"),
        ({"mesh": "cuda"}, "mesh must be torch's DeviceMesh, not str"),
        ({"backend": 3}, "backend must be a name, not 3 (int)"),
        ({"timeout": "20"}, "timeout must be a timedelta or seconds, not '20' (str)"),
        ({"timeout": True}, "timeout must be a timedelta or seconds"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
        ({"timeout": math.nan}, "timeout must be a positive number of seconds"),
        ({"config": "config.py"}, "config must be a dict, not str"),
        ({"config": {"tensor": 2}}, "belongs in config['parallel']: config=dict(parallel=dict(tensor=2))"),
        ({"config": {"pipeline": {"size": 2}}}, "config['pipeline'] belongs in config['parallel']"),
        ({"config": {"parallel": 2}}, "config['parallel'] must be a dict, not int"),
        (
            {"config": {"parallel": {"tensors": 2}}},
            "config['parallel'] has no key 'tensors'; it takes pipeline, tensor",
        ),
        ({"config": {"parallel": {"tensor": "2"}}}, "config['parallel']['tensor'] must be an integer, not '2'"),
        ({"config": {"parallel": {"tensor": {"mode": "1d"}}}}, "config['parallel']['tensor'] has no size"),
        ({"config": {"parallel": {"tensor": {"size": 2, "modes": "1d"}}}}, "['tensor'] has no key 'modes'"),
        ({"config": {"parallel": {"tensor": {"size": 2.5}}}}, "['tensor']['size'] must be an integer, not 2.5"),
        ({"config": {"parallel": {"pipeline": {"size": 2, "mode": "1d"}}}}, "['pipeline'] has no key 'mode'"),
        ({"config": {"parallel": {}}, "tensor": 2}, "config says the sizes of tensor, pipeline: leave out tensor=2"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments: dict[str, Any], words: str) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ArgumentError, match=re.escape(words)):
        runtime.initialize(**arguments)
    assert not dist.is_initialized(), "refused before anything is started"


def test_sizes_are_compared_with_the_launchers_ranks_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="tensor 3 does not divide the 4 ranks"):
        runtime.initialize(tensor=3, timeout=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("sizes", "need"), [({"tensor": 2}, 2), ({"pipeline": 2, "tensor": 4, "data": 3}, 24)])
def test_a_script_without_a_launcher_is_answered_with_one(sizes: dict[str, int], need: int) -> None:
    with pytest.raises(GroupError, match=rf"the 1 rank of this job.* `torchrun --nproc-per-node {need} SCRIPT.py`"):
        replace(SIZES, **sizes).of_world(1)
    with pytest.raises(GroupError, match="start as many as the sizes need, or change the sizes"):
        replace(SIZES, **sizes).of_world(5)


def test_integers_of_other_libraries_are_sizes() -> None:
    config = {"parallel": {"tensor": np.int64(2)}, "fp16": {}, "data": "a dataset"}
    assert read_sizes(1, 1, None, np.int32(4), 1, None, None, config).of_world(16) == (2, 1, 4, 2)


class Gpus:
    """``torch.cuda`` of a machine with GPUs, as far as initialize() asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0, used: bool = False) -> None:
        self.current, self.used = current, used
        self.started: dict[str, Any] = {}
        for name, value in {
            "device_count": lambda: count, "is_available": lambda: count > 0, "current_device": lambda: self.current,
            "is_initialized": lambda: self.used, "set_device": self.set,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: self.used, raising=False)
        monkeypatch.setattr(
            dist, "init_process_group", lambda backend, **options: self.started.update(options, backend=backend)
        )
        monkeypatch.setitem(runtime._state, "owns_world", False)
        for name in ("LOCAL_RANK", "RANK"):
            monkeypatch.delenv(name, raising=False)

    def set(self, index: int) -> None:
        self.current, self.used = index, True


@pytest.mark.parametrize(
    ("variable", "current", "used", "after", "bound"),
    [
        ("2", 0, False, 2, 2),  # the launcher's
        ("5", 0, False, 1, 1),  # more ranks than GPUs
        (None, 0, False, 0, None),  # nobody says: nothing is moved, nothing bound
        (None, 3, True, 3, 3),  # the program's own
        ("2", 3, True, 3, 3),  # the program's own, against the launcher's
        ("2", 0, True, 0, 0),  # the same, with the first GPU
    ],
)
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.15.0a0+git1"])
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, current: int, used: bool, after: int, bound: int | None,
    version: str,
) -> None:  # fmt: skip
    gpus = Gpus(monkeypatch, 4, current, used)
    monkeypatch.setattr(torch, "__version__", version)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    runtime._start(None, None, SIZES)
    assert gpus.current == after
    assert gpus.started["backend"] == "nccl", "Gloo would connect every rank with every other"
    device = gpus.started.get("device_id")
    assert device == (torch.device("cuda", bound) if bound is not None and version[:4] == "2.15" else None)


def test_without_gpus_nothing_is_divided_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    runtime._start("cpu:gloo,cuda:nccl", None, SIZES)
    assert gpus.current == 0
    assert "device_id" not in gpus.started
    monkeypatch.setenv("LOCAL_RANK", "one")
    Gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(GroupError, match="LOCAL_RANK is 'one', not a number"):
        runtime._start(None, None, SIZES)


def run_bound_device(group: ProcessGroup) -> None:
    """A default group bound to a GPU, as "nccl" of torch 2.15 binds it: the whole job makes groups of a few ranks."""
    import tritoncomm as tc

    me, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "bound_device_id", torch.device("cuda", 0))
        patch.setattr(dist.distributed_c10d, "_get_split_source", lambda *_: None)  # Gloo's cannot leave ranks out
        made = [tc.tensor.ProcessGroup(ranks=list(ranks), tp_degree=len(ranks)) for ranks in ((1, 2, 5), (4, 6))]
        tc.initialize(tensor=4)
        whole = dist.new_group(list(range(8)))  # every process has made as many groups
    for pg, ranks in zip(made, ((1, 2, 5), (4, 6)), strict=True):
        x = torch.tensor([float(me)])
        if me in ranks:
            pg.tp_process_group().allreduce([x]).wait()
        assert x.item() == (sum(ranks) if me in ranks else me)
    x = torch.tensor([1.0])
    assert tc.collective.all_reduce(x, M.TENSOR).item() == 4
    whole.allreduce([x]).wait()
    assert x.item() == 32
    tc.destroy()
    dist.destroy_process_group(whole)


def test_groups_of_a_few_ranks_with_a_bound_device(pool: Pool) -> None:
    pool.run(run_bound_device, world=8)


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
        groups.register({ParallelMode.TENSOR: groups.Group(dist.group.WORLD, ParallelMode.TENSOR)})
        try:
            assert groups.resolve(None, "mapping") is dist.group.WORLD, "our own group goes first"
        finally:
            groups.register({})


def test_no_group_finds_megatrons(pool: Pool) -> None:
    pool.run(run_megatron_group)


def run_timeout(group: ProcessGroup) -> None:
    """All groups made here have it, those of ColoTensors too; a send over one whose other end does not come ends."""
    import tritoncomm as tc
    from tritoncomm.tensor import ProcessGroup as ColoProcessGroup

    limit, before = timedelta(seconds=2), set(dist.distributed_c10d._pg_map)
    mesh = tc.initialize(pipeline=2, data=2, tensor=2, expert=2, timeout=limit)
    assert mesh.shape == (2, 2, 1, 2)
    assert [mesh.get_group(name) for name in ("data", "pipeline", "tensor")] == [
        groups.get_group(mode) for mode in (M.DATA, M.PIPELINE, M.TENSOR)
    ]
    assert mesh["data"].get_local_rank() == dist.get_rank() // 4
    made = {each.group for each in groups.groups.values()} - {dist.group.WORLD}
    assert len(made) >= 5
    made |= {ColoProcessGroup(tp_degree=4).tp_process_group(), ColoProcessGroup(tp_degree=8).dp_process_group()}
    for each in made - before:  # ColoTensors use groups that there are
        assert each._get_backend(torch.device("cpu")).options._timeout == limit
    ring = groups.get_group(M.PIPELINE)
    started = time.monotonic()
    if dist.get_rank(ring):
        with pytest.raises(PeerError):
            p2p.send_backward(torch.ones(4))
        assert 1.5 < time.monotonic() - started < 7
    else:
        time.sleep(4)
    tc.destroy()
    tc.initialize(tensor=8)
    assert groups.timeout is None
    tc.destroy()


def test_the_timeout_holds_for_all_groups(pool: Pool) -> None:
    pool.run(run_timeout, world=8)


def run_kinds_of_groups(group: ProcessGroup) -> None:
    me = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    unnamed = DeviceMesh("cpu", torch.arange(8).view(2, 4))
    tensor, data = mesh.get_group("tp"), mesh.get_group("dp")
    x = torch.arange(8.0).view(4, 2).add(8 * me).requires_grad_()
    expected = mappings.all_to_all_dims(x, 0, 1, tensor)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    for each in (mesh["tp"], (mesh, "tp"), (mesh, 1), (mesh, -1), tensor.group_name, (unnamed, 1)):
        out = mappings.all_to_all_dims(x, 0, 1, each)
        assert torch.equal(out, expected), each
        assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], grad), each
        assert mappings.all_to_all(each, x.detach()).shape == x.shape
        assert collective.all_gather(x.detach(), 0, each).shape == (16, 2)
    assert mappings.all_gather_dim(x, 0, (mesh, "dp"))[:4].tolist() == (x if me < 4 else x - 32).tolist()
    everyone = init_device_mesh("cpu", (8,))
    assert mappings.all_gather_dim(x, 0, everyone)[:, 0].tolist() == [float(i) for i in range(0, 64, 2)]
    communicator = P2PCommunicator(mesh["dp"], object())
    assert (communicator.pp_group, communicator.total_stages) == (data, 2)
    with pytest.raises(GroupError, match=r"all_gather_dim: a mesh of 2 dims is not one group; pass mesh\['dp'\] or"):
        mappings.all_gather_dim(x, 0, mesh)
    with pytest.raises(GroupError, match=r"pass \(mesh, dim\)"):
        P2PCommunicator(unnamed, object())
    with pytest.raises(GroupError, match="the mesh has no dim 'pp'"):
        mappings.all_gather_dim(x, 0, (mesh, "pp"))
    with pytest.raises(GroupError, match="no dim 2"):
        mappings.all_gather_dim(x, 0, (mesh, 2))
    with pytest.raises(GroupError, match=r"no process group of the name 'dp' with this rank; a dim of a mesh is"):
        collective.all_gather(x, 0, "dp")
    with pytest.raises(GroupError, match="not a member"):
        mappings.all_gather_dim(x, 0, dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"pass tritoncomm.groups.get_group\(ParallelMode.DATA\)"):
        mappings.all_gather_dim(x, 0, M.DATA)  # type: ignore[arg-type]
    for wrong in ([0, 1], (0, 1), 3, object()):
        with pytest.raises(ArgumentError, match="a DeviceMesh of one dim, "):
            mappings.all_gather_dim(x, 0, wrong)  # type: ignore[arg-type]
    turned = DeviceMesh("cpu", torch.arange(8).view(2, 4).flip(1))
    for _ in range(2):
        with pytest.raises(GroupError, match="do not ascend along axis 1"):
            mappings.all_gather_dim(x, 0, (turned, 1))
    assert mappings.all_gather_dim(x, 0, (turned, 0)).shape == (8, 2)
    half = DeviceMesh("cpu", torch.arange(4))  # made by all ranks, of the first four
    if me < 4:
        assert mappings.all_gather_dim(x, 0, half).shape == (16, 2)
    else:
        with pytest.raises(GroupError, match="this rank is not in the mesh"):
            mappings.all_gather_dim(x, 0, half)
    for each in (mesh["tp"], tensor.group_name):
        compiled = torch.compile(
            lambda x, each=each: mappings.all_gather_dim(x, 0, each), backend="aot_eager", fullgraph=True
        )
        assert torch.equal(compiled(x), mappings.all_gather_dim(x, 0, tensor))


@pytest.mark.slow
def test_what_stands_for_a_group(pool: Pool) -> None:
    pool.run(run_kinds_of_groups, world=8)


@lru_cache(maxsize=1)
def shared_mesh() -> DeviceMesh:
    """Of all ranks of the pool, made once for all tests."""
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def _pass_on(group: Any, x: Tensor) -> Tensor:
    communicator = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=x.dtype))
    return communicator.send_forward_recv_forward(x, True, x.shape)


def _post(post: Any, group: Any, x: Tensor) -> Tensor:
    me, out = dist.get_rank(), torch.empty_like(x)
    first = me // 4 * 4
    handles = post(
        tensor_send_prev=None, tensor_recv_prev=out, tensor_send_next=x, tensor_recv_next=None, group=group,
        prev_pipeline_rank=first + (me - 1) % 4, next_pipeline_rank=first + (me + 1) % 4,
    )  # fmt: skip
    for handle in handles.values() if isinstance(handles, dict) else handles:
        handle.wait()
    return out


def _attend(group: Any, x: Tensor) -> Tensor:
    return UlyssesAttention(group)(*[x.view(1, 16, 4, 1)] * 3)


def _sums_of_two(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.nn.functional.pad(x, (1, -1))


def _parallelize(group: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    linear = parallelize_module(torch.nn.Linear(4, 8), group, parallel.ColwiseParallel())
    return linear(x.detach())


def _dispatched(group: Any, x: Tensor) -> Tensor:
    """Each row from all ranks that its experts are on: half of the rows go to one rank, half to all."""
    ids = torch.arange(len(x))[:, None] % 2 * torch.arange(4)
    dispatched = experts.dispatch(x, ids, torch.ones(len(x), 4), 4, group)
    return experts.combine(dispatched.rows, dispatched)


def _routed(group: Any, x: Tensor) -> Tensor:
    ids = torch.arange(len(x))[:, None] % 2 * torch.arange(4)
    dispatched = experts.route(ids, 4, group).dispatch(x, torch.ones(len(x), 4))
    return experts.combine(dispatched.rows, dispatched)


# Calls of every public function that takes a group, with a tensor [16, 4]; None where the defaults of the rest do.
def _dropped(group: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    with ulysses.dropout_by_rank(group):
        return torch.nn.functional.dropout(x)


TAKE_GROUPS: dict[str, Any] = {
    "collective.all_gather": lambda group, x: collective.all_gather(x, 1, group),
    "collective.all_reduce": None,
    "collective.all_to_all": None,
    "collective.broadcast": lambda group, x: collective.broadcast(x, dist.get_rank() // 4 * 4, group),
    "collective.reduce": lambda group, x: collective.reduce(x, dist.get_rank() // 4 * 4, group).mul_(
        dist.get_rank() % 4 == 0
    ),
    "collective.reduce_scatter": lambda group, x: collective.reduce_scatter(x, 1, group),
    "experts.dispatch": _dispatched,
    "experts.route": _routed,
    "collective.split_reduce_scatter": lambda group, x: collective.split_reduce_scatter(x, 0, group),
    **dict.fromkeys([
        f"mappings.{name}" for name in mappings.__all__ if inspect.isfunction(getattr(mappings, name))
    ]),
    "mappings.all_gather_dim": lambda group, x: mappings.all_gather_dim(x, 1, group),
    "mappings.all_to_all": lambda group, x: mappings.all_to_all(group, x),
    "mappings.all_to_all_dims": lambda group, x: mappings.all_to_all_dims(x, 0, 1, group),
    "mappings.reduce_scatter_dim": lambda group, x: mappings.reduce_scatter_dim(x, 0, group),
    "mappings.split_dim": lambda group, x: mappings.split_dim(x, 0, group),
    "p2p.P2PCommunicator": _pass_on,
    "p2p._batched_p2p_ops": lambda group, x: _post(p2p._batched_p2p_ops, group, x),
    "p2p._p2p_ops": lambda group, x: _post(p2p._p2p_ops, group, x),
    "ulysses.UlyssesAttention": _attend,
    "ulysses.dropout_by_rank": _dropped,
    "recurrent.by_heads": lambda group, x: recurrent.by_heads(lambda y: y.cumsum(1), group)(x.view(1, 16, 4)),
    "recurrent.conv_halo": lambda group, x: recurrent.conv_halo(_sums_of_two, group)(x.t()[None], torch.ones(4, 2)),
    "parallel.ColwiseParallel": _parallelize,
}  # fmt: skip


def run_with_each_kind(group: ProcessGroup, name: str) -> None:
    mesh = shared_mesh()
    package, _, function = name.partition(".")
    keyword = "parallel_mode" if package == "collective" else "group"
    call = TAKE_GROUPS[name] or (lambda group, x: getattr(MODULES[package], function)(x, **{keyword: group}))
    x = torch.arange(64.0).view(16, 4) + 64 * dist.get_rank()
    tensor = mesh.get_group("tp")
    kinds = (mesh["tp"], (mesh, "tp"), (mesh, 1), tensor.group_name)
    if package == "parallel":  # parallelize_module is torch's and takes a mesh
        expected, kinds = torch.nn.functional.linear(x, *_linear_of_rank(mesh["tp"])), (mesh["tp"],)
    else:
        expected = call(tensor, x.clone())
    for kind in kinds:
        assert torch.equal(call(kind, x.clone()), expected), kind


def _linear_of_rank(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Weight and bias of this rank of the linear in ``_parallelize``."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 8)
    return linear.weight.detach().chunk(4)[mesh.get_local_rank()], linear.bias.detach().chunk(4)[mesh.get_local_rank()]


@pytest.mark.parametrize("name", TAKE_GROUPS)
def test_every_function_takes_every_kind_of_group(pool: Pool, name: str) -> None:
    pool.run(run_with_each_kind, name, world=8)


def test_no_function_that_takes_a_group_is_left_out() -> None:
    public = {
        f"{package}.{name}"
        for package, module in MODULES.items()
        for name in module.__all__
        if {"group", "parallel_mode", "pp_group"} & _parameters(getattr(module, name))
    }
    inner = {"ulysses.exchange_for", "ulysses.to_heads", "ulysses.to_sequence"}  # between modules: a process group
    assert public - inner | {"parallel.ColwiseParallel"} == set(TAKE_GROUPS)


def _parameters(value: Any) -> set[str]:
    """Of a function or a class of ours; autograd functions take just what Megatron's take, a process group."""
    is_ours = inspect.isroutine(value) or (inspect.isclass(value) and not issubclass(value, torch.autograd.Function))
    try:
        return set(inspect.signature(value).parameters) if is_ours else set()
    except ValueError:  # an enum of torch's
        return set()


@pytest.mark.parametrize(
    ("name", "available", "config", "expected"),
    [
        ("nccl2", True, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl-lazy"),
        ("nccl2", True, "cuda:nccl2", "cuda:nccl-lazy"),
        ("nccl2", False, "cuda:nccl", None),
        ("nccl", True, "cuda:nccl", None),
        ("gloo", True, "cpu:gloo,cuda:gloo", None),
    ],
)
def test_groups_of_nccl2_that_connect_lazily(
    monkeypatch: pytest.MonkeyPatch, name: str, available: bool, config: str, expected: str | None
) -> None:
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", dist.ProcessGroup(0, 4))
    monkeypatch.setattr(runtime, "cuda_backend", lambda _: name)
    monkeypatch.setattr(dist, "is_backend_available", lambda _: available)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    assert runtime._lazy_backend() == expected


def run_backends_of_axes(group: ProcessGroup) -> None:
    """Groups of the pipeline and of one rank are made with the lazy backend, with a timeout and without."""
    import tritoncomm as tc

    with mock.patch.object(runtime, "_lazy_backend", return_value="cpu:gloo"):
        for timeout in (None, timedelta(seconds=20)):
            with creations() as made:
                mesh = tc.initialize(tensor=4, pipeline=2, timeout=timeout)
            lazy = [(label, len(ranks)) for label, ranks, kind in made if kind == "cpu:gloo"]
            assert lazy == [("one", 1), ("pipe", 2)], "one group for data and context"
            assert mesh.get_group("pipeline") is groups.get_group(M.PIPELINE)
            tc.destroy()


def run_axes_of_one(group: ProcessGroup, timeout: float | None) -> None:
    import tritoncomm as tc

    mesh = tc.initialize(pipeline=8, timeout=timeout)
    alone = groups.get_group(M.TENSOR)
    assert (alone.size(), alone.rank()) == (1, 0)
    assert dist.get_process_group_ranks(alone) == [dist.get_rank()]
    for mode, axis in ((M.TENSOR, "tensor"), (M.CONTEXT, "context"), (M.DATA, "data")):
        assert groups.get_group(mode) is groups.get_cpu_group(mode) is mesh.get_group(axis) is alone
        assert groups.get_ranks_in_group(mode) == [dist.get_rank()]
    x = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(x, group=alone)
    assert torch.equal(x, torch.full((3,), float(dist.get_rank())))
    assert tc.mappings.gather_from_tensor_model_parallel_region(x) is x
    both = mesh["pipeline", "tensor"]._flatten("model")
    assert both.size() == 8
    names = [name for name in dist.distributed_c10d._world.pg_names.values() if name == alone.group_name]
    assert len(names) == 1
    tc.destroy()
    assert alone not in dist.distributed_c10d._world.pg_names
    tc.initialize(pipeline=8, timeout=timeout)  # once more, with a new one
    assert groups.get_group(M.TENSOR) is not alone
    tc.destroy()


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_axes_of_one_rank_share_a_group_without_peers(pool: Pool, timeout: float | None) -> None:
    """It is a group, never None, which is the whole job in torch; no other rank takes part in making it."""
    pool.run(run_axes_of_one, timeout, world=8)


def test_the_pipeline_and_groups_of_one_rank_have_the_lazy_backend(pool: Pool) -> None:
    pool.run(run_backends_of_axes, world=8)
