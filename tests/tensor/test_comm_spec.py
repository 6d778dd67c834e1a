"""Communication specs: what they cost, what they do forward and backward, and the cheapest way between two layouts."""

import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, GroupError, ShapeError
from tritoncomm.tensor.comm_spec import CollectiveCommPattern, CommSpec
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.path_search import shortest_path
from tritoncomm.tensor.sharding_spec import ShardingSpec
from tritoncomm.tensor.simulators import mix_gather_simulator

GATHER = CollectiveCommPattern.GATHER_FWD_SPLIT_BWD
SPLIT = CollectiveCommPattern.SPLIT_FWD_GATHER_BWD
ALL2ALL = CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD
ALLREDUCE = CollectiveCommPattern.ALLREDUCE_FWD_IDENTITY_BWD
IDENTITY = CollectiveCommPattern.IDENTITY_FWD_ALLREDUCE_BWD
MIX = CollectiveCommPattern.MIXGATHER_FWD_SPLIT_BWD


def grid(*shape: int, **options: Any) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)), shape, **options)


# ---- costs and names ----

REPLICA = ShardingSpec(grid(2, 2), (16, 8), {})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (GATHER, (65.1, 100, 165.1)),
        (SPLIT, (100, 65.1, 165.1)),
        (ALL2ALL, (33.001, 33.001, 66.002)),
        (ALLREDUCE, (129.01, 0, 129.01)),
        (IDENTITY, (0, 129.01, 129.01)),
    ],
    ids=str,
)
def test_costs(pattern: CollectiveCommPattern, expected: tuple[float, ...]) -> None:
    spec = CommSpec(pattern, REPLICA, 0, 1, 0)
    result = spec.get_comm_cost()
    assert list(result) == ["forward", "backward", "total"]
    assert tuple(result.values()) == expected
    forward = CommSpec(pattern, REPLICA, 0, 1, 0, forward_only=True).get_comm_cost()
    assert tuple(forward.values()) == (expected[0], 0, expected[0])
    free = CommSpec(pattern, REPLICA, 0, 1, 0, shard_cost=0).get_comm_cost()
    assert tuple(free.values())[:2] == tuple(0 if cost == 100 else cost for cost in expected[:2])


def test_costs_count_the_elements_a_rank_holds() -> None:
    mesh = grid(2, 2, mesh_alpha=[1, 3], mesh_beta=[2, 5])
    sharded = ShardingSpec(mesh, (20, 10), {0: [0]})
    assert CommSpec(GATHER, sharded, 0, 0, 1).get_comm_cost()["forward"] == 253.1
    assert CommSpec(ALL2ALL, sharded, 0, 1, 0).get_comm_cost()["forward"] == 51.001
    assert CommSpec(ALLREDUCE, sharded, logical_process_axis=[0, 1]).get_comm_cost()["forward"] == 753.01
    assert CommSpec(ALLREDUCE, REPLICA, logical_process_axis=[0, 1]).get_comm_cost()["total"] == 193.01
    mixed = CommSpec(MIX, sharded, [0], None, [1, 1], mix_gather=True).get_comm_cost()
    assert mixed == {"forward": 3 + 2 * 3 / 4 * 100 + 0.1, "backward": 100, "total": 3 + 2 * 3 / 4 * 100 + 0.1 + 100}


