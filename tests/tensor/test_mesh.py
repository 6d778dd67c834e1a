"""Device meshes, sharding specs and the simulators: figures, groups, round trips."""

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Shard

from tritoncomm import record
from tritoncomm.errors import ArgumentError, CommError, GroupError, ShapeError
from tritoncomm.groups import check_ascending
from tritoncomm.tensor import ColoTensor
from tritoncomm.tensor import ProcessGroup as Groups
from tritoncomm.tensor.alpha_beta import measure_mesh
from tritoncomm.tensor.device_mesh import DeviceMesh, FlattenDeviceMesh
from tritoncomm.tensor.sharding_spec import (
    DuplicatedShardingDimensionError,
    ShardingNotDivisibleError,
    ShardingOutOfIndexError,
    ShardingSpec,
    _DimSpec,
)
from tritoncomm.tensor.simulators import (
    all_gather_simulator,
    all_to_all_simulator,
    convert_dim_partition_dict,
    merge_same_dim_mesh_list,
    mix_gather_simulator,
    shard_simulator,
)


def grid(*shape: int, **options: Any) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)), shape, **options)


# ---- costs ----


def test_costs_of_uneven_axes() -> None:
    mesh = grid(2, 2, mesh_alpha=[1, 3], mesh_beta=[2, 5])
    assert mesh.all_gather_cost(100, 1) == 253.1
    assert mesh.all_to_all_cost(100, 0) == 51.001
    assert mesh.flatten().all_reduce_cost(100, 0) == 753.01
    assert mesh.flatten_device_mesh.all_reduce_cost(100, 0) == 753.01
    assert (mesh.flatten_device_meshes.mesh_alpha, mesh.flatten_device_meshes.mesh_beta) == (3, 2)
    assert mesh.flatten_device_meshes.mix_gather_cost(100) == 3 + 2 * 3 / 4 * 100 + 0.1
    assert grid(2, 2).flatten_device_meshes.mix_gather_cost(100) == 76.1


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(0, 10**6),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_cost_formulas(shape: list[int], axis: int, size: int, alpha: float, beta: float) -> None:
    axis %= len(shape)
    k = shape[axis]
    alphas, betas = [7.0] * len(shape), [9.0] * len(shape)
    alphas[axis], betas[axis] = alpha, beta
    mesh = grid(*shape, mesh_alpha=alphas, mesh_beta=betas, need_flatten=False)
    share = beta * (k - 1) / k * size
    assert mesh.all_gather_cost(size, axis) == pytest.approx(alpha + share + 0.1)
    assert mesh.all_reduce_cost(size, axis) == pytest.approx(alpha + 2 * share + 0.01)
    assert mesh.reduce_scatter_cost(size, axis) == pytest.approx(alpha + share + 0.001)
    assert mesh.all_to_all_cost(size, axis) == pytest.approx(alpha + share / 2 + 0.001)


# ---- the grid ----


def test_coordinates_and_flattening() -> None:
    mesh = DeviceMesh(torch.arange(16).reshape(2, 8), (4, 4))
    assert mesh.convert_map[5] == [1, 1]
    assert mesh.global_rank_to_logical_rank(11) == [2, 3]
    assert mesh.shape == mesh.mesh_shape == (4, 4)
    assert mesh.num_devices == 16
    assert mesh.logical_mesh_id.tolist() == torch.arange(16).view(4, 4).tolist()
    assert mesh.flatten().mesh_shape == (16,)
    assert not hasattr(grid(4), "flatten_device_mesh")
    assert not hasattr(grid(2, 2, need_flatten=False), "flatten_device_mesh")
    flat = FlattenDeviceMesh(torch.arange(8), (2, 4))
    assert flat.process_number_dict == {0: [0, 4, 1, 5, 2, 6, 3, 7], 1: list(range(8))}
    assert flat.all_gather_cost(1024, 1) == 769.1
    given = DeviceMesh([0, 1, 2, 3], logical_mesh_id=[[3, 1], [0, 2]])
    assert given.mesh_shape == (2, 2)
    assert given.convert_map == {3: [0, 0], 1: [0, 1], 0: [1, 0], 2: [1, 1]}
    assert given.flatten().logical_mesh_id.tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (1, 2), (2, 1, 2), (1, 1), (1,), (2, 2, 1)], ids=str)