def test_reprs() -> None:
    context = {
        GATHER: "GATHER_FWD_SPLIT_BWD, gather_dim:1, shard_dim:1, logical_process_axis:0",
        SPLIT: "SPLIT_FWD_GATHER_BWD, gather_dim:1, shard_dim:1, logical_process_axis:0",
        ALL2ALL: "ALL2ALL_FWD_ALL2ALL_BWD, gather_dim:1, shard_dim:1, logical_process_axis: 0",
        ALLREDUCE: "ALLREDUCE_FWD_IDENTITY_BWD, logical_process_axis:0",
        IDENTITY: "IDENTITY_FWD_ALLREDUCE_BWD, logical_process_axis:0",
    }
    for pattern, text in context.items():
        assert repr(CommSpec(pattern, REPLICA, 1, 1, 0)) == f"CommSpec:(comm_pattern:{text})"
    assert repr(CommSpec(GATHER, REPLICA, 1, None, 0)) == repr(CommSpec(GATHER, REPLICA, 1, 1, 0))
    assert repr(CommSpec(SPLIT, REPLICA, None, 1, 0)) == repr(CommSpec(SPLIT, REPLICA, 1, 1, 0))
    mixed = CommSpec(MIX, REPLICA, [1, 0], None, [1, 0], mix_gather=True)
    assert (
        repr(mixed) == "CommSpec:(comm_pattern:MIXGATHER_FWD_SPLIT_BWD, gather_dim:[1, 0], logical_process_axes:[1, 0])"
    )


class Foreign(enum.Enum):
    GATHER = "gather_fwd_split_bwd"
    OTHER = "other"


def test_arguments() -> None:
    assert CommSpec(Foreign.GATHER, REPLICA).comm_pattern is GATHER
    assert CommSpec("all_reduce_fwd_identity_bwd", REPLICA).comm_pattern is ALLREDUCE
    assert CommSpec(ALLREDUCE, REPLICA, logical_process_axis=[0, 1]).device_mesh.mesh_shape == (4,)
    assert CommSpec(ALLREDUCE, REPLICA, logical_process_axis=[0, 1]).logical_process_axis == 0
    mixed = CommSpec(MIX, REPLICA, [1, 0], None, [1, 0], mix_gather=True)
    assert mixed.device_mesh is REPLICA.device_mesh.flatten_device_mesh
    assert mixed.logical_process_axes == [1, 0]
    cube = ShardingSpec(grid(2, 2, 2), (8, 8), {})
    for error, arguments in (
        (ArgumentError, (Foreign.OTHER, REPLICA)),
        (ArgumentError, (None, REPLICA)),
        (ArgumentError, (MIX, REPLICA, 0, None, [0, 1])),
        (ArgumentError, (MIX, REPLICA, [0, 1], None, 0)),
        (ArgumentError, (GATHER, REPLICA, 0, 0, [0, 1], False, True)),
        (ShapeError, (MIX, cube, [0, 1], None, [0, 1])),
        (ShapeError, (MIX, REPLICA, [0, 1], None, [0, 2])),
        (ShapeError, (MIX, REPLICA, [0, 1], None, [1, 1])),
        (ShapeError, (MIX, REPLICA, [0], None, [1, 0])),
        (ShapeError, (GATHER, REPLICA, 0, 0, [0, 0])),
        (ShapeError, (GATHER, REPLICA, 0, 0, [2])),
    ):
        with pytest.raises(error):
            CommSpec(*arguments)
    with pytest.raises(ArgumentError):
        CommSpec(GATHER, REPLICA, 0).get_comm_cost()
    with pytest.raises(GroupError):
        CommSpec(GATHER, REPLICA, 0, 0, 0).covert_spec_to_action(torch.ones(2, 2))


# ---- what they do ----