def test_axes_of_one(shape: tuple[int, ...]) -> None:
    mesh = grid(*shape)
    assert sorted(map(tuple, mesh.convert_map.values())) == list(itertools.product(*map(range, shape)))
    assert mesh.flatten().num_devices == math.prod(shape)
    for axis, size in enumerate(shape):
        assert mesh.all_gather_cost(8, axis) == 1 + (size - 1) / size * 8 + 0.1


def test_merged_axes() -> None:
    mesh = grid(2, 3, 4, mesh_alpha=[1, 2, 3], mesh_beta=[6, 5, 4])
    merged = mesh.merged([2, 0])
    assert merged.logical_mesh_id[:, 0].tolist() == [0, 12, 1, 13, 2, 14, 3, 15]
    assert (merged.mesh_alpha, merged.mesh_beta) == ((3, 3), (6, 6))
    assert mesh.merged([-1, 0]) is merged
    assert mesh.merged([0, 1, 2]) is mesh.flatten_device_mesh
    assert mesh.merged([2, 1, 0]).logical_mesh_id.tolist()[:4] == [0, 12, 4, 16]
    for wrong in ([], [0, 0], [0, -3], [3]):
        with pytest.raises(ShapeError):
            mesh.merged(wrong)


def test_meshes_refused() -> None:
    ids = torch.arange(4)
    for arguments in (
        (ids, (2, 3)),
        ([0, 1, 1, 2], (2, 2)),
        (ids, None, [[0, 1], [2, 4]]),
        (ids, (4,), [[0, 1], [2, 3]]),
        (ids, (2, 2), None, [1]),
        (ids, (2, 2), None, None, [1, 1, 1]),
    ):
        with pytest.raises(ShapeError):
            DeviceMesh(*arguments)
    with pytest.raises(GroupError):
        grid(2, 2).global_rank_to_logical_rank(4)
    with pytest.raises(GroupError):
        grid(2, 2).members(0)
    with pytest.raises(GroupError):
        grid(2, 2, init_process_group=True)
    with pytest.raises(GroupError):
        grid(2, 2).to_torch()


# ---- process groups ----


def wanted_lines(ids: torch.Tensor, axis: int) -> list[list[int]]:
    others = [range(size) for place, size in enumerate(ids.shape) if place != axis]
    lines = []
    for at in itertools.product(*others):
        index: list[Any] = list(at)
        index.insert(axis, slice(None))
        lines.append(ids[tuple(index)].tolist())
    return lines


@pytest.mark.parametrize(
    ("group", "shape", "ids"),
    [
        *((4, shape, None) for shape in [(2, 2), (4, 1), (1, 4), (2, 1, 2), (4,), (1, 2, 2)]),
        *((8, shape, None) for shape in [(2, 2, 2), (4, 2), (2, 4)]),
        (8, (2, 4), [0, 2, 4, 6, 1, 3, 5, 7]),
        (8, (2, 4), [0, 1, 4, 5, 2, 3, 6, 7]),
        ((2, 3), (2, 1), None),
        ((1, 3), (1, 2), [1, 3]),
    ],
    indirect=["group"],
    ids=str,
)
def test_groups_of_axes(group: ProcessGroup, shape: tuple[int, ...], ids: list[int] | None) -> None:
    me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    mesh = DeviceMesh(ranks if ids is None else ids, shape, init_process_group=True)
    again = DeviceMesh(ranks if ids is None else ids, shape, init_process_group=True)
    assert sorted(mesh.process_groups_dict) == list(range(len(shape)))
    for axis in range(len(shape)):
        entries = mesh.process_groups_dict[axis]
        assert [line for line, _ in entries] == wanted_lines(mesh.logical_mesh_id, axis)
        for (line, result), (_, same) in zip(entries, again.process_groups_dict[axis], strict=True):
            assert result is same
            if me not in line:
                assert result is dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert sorted(dist.get_process_group_ranks(result)) == sorted(line)
            members = mesh.members(axis - len(shape))
            assert members is not None
            assert members.group is result
            counted = dist.get_process_group_ranks(result)
            assert [counted[at] for at in members.order or range(len(line))] == line
            x = torch.tensor([float(me)])
            result.allreduce([x]).wait()
            assert x.item() == sum(line)
    with pytest.raises(ShapeError):
        mesh.members(len(shape))
    if len(shape) > 1:
        ((line, flat),) = mesh.flatten_device_mesh.process_groups_dict[0]
        assert line == mesh.logical_mesh_id.flatten().tolist()
        assert (flat is dist.group.WORLD) == (len(line) == dist.get_world_size())
    twin = copy.deepcopy(mesh)
    assert twin is not mesh
    assert twin.convert_map == mesh.convert_map
    assert twin.convert_map is not mesh.convert_map
    assert twin.process_groups_dict[0][0][1] is mesh.process_groups_dict[0][0][1]
    assert twin.members(0) is mesh.members(0)
    torch_mesh = mesh.to_torch()
    assert torch_mesh.mesh.tolist() == mesh.logical_mesh_id.tolist()
    back = DeviceMesh.from_torch(torch_mesh, mesh_alpha=[2] * len(shape))
    assert back.mesh_alpha == (2,) * len(shape)
    for axis in range(len(shape)):
        mine, restored = mesh.members(axis), back.members(axis)
        assert mine is not None
        assert restored is not None
        assert mine == restored
        assert mine.group is restored.group is torch_mesh.get_group(axis)


@pytest.mark.ranks(4)
def test_ranks_outside_a_mesh(group: ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    mesh = DeviceMesh(ranks[:2], (2, 1), init_process_group=True)
    inside = dist.get_rank() in ranks[:2]
    assert (mesh.members(0) is not None) == inside
    if not inside:
        with pytest.raises(GroupError):
            mesh.to_torch()


@pytest.mark.ranks(8)
def test_merged_axes_have_a_group(group: ProcessGroup) -> None:
    mesh = DeviceMesh(dist.get_process_group_ranks(group), (2, 2, 2), init_process_group=True)
    for axes in ([2, 1], [1, 2], [0, 2], [2, 0, 1]):
        members = mesh.merged(axes).members(0)
        assert members is not None
        x = torch.ones(1)
        members.group.allreduce([x]).wait()
        assert x.item() == 2 ** len(axes)


@st.composite
def permuted(draw: st.DrawFn) -> torch.Tensor:
    """Ranks in any order on a grid of up to three axes."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    first, step = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    ranks = [first + step * each for each in range(math.prod(shape))]
    return torch.tensor(draw(st.permutations(ranks)) if draw(st.booleans()) else ranks).view(shape)


@settings(deadline=None)
@given(permuted())
def test_a_mesh_is_refused_where_a_line_descends(ids: torch.Tensor) -> None:
    descends = any(line != sorted(line) for axis in range(ids.dim()) for line in wanted_lines(ids, axis))
    if not descends:
        return check_ascending(ids, "f")
    with pytest.raises(GroupError, match="f: the ranks") as caught:
        check_ascending(ids, "f", "the grid")
    assert str(ids.tolist()) in str(caught.value)
    assert str(torch.tensor(sorted(ids.flatten().tolist())).view(ids.shape).tolist()) in str(caught.value)
    return None


def refused(make: Any, ids: torch.Tensor, *what: Any) -> None:
    """``make`` raises before any group is made and anything sent."""
    made = len(c10d._world.pg_map)
    with record.recording() as counted, pytest.raises(GroupError, match="ascend") as caught:
        make()
    assert str(ids.tolist()) in str(caught.value), what
    assert not counted, what
    assert len(c10d._world.pg_map) == made, what


@pytest.mark.ranks(4)
def test_every_order_of_four_ranks(group: ProcessGroup) -> None:
    """Every order of four ranks: refused, or coordinates and ranks in the groups agree."""
    me = dist.get_rank()
    for order, shape in itertools.product(itertools.permutations(range(4)), ((4,), (2, 2), (1, 4))):
        ids = torch.tensor(order).view(shape)
        if any(line != sorted(line) for axis in range(ids.dim()) for line in wanted_lines(ids, axis)):
            refused(lambda ids=ids: DeviceMesh(ids, init_process_group=True), ids)
            assert DeviceMesh(ids).convert_map[order[1]] == [*[0] * (ids.dim() - 1), 1], "costs need no groups"
            continue
        mesh = DeviceMesh(ids, init_process_group=True)
        for axis, place in enumerate(mesh.global_rank_to_logical_rank(me)):
            members = mesh.members(axis)
            assert members is not None
            assert (members.order, members.group.rank()) == (None, place), (order, shape)
    merged = DeviceMesh(torch.arange(4), (2, 2), init_process_group=True).merged([1, 0])
    assert merged.members(0).order == (0, 2, 1, 3)  # type: ignore[union-attr]
    refused(merged.to_torch, merged.logical_mesh_id)
    assert measure_mesh(merged, small=8, large=64, repeats=1).members(0) == merged.members(0)


@pytest.mark.ranks(8)
def test_permuted_torch_meshes_are_refused_on_every_rank(group: ProcessGroup) -> None:
    import tritoncomm as tc

    tc.destroy()
    ids = torch.arange(8).view(4, 2)
    ids[1] = ids[1].flip(0)  # one line descends; the ranks of the others raise as well
    torch_mesh = TorchMesh("cpu", ids, mesh_dim_names=("dp", "tp"))
    line = TorchMesh("cpu", ids.flatten())
    refused(partial(tc.initialize, mesh=torch_mesh), ids)
    assert not tc.groups.is_initialized()
    for mesh, ranks in ((torch_mesh, ids), (torch_mesh["tp"], ids), (line, ids.flatten())):
        for make in (DeviceMesh.from_torch, Groups.from_device_mesh, Groups.over_device_mesh):
            refused(partial(make, mesh), ranks, make)
    for mesh, placements in ((line, [Shard(0)]), (torch_mesh, [Shard(0), Shard(1)])):
        tensor = DTensor.from_local(torch.ones(1, 2), mesh, placements, run_check=False)
        refused(partial(ColoTensor.from_dtensor, tensor), mesh.mesh)
    across = Groups.from_device_mesh(torch_mesh["dp"])  # along this axis all lines ascend
    assert across.tp_local_rank() == torch_mesh.get_local_rank("dp")


def test_lines_of_a_rank() -> None:
    mesh = DeviceMesh(torch.arange(16).reshape(2, 8), (4, 4))
    assert mesh.global_rank_to_process_groups_with_logical_rank(0) == {
        0: [[0, 0], [1, 0], [2, 0], [3, 0]],
        1: [[0, 0], [0, 1], [0, 2], [0, 3]],
    }
    assert mesh.global_rank_to_process_groups_with_global_rank(0) == {0: [0, 4, 8, 12], 1: [0, 1, 2, 3]}
    odd = DeviceMesh(torch.tensor([[[3, 9]], [[5, 20]], [[4, 1]]]))
    for rank, at in odd.convert_map.items():
        lines = odd.global_rank_to_process_groups_with_global_rank(rank)
        assert lines == {
            axis: odd.logical_mesh_id[(*at[:axis], slice(None), *at[axis + 1 :])].tolist() for axis in range(3)
        }
        assert odd.global_rank_to_process_groups_with_logical_rank(rank) == {
            axis: [odd.convert_map[each] for each in line] for axis, line in lines.items()
        }
        assert odd.global_rank_to_logical_rank(rank) == at, "the mesh's own coordinates are left alone"
    for method in (
        odd.global_rank_to_process_groups_with_global_rank,
        odd.global_rank_to_process_groups_with_logical_rank,
    ):
        with pytest.raises(GroupError):
            method(0)


@pytest.mark.ranks(8)
def test_over_from_torch_and_back(group: ProcessGroup) -> None:
    torch_mesh = TorchMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("data", "tensor"))
    mesh = DeviceMesh.from_torch(torch_mesh, mesh_beta=[1, 3])
    assert mesh.mesh_shape == (2, 4)
    assert mesh.mesh_beta == (1, 3)
    for axis, name in enumerate(("data", "tensor")):
        members = mesh.members(axis)
        assert members is not None
        assert members.group is torch_mesh.get_group(name)
        lines = [line for line, _ in mesh.process_groups_dict[axis]]
        assert lines == wanted_lines(torch_mesh.mesh, axis)
    back = mesh.to_torch("cpu", ("data", "tensor"))
    assert back == torch_mesh
    assert back.get_group("tensor") is torch_mesh.get_group("tensor")
    assert "axis1" in (mesh.to_torch().mesh_dim_names or ())


# ---- sharding specs ----


@pytest.mark.parametrize(
    ("source", "target", "cost"),
    [
        ("R", "R", 0), ("S01", "S01", 0), ("R", "S0", 5), ("S0", "R", 20), ("S0", "S1", 31), ("S1", "S0", 31),
        ("R", "S01", 16), ("S01", "R", 46), ("S1", "S01", 42), ("S01", "S1", 57), ("S0", "S01", 5), ("S01", "S0", 20),
    ],
)  # fmt: skip
def test_differences(source: str, target: str, cost: int) -> None:
    assert _DimSpec.named(source).difference(_DimSpec.named(target)) == cost
    mesh = grid(2, 2)
    one, other = (ShardingSpec(mesh, (8, 8), sharding_sequence=["R", name]) for name in (source, target))
    assert one.sharding_sequence_difference(other) == cost


def test_differences_add_up() -> None:
    mesh = grid(2, 2)
    one = ShardingSpec(mesh, (8, 8, 8), {0: [0], 1: [1]})
    other = ShardingSpec(mesh, (8, 8, 8), {2: [0, 1]})
    assert one.sharding_sequence_difference(other) == 20 + 20 + 16
    assert one.sharding_sequence_difference(one) == 0
    with pytest.raises(AssertionError):
        one.sharding_sequence_difference(ShardingSpec(mesh, (8, 8), {}))


def test_specs() -> None:
    mesh, context = grid(2, 4), {-1: [1], 1: [0]}
    spec = ShardingSpec(mesh, [8, 8, 8], context)
    assert context == {-1: [1], 1: [0]}
    assert spec.entire_shape == torch.Size([8, 8, 8])
    assert spec.dim_partition_dict == {1: [0], 2: [1]}
    assert str(spec.sharding_sequence) == "[R, S0, S1]"
    assert repr(spec) == "DistSpec:\n\tshard_sequence: R,S0,S1\n\tdevice_mesh_shape: (2, 4)"
    assert spec.get_sharded_shape_per_device() == torch.Size([8, 4, 2])
    assert ShardingSpec(mesh, (16, 8), {0: [0, 1]}).get_sharded_shape_per_device() == torch.Size([2, 8])
    assert str(ShardingSpec(mesh, (8, 8), {-1: [0], 1: [1]}).sharding_sequence) == "[R, S01]"
    assert ShardingSpec(mesh, (8, 8), {0: [0]}, ["S0", "R"]).dim_partition_dict == {0: [0]}
    assert _DimSpec([]).is_replica
    assert not _DimSpec([1]).is_replica
    assert _DimSpec([0, 1]) == _DimSpec.named("S01") != _DimSpec([1, 0])
    assert len({_DimSpec([0]), _DimSpec.named("S0"), _DimSpec([])}) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "kind"),
    [
        (((8, 8), {0: [0], 1: [0]}), DuplicatedShardingDimensionError, ValueError),
        (((8, 8), {0: [0], -2: [0]}), DuplicatedShardingDimensionError, ValueError),
        (((8, 8), {2: [0]}), ShardingOutOfIndexError, IndexError),
        (((8, 8), {-3: [0]}), ShardingOutOfIndexError, IndexError),
        (((8, 8), {0: [2]}), ShardingOutOfIndexError, IndexError),
        (((8, 8), None, ["R"]), ShardingOutOfIndexError, IndexError),
        (((6, 8), {0: [0, 1]}), ShardingNotDivisibleError, ValueError),
        (((8, 3), None, ["R", "S0"]), ShardingNotDivisibleError, ValueError),
        (((8, 8),), ArgumentError, TypeError),
        (((8, 8), None, ["R", "X0"]), ArgumentError, TypeError),
        (((8, 8), None, ["R", [0]]), ArgumentError, TypeError),
        (((8, 8), {0: [0]}, ["R", "S0"]), ShapeError, ValueError),
    ],
    ids=str,
)
def test_specs_refused(arguments: tuple[Any, ...], error: type[Exception], kind: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        ShardingSpec(grid(2, 2), *arguments)
    assert isinstance(caught.value, CommError)
    assert isinstance(caught.value, kind)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[int]]]:
    """A tensor's number of dims and axes by dim, all orders, some keys counted from the end."""
    ndim, axes = draw(st.integers(1, 4)), draw(st.permutations(range(3)))
    context: dict[int, list[int]] = {}
    for axis in axes[: draw(st.integers(0, 3))]:
        context.setdefault(draw(st.integers(0, ndim - 1)), []).append(axis)
    negative = draw(st.lists(st.booleans(), min_size=ndim, max_size=ndim))
    return (24,) * ndim, {dim - ndim if negative[dim] else dim: axes for dim, axes in context.items()}


@settings(deadline=None)
@given(layouts())
def test_dict_and_sequence_round_trip(layout: tuple[tuple[int, ...], dict[int, list[int]]]) -> None:
    shape, context = layout
    mesh, before = grid(2, 3, 4), copy.deepcopy(context)
    spec = ShardingSpec(mesh, shape, context)
    assert context == before
    assert spec.dim_partition_dict == {dim % len(shape): axes for dim, axes in before.items()}
    again = ShardingSpec(mesh, shape, sharding_sequence=spec.sharding_sequence)
    named = ShardingSpec(mesh, shape, sharding_sequence=[str(each) for each in spec.sharding_sequence])
    assert again.dim_partition_dict == named.dim_partition_dict == spec.dim_partition_dict
    assert again.sharding_sequence == named.sharding_sequence == spec.sharding_sequence
    sequence = list(spec.sharding_sequence)
    spec.convert_shard_sequence_to_dict()
    spec.convert_dict_to_shard_sequence()
    assert spec.sharding_sequence == sequence
    held = math.prod(spec.get_sharded_shape_per_device())
    used = [axis for axes in before.values() for axis in axes]
    assert held * math.prod((2, 3, 4)[axis] for axis in used) == math.prod(shape)


# ---- simulators ----


def test_negative_dims() -> None:
    context = {-1: [0], 0: [1]}
    converted = convert_dim_partition_dict(3, context)
    assert converted == {0: [1], 2: [0]}
    converted[2].append(9)
    assert convert_dim_partition_dict(4, {-1: [0], -2: [1], 0: [2]}) == {3: [0], 2: [1], 0: [2]}
    assert context == {-1: [0], 0: [1]}
    with pytest.raises(ShapeError):
        convert_dim_partition_dict(3, {-1: [0], 2: [1]})
    context = {1: [0], -1: [1], 0: [2]}
    assert merge_same_dim_mesh_list(2, context) == {1: [0, 1], 0: [2]}
    assert merge_same_dim_mesh_list(2, {-1: [1], 1: [0]}) == {1: [1, 0]}
    assert context == {1: [0], -1: [1], 0: [2]}


def test_simulators() -> None:
    front, behind, none = (0, [0]), (1, [1]), (2, [])
    assert all_gather_simulator((0, [0, 1])) == [0]
    assert all_gather_simulator(front) == all_gather_simulator(none) == []
    assert all_to_all_simulator(front, none) == ([], [0])
    assert all_to_all_simulator(front, behind) == ([0, 1], [])
    assert all_to_all_simulator(none, behind) == ([1], [])
    assert shard_simulator(none, [0, 1]) == [[0], [1]]
    assert shard_simulator(front, [1, 2]) == [[0, 1], [0, 2]]
    assert shard_simulator(behind, [0]) == []
    assert (front, behind, none) == ((0, [0]), (1, [1]), (2, []))


def test_mix_gather_simulator() -> None:
    assert mix_gather_simulator((0, [0]), (1, [1])) == ([1, 0], [1, 0])
    assert mix_gather_simulator((0, [1]), (1, [0])) == ([1, 0], [0, 1])
    assert mix_gather_simulator((0, [0, 1]), (1, [])) == ([0], [1, 1])
    assert mix_gather_simulator((0, []), (1, [0, 1])) == ([1], [1, 1])
    assert mix_gather_simulator((0, [1, 0]), (1, [])) == ([0], [0, 0])
    assert mix_gather_simulator((0, []), (1, [1, 0])) == ([1], [0, 0])
    for pairs in (((0, []), (1, [])), ((0, [0]), (1, [])), ((0, [0]), (1, [0])), ((0, [0, 1]), (1, [2]))):
        with pytest.raises(ShapeError):
            mix_gather_simulator(*pairs)


@pytest.mark.ranks(8)
def test_groups_are_made_by_their_members(group: ProcessGroup) -> None:
    """Processes make different groups, in different numbers, and then one together."""
    me = dist.get_rank()
    for ranks in ([1, 2, 5], [4, 6], [2, 5, 7], [4, 6, 7]):
        if me in ranks:
            pg = Groups(ranks=ranks, tp_degree=len(ranks))
            x = torch.tensor([float(me)])
            pg.tp_process_group().allreduce([x]).wait()
            assert x.item() == sum(ranks)
    mesh = DeviceMesh([0, 2, 4, 6, 1, 3, 5, 7], (2, 4), init_process_group=True)
    for axis in range(2):
        members = mesh.members(axis)
        assert members is not None
        x = torch.tensor([1.0])
        members.group.allreduce([x]).wait()
        assert x.item() == mesh.mesh_shape[axis]
    whole_job = dist.new_group(list(range(8)))  # the job's own count is the same everywhere
    x = torch.tensor([1.0])
    whole_job.allreduce([x]).wait()
    assert x.item() == 8