def values(shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.randint(-50, 50, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def shard_of(full: Tensor, spec: ShardingSpec, rank: int) -> Tensor:
    """What a rank holds under a sharding spec."""
    mesh = spec.device_mesh
    at = mesh.global_rank_to_logical_rank(rank)
    for dim, axes in spec.dim_partition_dict.items():
        for axis in axes:
            full = full.chunk(mesh.mesh_shape[axis], dim)[at[axis]]
    return full.clone()


def same(result: Tensor | None, expected: Tensor, *what: Any) -> None:
    assert result is not None, what
    assert result.shape == expected.shape, (what, result.shape, expected.shape)
    assert torch.equal(result, expected), (what, result, expected)


def there_and_back(
    before: ShardingSpec, after: ShardingSpec, action: Any, what: Any, shape: tuple[int, ...], strided: bool = False
) -> None:
    """Forward: the shard under ``before`` to the one under ``after``; backward: the reverse for the gradient."""
    me, full, gradient = dist.get_rank(), values(shape), values(shape, 1)
    x = shard_of(full, before, me)
    if strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    kept, given = x.clone(), shard_of(gradient, after, me)
    same(action(x), shard_of(full, after, me), what, "without gradients")
    x.requires_grad_()
    y = action(x)
    same(y, shard_of(full, after, me), what)
    y.backward(given)
    same(x.grad, shard_of(gradient, before, me), what, "gradient")
    assert x.grad is not None
    x.grad.zero_()
    same(given, shard_of(gradient, after, me), what, "the caller's gradient")
    same(x.detach(), kept, what, "the caller's tensor")
    doubled = action((again := kept.clone().requires_grad_()) * 2)
    (doubled * given).sum().backward()
    assert again.grad is not None
    same(again.grad, 2 * shard_of(gradient, before, me), what, "expanded")


def mesh_over(group: ProcessGroup, shape: tuple[int, ...], order: Sequence[int] | None = None) -> DeviceMesh:
    ranks = dist.get_process_group_ranks(group)
    return DeviceMesh(ranks if order is None else [ranks[at] for at in order], shape, init_process_group=True)


def axes_of(mesh: DeviceMesh) -> list[list[int]]:
    """Every axis, and every list of two axes or more, in any order."""
    ndim = len(mesh.mesh_shape)
    return [list(axes) for count in range(1, ndim + 1) for axes in itertools.permutations(range(ndim), count)]


@pytest.mark.parametrize(
    ("group", "shape", "order"),
    [
        (2, (2,), None), (4, (4, 1), None), (4, (2, 2), (0, 2, 1, 3)), (8, (2, 2, 2), None),
        pytest.param(2, (2, 1), None, marks=pytest.mark.slow), pytest.param(4, (2, 2), None, marks=pytest.mark.slow),
        pytest.param(8, (2, 4), None, marks=pytest.mark.slow),
    ],
    indirect=["group"],
    ids=str,
)  # fmt: skip
def test_gather_split_exchange(group: ProcessGroup, shape: tuple[int, ...], order: Sequence[int] | None) -> None:
    mesh, size = mesh_over(group, shape, order), (16, 8, 8)
    full = ShardingSpec(mesh, size, {})
    step = 1 if group.size() < 8 else 2
    for at, (axes, dim) in list(enumerate(itertools.product(axes_of(mesh), (0, 1, -1))))[::step]:
        strided = at // step % 2 == 1
        axis: Any = axes if len(axes) > 1 else axes[0]
        sharded = ShardingSpec(mesh, size, {dim: axes})
        what = (shape, axes, dim, strided)
        gather = CommSpec(GATHER, sharded, dim, dim % 3, axis)
        there_and_back(sharded, full, gather.covert_spec_to_action, what, size, strided)
        split = CommSpec(SPLIT, full, dim, dim, axis)
        there_and_back(full, sharded, split.convert_spec_to_action, what, size, strided)
        for other in sorted({0, 1, -1} - {dim}):
            after = ShardingSpec(mesh, size, {other: axes})
            exchange = CommSpec(ALL2ALL, sharded, dim, other, axis)
            there_and_back(sharded, after, exchange.covert_spec_to_action, (*what, other), size, strided)
    for dim in (0, 2):
        sharded = ShardingSpec(mesh, size, {dim: [0]})
        for spec in (CommSpec(GATHER, sharded, dim, None, 0), CommSpec(GATHER, sharded, None, dim, 0)):
            there_and_back(sharded, full, spec.covert_spec_to_action, "one dim left out", size)
        for spec in (CommSpec(SPLIT, full, dim, None, 0), CommSpec(SPLIT, full, None, dim, 0)):
            there_and_back(full, sharded, spec.covert_spec_to_action, "one dim left out", size)


@pytest.mark.parametrize(
    ("group", "shape"),
    [(2, (2,)), (4, (2, 2)), (4, (1, 4)), pytest.param(8, (2, 4), marks=pytest.mark.slow), (8, (2, 2, 2))],
    indirect=["group"],
    ids=str,
)
def test_sums(group: ProcessGroup, shape: tuple[int, ...]) -> None:
    mesh, me = mesh_over(group, shape), dist.get_rank()
    full = ShardingSpec(mesh, (4, 6), {})
    held = {rank: values((4, 6), rank) for rank in mesh.convert_map}
    for axes, strided in itertools.product(axes_of(mesh), (False, True)):
        at = mesh.global_rank_to_logical_rank(me)
        line = [
            r
            for r, place in mesh.convert_map.items()
            if all(place[a] == at[a] for a in range(len(at)) if a not in axes)
        ]
        total = torch.stack([held[rank] for rank in line]).sum(0)
        axis: Any = axes if len(axes) > 1 else axes[0]
        for pattern, expected, back in ((ALLREDUCE, total, held[me]), (IDENTITY, held[me], total)):
            spec = CommSpec(pattern, full, logical_process_axis=axis)
            x, given = held[me].clone(), held[me].clone()
            if strided:
                x, given = x.t().contiguous().t(), given.t().contiguous().t()
            y = spec.covert_spec_to_action(x)
            same(y, expected)
            assert (y is x) == (pattern is ALLREDUCE and len(line) == 1)
            assert (y.data_ptr() == x.data_ptr()) == (pattern is IDENTITY or len(line) == 1)
            x.requires_grad_()
            y = spec.covert_spec_to_action(x)
            same(y, expected)
            y.backward(given)
            same(x.grad, back)
            assert x.grad is not None
            x.grad.zero_()
            same(given, held[me])
            same(x.detach(), held[me])


@pytest.mark.parametrize(
    ("group", "shape", "order"),
    [
        (4, (1, 4), None),
        (4, (2, 2), (0, 2, 1, 3)),
        (8, (2, 4), None),
        pytest.param(4, (2, 2), None, marks=pytest.mark.slow),
        pytest.param(8, (4, 2), None, marks=pytest.mark.slow),
    ],
    indirect=["group"],
    ids=str,
)
def test_mixed_gathers(group: ProcessGroup, shape: tuple[int, ...], order: Sequence[int] | None) -> None:
    mesh, size = mesh_over(group, shape, order), (16, 8, 8)
    full = ShardingSpec(mesh, size, {})
    pairs = [([0], [1]), ([1], [0]), ([0, 1], []), ([], [0, 1]), ([1, 0], []), ([], [1, 0])]
    for at, ((f, b), (front, behind)) in enumerate(itertools.product(((0, 1), (0, 2), (1, 2)), pairs)):
        strided = at % 2 == 1
        sharded = ShardingSpec(mesh, size, {f: front, b: behind})
        gather_dim, axes = mix_gather_simulator((f, front), (b, behind))
        spec = CommSpec(MIX, sharded, gather_dim, None, axes, mix_gather=True)
        there_and_back(sharded, full, spec.covert_spec_to_action, (f, b, front, behind), size, strided)


@pytest.mark.ranks(1, 2)
def test_an_axis_of_one_rank(group: ProcessGroup) -> None:
    """A gather and an all-to-all give new contiguous tensors; under no_grad what is handed back has no graph."""
    mesh = mesh_over(group, (group.size(), 1))
    full = ShardingSpec(mesh, (4, 6), {})
    new = [CommSpec(GATHER, full, 1, 1, 1), CommSpec(ALL2ALL, full, 0, 1, 1)]
    same_memory = [CommSpec(SPLIT, full, 1, 1, 1), CommSpec(ALLREDUCE, full, logical_process_axis=1)]
    if group.size() == 1:
        both = ShardingSpec(mesh, (4, 6), {0: [0], 1: [1]})
        new += [CommSpec(MIX, both, [1, 0], None, [1, 0]), CommSpec(MIX, both, [0], None, [1, 1])]
    for strided, graded, off in itertools.product((False, True), repeat=3):
        x = values((6, 4)).t() if strided else values((4, 6))
        x.requires_grad_(graded)
        with torch.set_grad_enabled(not off):
            for spec in new:
                y = spec.covert_spec_to_action(x)
                same(y, x)
                assert y.is_contiguous(), spec
                assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), spec
                assert y.requires_grad == (graded and not off), spec
                if y.requires_grad:
                    (grad,) = torch.autograd.grad(y, x, given := values((4, 6), 2))
                    same(grad, given)
            for spec in same_memory:
                y = spec.covert_spec_to_action(x)
                same(y, x)
                assert y.requires_grad == (graded and not off), spec
                assert y.data_ptr() == x.data_ptr(), spec
                assert (y is x) or graded, spec
            path = shortest_path(full, full)
            assert not path.steps
            assert path.run(x).requires_grad == (graded and not off)
            assert (path.run(x) is x) == (not (graded and off))


@pytest.mark.ranks(4)
def test_second_derivatives(group: ProcessGroup) -> None:
    mesh = mesh_over(group, (2, 2))
    sharded, full = ShardingSpec(mesh, (4, 4), {0: [0], 1: [1]}), ShardingSpec(mesh, (4, 4), {})
    for spec in (
        CommSpec(GATHER, sharded, 0, 0, 0),
        CommSpec(SPLIT, full, 1, 1, 1),
        CommSpec(ALL2ALL, sharded, 0, 1, [0, 1]),
        CommSpec(ALLREDUCE, full, logical_process_axis=1),
        CommSpec(IDENTITY, full, logical_process_axis=0),
        CommSpec(MIX, sharded, [1, 0], None, [1, 0], mix_gather=True),
    ):
        x = values((4, 4), dist.get_rank()).requires_grad_()
        v = values(spec.covert_spec_to_action(x).shape, 9).requires_grad_()
        (grad,) = torch.autograd.grad(spec.covert_spec_to_action(x), x, v, create_graph=True)
        u = values((4, 4), 17 + dist.get_rank())
        (back,) = torch.autograd.grad(grad, v, u)
        same(back, spec.covert_spec_to_action(u), spec)


@pytest.mark.ranks(4)
def test_refused_before_anything_is_sent(group: ProcessGroup) -> None:
    mesh = mesh_over(group, (2, 2))
    full, x = ShardingSpec(mesh, (4, 4), {}), torch.ones(3, 3)
    for spec in (
        CommSpec(SPLIT, full, 0, 0, 0),
        CommSpec(SPLIT, full, 1, 1, [0, 1]),
        CommSpec(ALL2ALL, full, 0, 1, 1),
        CommSpec(GATHER, full, 2, 2, 0),
        CommSpec(GATHER, full, 0, 0, 2),
        CommSpec(MIX, full, [2], None, [1, 1], mix_gather=True),
    ):
        with pytest.raises(ShapeError):
            spec.covert_spec_to_action(x)
    for spec in (
        CommSpec(GATHER, full, None, None, 0),
        CommSpec(ALL2ALL, full, 0, None, 0),
        CommSpec(GATHER, full, 0),
    ):
        with pytest.raises(ArgumentError):
            spec.covert_spec_to_action(x)
    crossed = CommSpec(GATHER, full, 0, 1, 0)
    assert crossed.covert_spec_to_action(x).shape == (6, 3)
    with pytest.raises(ShapeError):
        crossed.covert_spec_to_action(x.requires_grad_())
    mixed = CommSpec(MIX, ShardingSpec(mesh, (8, 4), {0: [0, 1]}), [1], None, [1, 1]).covert_spec_to_action
    assert mixed(torch.ones(2, 4)).shape == (2, 16)
    part = DeviceMesh(dist.get_process_group_ranks(group)[:2], (2,), init_process_group=True)
    outside = CommSpec(GATHER, ShardingSpec(part, (4, 4), {}), 0, 0, 0).covert_spec_to_action(torch.ones(2, 2))
    assert (outside is None) == (dist.get_rank() > 1)


# ---- the cheapest way ----

Layout = tuple[tuple[int, ...], ...]


def all_layouts(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[Layout]:
    """Every assignment of axes to dims, in any order, that divides evenly."""
    result: set[Layout] = set()
    for count in range(len(mesh_shape) + 1):
        for axes in itertools.permutations(range(len(mesh_shape)), count):
            for dims in itertools.product(range(len(shape)), repeat=count):
                layout = tuple(
                    tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in range(len(shape))
                )
                parts = [math.prod(mesh_shape[axis] for axis in sharded) for sharded in layout]
                if all(size % part == 0 for size, part in zip(shape, parts, strict=True)):
                    result.add(layout)
    return sorted(result)


def step_cost(mesh: DeviceMesh, shape: tuple[int, ...], here: Layout, there: Layout, shard: float) -> float:
    """What one collective between two layouts costs, by the formulas; infinite where one is not enough."""
    sizes, costs = mesh.mesh_shape, [math.inf]
    held = math.prod(shape) / math.prod(sizes[axis] for axes in here for axis in axes)
    changed = [(a, b) for a, b in zip(here, there, strict=True) if a != b]
    shrunk = [a[len(b) :] for a, b in changed if a[: len(b)] == b]
    grown = [b[len(a) :] for a, b in changed if b[: len(a)] == a]

    def share(axes: Sequence[int]) -> tuple[float, float]:
        k = math.prod(sizes[axis] for axis in axes)
        return max(mesh.mesh_alpha[a] for a in axes), max(mesh.mesh_beta[a] for a in axes) * (k - 1) / k * held

    if len(changed) == 1 and shrunk + grown:
        alpha, moved_axes = share((shrunk + grown)[0])
        costs.append(alpha + moved_axes + 0.1 + shard)
    if len(changed) == 2 and len(shrunk) == len(grown) == 1 and shrunk == grown:
        alpha, moved_axes = share(shrunk[0])
        costs.append(2 * (alpha + moved_axes / 2 + 0.001))
    if len(sizes) == 2 and sum(map(len, here)) == 2 and not any(there):
        n = math.prod(sizes)
        costs.append(max(mesh.mesh_alpha) + min(mesh.mesh_beta) * (n - 1) / n * held + 0.1 + shard)
    return min(costs)


def all_costs(
    mesh: DeviceMesh, shape: tuple[int, ...], layouts: list[Layout], source: Layout, shard: float
) -> dict[Layout, float]:
    """Cheapest cost to every layout, relaxing every edge until nothing changes."""
    edges = {
        (a, b): cost
        for a, b in itertools.permutations(layouts, 2)
        if (cost := step_cost(mesh, shape, a, b, shard)) < math.inf
    }
    result = dict.fromkeys(layouts, math.inf) | {source: 0.0}
    while True:
        before = dict(result)
        for (a, b), cost in edges.items():
            result[b] = min(result[b], result[a] + cost)
        if result == before:
            return result


def spec_of(mesh: DeviceMesh, shape: tuple[int, ...], layout: Layout) -> ShardingSpec:
    return ShardingSpec(mesh, shape, {dim: list(axes) for dim, axes in enumerate(layout) if axes})


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (grid(4), (8, 8)),
        (grid(2, 2), (8, 4)),
        (grid(2, 2, mesh_alpha=[1, 30], mesh_beta=[5, 0.1]), (2, 64, 4)),
        (grid(2, 2, 2, mesh_alpha=[3, 2, 1], mesh_beta=[1, 2, 30]), (8, 4)),
        (grid(2, 1, 2, mesh_alpha=[1, 100, 2]), (16, 16)),
    ],
    ids=["4", "2x2", "2x2-uneven", "2x2x2", "2x1x2"],
)
@pytest.mark.parametrize("shard", [100, pytest.param(0, marks=pytest.mark.slow)])
def test_shortest_path_against_brute_force(mesh: DeviceMesh, shape: tuple[int, ...], shard: float) -> None:
    layouts = all_layouts(mesh.mesh_shape, shape)
    for source in layouts[:: max(1, len(layouts) // 4)]:
        expected = all_costs(mesh, shape, layouts, source, shard)
        for target in layouts[:: max(1, len(layouts) // 40)]:
            path = shortest_path(spec_of(mesh, shape, source), spec_of(mesh, shape, target), shard_cost=shard)
            assert path.cost == pytest.approx(expected[target]), (source, target, str(path))
            assert path.cost == pytest.approx(sum(step.get_comm_cost()["total"] for step in path.steps))
            assert len(path.layouts) == len(path.steps) + 1


def test_paths_print_and_refuse() -> None:
    mesh = grid(2, 2)
    source, target = ShardingSpec(mesh, (8, 4), {0: [0]}), ShardingSpec(mesh, (8, 4), {1: [0]})
    path = shortest_path(source, target)
    assert [step.comm_pattern for step in path.steps] == [ALL2ALL]
    assert path.cost == 2 * (1 + 16 / 4 + 0.001)
    header, row, total = str(path).splitlines()
    assert row.split() == ["S0,R", "R,S0", "ALL2ALL_FWD_ALL2ALL_BWD", "5.001", "5.001"]
    assert total.split() == ["total", "10.002"]
    assert len(header) == len(row) == len(total)
    assert shortest_path(source, target, forward_only=True).cost == 1 + 16 / 4 + 0.001
    assert str(shortest_path(source, source)) == "nothing to redistribute"
    mixed = shortest_path(ShardingSpec(mesh, (8, 4), {0: [0], 1: [1]}), ShardingSpec(mesh, (8, 4), {}))
    assert [step.comm_pattern for step in mixed.steps] == [MIX]
    with pytest.raises(ShapeError):
        path.run(torch.ones(8, 4))
    for other in (ShardingSpec(mesh, (4, 4), {}), ShardingSpec(grid(4), (8, 4), {})):
        with pytest.raises(ShapeError):
            shortest_path(source, other)


@pytest.mark.parametrize(
    ("group", "mesh_shape", "shape", "stride"),
    [
        (4, (2, 2), (4, 8), 2),
        (4, (2, 2), (4, 8), 7),
        pytest.param(8, (2, 2, 2), (8, 8, 4), 311, marks=pytest.mark.slow),
    ],
    indirect=["group"],
    ids=str,
)
def test_paths_run(group: ProcessGroup, mesh_shape: tuple[int, ...], shape: tuple[int, ...], stride: int) -> None:
    mesh = mesh_over(group, mesh_shape)
    layouts = all_layouts(mesh_shape, shape)
    for source, target in list(itertools.product(layouts, repeat=2))[::stride]:
        before, after = spec_of(mesh, shape, source), spec_of(mesh, shape, target)
        path = shortest_path(before, after, shard_cost=0 if stride % 2 else 100)
        assert [_layout_of(layout) for layout in (path.layouts[0], path.layouts[-1])] == [source, target]
        there_and_back(before, after, path.run, (source, target, str(path)), shape)


def _layout_of(spec: ShardingSpec) -> Layout:
    return tuple(tuple(each.shard_list) for each in spec.sharding_sequence)
