"""ColoTensor: layouts, redistribution, operators, hooks, saving, DTensor."""

import copy
import io
import itertools
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from shards import layouts, ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import record
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.explain import explain
from tritoncomm.tensor import (
    ColoParameter,
    ColoParamOpHook,
    ColoParamOpHookManager,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistPlacementPattern,
    DistSpecManager,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    TensorType,
    convert_parameter,
)
from tritoncomm.tensor.dispatch import _warned
from tritoncomm.tensor.distspec import _DistSpec, uneven_sizes
from tritoncomm.tensor.gathered_view import ShardView
from tritoncomm.tensor.layout import LocalShard, plain
from tritoncomm.tensor.op_wrapper import _COLOSSAL_OPS, colo_op_impl
from tritoncomm.tensor.utils import full_state_dict, load_full_state_dict

DTYPES = ("float32", "bfloat16", "int64")
SHAPES = ((8,), (9,), (0, 3), (1, 3), (8, 4), (9, 7), (2, 5), (4, 8, 4), (5, 4, 6), (3, 4, 5, 2))


def values(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Tensor:
    made = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype))


def same(result: Tensor, expected: Tensor, *what: Any) -> None:
    result = plain(result) if isinstance(result, ColoTensor) else result
    assert result.shape == expected.shape, (what, result.shape, expected.shape)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected), (what, result, expected)


def run_transitions(group: TorchGroup, shape: tuple[int, ...], dtype: str) -> None:
    pg = ranks_of(group)
    rank, full, gradient = pg.tp_local_rank(), values(shape, dtype), values(shape, dtype, 1)
    for old, new in itertools.product(layouts(len(shape), group.size()), repeat=2):
        x = sharded(full, old, pg)
        x.requires_grad_(full.is_floating_point())
        y = x.redistribute(new)
        assert type(y) is ColoTensor
        assert y.dist_spec == new
        same(y, shard_of(full, new, rank), old, new)
        assert tuple(y.size()) == tuple(y.size_global()) == shape
        assert y.numel_global() == full.numel()
        assert tuple(y.size_local()) == tuple(y.shape)
        if full.is_floating_point():
            local = shard_of(gradient, new, rank)
            for each in (local, sharded(gradient, new, pg)):  # a hook may well make it a ColoTensor
                out = plain(x.redistribute(new))
                out.register_hook(lambda _, each=each: each)
                out.sum().backward()
                assert x.grad is not None
                same(x.grad, shard_of(gradient, old, rank), "gradient", old, new)
                x.grad = None
        same(DistSpecManager.handle_trans_spec(x, old, new, pg, shape), shard_of(full, new, rank), old, new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow), (1, 3)], ids=str)
def test_every_transition(pool: Pool, world: int | tuple[int, ...], dtype: str) -> None:
    for shape in SHAPES:
        pool.run(run_transitions, shape, dtype, world=world)


@pytest.mark.slow
def test_transitions_at_eight_ranks(pool: Pool) -> None:
    for shape in ((8, 16), (9, 7)):
        pool.run(run_transitions, shape, "float32", world=8)


@pytest.mark.ranks(2, 4)
def test_a_redistribution_moves_the_bytes_of_the_mapping_that_it_is(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    gathered, shards = ReplicaSpec(), [ShardSpec([dim], [world]) for dim in range(3)]
    for shape in ((4 * world, 8, world), (1, 4 * world, 2 * world), (world + 1, 2 * world - 1, 3)):
        for old, new in [*itertools.permutations(range(3), 2), (0, None), (1, None), (2, None)]:
            x = sharded(values(shape), shards[old], pg)
            with record.recording() as counted:
                x.redistribute(gathered if new is None else shards[new])
            sizes = uneven_sizes(shape[old], world)
            op, dims, given = "all_gather", (old,), {"sizes": sizes}
            if new is not None:
                op, dims, given = "all_to_all_dims", (new, old), {"sizes": uneven_sizes(shape[new], world)}
                given["out_sizes"] = sizes
            explained = explain(
                op, plain(x).shape, world, x.dtype, dims, "cpu", rank=pg.tp_local_rank(), **given
            ).forward  # fmt: skip
            moved = [sum(getattr(c, name) for c in counted.values()) for name in ("bytes_copied", "bytes_sent")]
            assert moved == [explained.bytes_copied, explained.bytes_sent], (shape, old, new, counted, explained)


@pytest.mark.ranks(2, 4)
def test_transitions_are_twice_differentiable(group: TorchGroup) -> None:
    pg = ranks_of(group)
    full, weight = values((8, 4)).double(), values((8, 4), seed=2).double()
    for old, new in itertools.product(layouts(2, group.size()), repeat=2):
        x = sharded(full, old, pg).requires_grad_()
        y = plain(x.redistribute(new))
        (grad,) = torch.autograd.grad(
            (y.pow(3) * shard_of(weight, new, pg.tp_local_rank())).sum(), x, create_graph=True
        )
        (second,) = torch.autograd.grad(grad.sum(), x)
        same(
            plain(second) if isinstance(second, ColoTensor) else second,
            shard_of(6 * full * weight, old, pg.tp_local_rank()),
        )


def test_over_other_ranks(group: TorchGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    here, alone = ranks_of(group), ProcessGroup(ranks=ranks, dp_degree=len(ranks))
    full = values((4, 4))
    x = sharded(full, ShardSpec([0], [2]), here)
    y = x.redistribute(ReplicaSpec(), alone)
    assert y.process_group == alone
    same(y, full)
    back = y.redistribute(ShardSpec([-1], [2]), here)
    same(back, shard_of(full, ShardSpec([1], [2]), here.tp_local_rank()))


def test_refusals_leave_the_group_usable(group: TorchGroup) -> None:
    pg = ranks_of(group)
    full = values((4, 4))
    replica = ColoTensor(full.clone(), ColoTensorSpec(pg))
    with pytest.raises(ShapeError, match="4 shards need 4 tensor-parallel ranks, not 2"):
        replica.redistribute(ShardSpec([0], [4]))
    with pytest.raises(ShapeError, match="no dim 2"):
        replica.redistribute(ShardSpec([2], [2]))
    with pytest.raises(ShapeError, match="dim 1 twice"):
        replica.redistribute(ShardSpec([1, -1], [1, 2]))
    with pytest.raises(ShapeError, match="is not a valid sharding"):
        ShardSpec([0, 0], [2, 2])
    with pytest.raises(AssertionError, match="list"):
        ShardSpec((0,), [2])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="2 dims, but 1"):
        ShardSpec([0, 1], [2])
    with pytest.raises(ShapeError, match="the local shard of"):
        ColoTensor(full.clone(), ColoTensorSpec(pg, ShardSpec([0], [2])), (4, 4))
    with pytest.raises(ArgumentError, match="dist spec"):
        DistSpecManager.handle_trans_spec(full, "r", ReplicaSpec(), pg)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="holds"):
        DistSpecManager.handle_trans_spec(full, ShardSpec([0], [2]), ReplicaSpec(), pg, (4, 4))
    with pytest.raises(AssertionError, match="has grad_fn"):
        (replica.requires_grad_() * 2).set_dist_spec(ShardSpec([0], [2]))
    with pytest.raises(AssertionError, match="not a dist spec"):
        replica.set_dist_spec("r")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="is invalid"):
        replica.set_process_group(None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="cannot change"):
        sharded(full, ShardSpec([0], [2]), pg).set_process_group(ProcessGroup(ranks=pg.ranks_in_group(), dp_degree=2))
    same(replica.redistribute(ShardSpec([0], [2])).to_replicate(), full)


def _registers(x: ColoTensor, spec: _DistSpec) -> bool:
    return x.redistribute(spec).requires_grad


def test_no_grad_nests_per_thread(group: TorchGroup) -> None:
    pg = ranks_of(group)
    x = ColoTensor(values((4, 4)), ColoTensorSpec(pg)).requires_grad_()
    shard = ShardSpec([0], [group.size()])
    with DistSpecManager.no_grad():
        with DistSpecManager.no_grad():
            assert not x.redistribute(shard).requires_grad
        assert not x.redistribute(shard).requires_grad, "an inner block must not switch it on again"
        assert (x * 2).requires_grad, "other operators are not touched"
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(_registers(x, shard)))
        thread.start()
        thread.join()
        assert seen == [True], "the switch belongs to one thread"
    assert x.redistribute(shard).requires_grad
    with pytest.raises(KeyError), DistSpecManager.no_grad():
        raise KeyError
    assert x.redistribute(shard).requires_grad, "an exception leaves the block too"


@pytest.mark.ranks(2, 4)
def test_methods(group: TorchGroup) -> None:
    pg = ranks_of(group)
    world = group.size()
    x = ColoTensor(values((8, 4)), ColoTensorSpec(pg, compute_attr=ComputeSpec(ComputePattern.TP1D)))
    assert x.has_initialized
    assert x.has_compute_spec()
    assert x.has_compute_pattern(ComputePattern.TP1D)
    assert not x.has_compute_pattern(ComputePattern.TP2D)
    assert not x.is_model_data()
    assert x.get_process_group() is pg
    assert (x.get_tp_world_size(), x.get_dp_world_size()) == (world, 1)
    assert x.is_replicate()
    assert not x.is_sharded()
    memory = x.data_ptr()
    x.set_tensor_spec(ShardSpec([-1], [world]), None)
    assert x.is_shard_1dcol()
    assert not x.is_shard_1drow()
    assert x.data_ptr() != memory
    assert (x.size(), x.size(1), x.size(-1), len(x), x.shape) == ((8, 4), 4, 4, 8, (8, 4 // world))
    assert (x.numel(), x.numel_global(), x.size_local(1), x.size_global(1)) == (32 // world, 32, 4 // world, 4)
    x.set_dist_spec(ShardSpec([0], [world]))
    assert x.is_shard_1drow()
    x.to_replicate_()
    same(x, values((8, 4)))
    assert "DistSpec(placement=DistPlacementPattern.REPLICATE)" in repr(x)
    assert "ComputeSpec(pattern=ComputePattern.TP1D, replicate_output=True)" in repr(x)
    nothing = ColoTensor(None, None)
    assert not nothing.has_initialized
    assert nothing.numel() == 0
    source = torch.ones(3, requires_grad=True)
    linked = ColoTensor.from_torch_tensor(source, ColoTensorSpec(pg))
    (linked * 2).sum().backward()
    assert source.grad is not None
    same(source.grad, torch.full((3,), 2.0))
    assert linked.data_ptr() == source.data_ptr()
    parameter = ColoParameter.from_torch_tensor(torch.ones(3), requires_grad=False, spec=ColoTensorSpec(pg))
    assert not parameter.requires_grad
    assert parameter.is_model_data()
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shared_param_modules == []
    assert parameter.redistribute(ShardSpec([0], [world])).requires_grad is False


@pytest.mark.ranks(2, 4)
def test_operators_keep_the_layout_true(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    full, other = values((8, 4)), values((8, 4), seed=3)
    rank = pg.tp_local_rank()
    row, column = ShardSpec([0], [world]), ShardSpec([1], [world])
    x, y = sharded(full, row, pg), sharded(other, row, pg)
    kept = [
        (lambda a, b: a * 2 + b, "several"),
        (lambda a, b: torch.where(a > b, a, b), "where"),
        (lambda a, b: nn.functional.gelu(a), "unary"),
        (lambda a, b: (a - b).abs_(), "in place"),
        (lambda a, b: a.to(torch.float64), "dtype"),
        (lambda a, b: torch.zeros_like(a), "like"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function, name in kept:
            out = function(x, y)
            assert isinstance(out, ColoTensor), name
            assert out.dist_spec == row, name
            same(out.to_replicate(), function(full, other), name)
    _warned.clear()
    gathered = [
        (lambda a, b: torch.topk(a, 2, 0).values, "topk"),
        (lambda a, b: a.cumsum(0), "cumsum"),
        (lambda a, b: torch.cat([a, b]), "cat along the sharded dim"),
        (lambda a, b: a.reshape(2, 16)[1:], "reshape that moves the sharded dim"),
        (lambda a, b: a[2:5], "index into the sharded dim"),
        (lambda a, b: a[a > 0], "index by a mask"),
        (lambda a, b: a.argmax(), "argmax of several dims"),
    ]
    for function, name in gathered:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = function(x, y)
        assert isinstance(out, ColoTensor), name
        assert out.is_replicate(), name
        same(out, function(full, other), name)
    _warned.clear()
    with pytest.warns(UserWarning, match="cumsum has no rule for these shards"):
        x.cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.cumsum(0)
    mixed = x + sharded(other, column, pg)
    assert mixed.dist_spec == row
    same(mixed.to_replicate(), full + other)
    x.add_(sharded(other, column, pg))
    assert x.dist_spec == row
    same(x, shard_of(full + other, row, rank))
    even = x + shard_of(other, row, rank)
    same(even.to_replicate(), full + 2 * other)
    with pytest.raises(UnsupportedError, match="has no rule for writing into a shard"):
        x.index_fill_(0, torch.tensor([0]), 1.0)
    x.copy_(full)
    same(x, shard_of(full, row, rank), "a global tensor into a shard")
    with pytest.raises(UnsupportedError, match="writes into a plain tensor"):
        full.add_(x)
    local = shard_of(full, row, rank).clone()  # a shard, as optimizers have them
    local[x > 3] = 1
    local.mul_(x)
    same(local, shard_of(torch.where(full > 3, 1, full) * full, row, rank))
    with pytest.raises(UnsupportedError, match="writes into a plain tensor"):
        (local.requires_grad_() * 1).mul_(x)
    replica = ColoTensor(full.clone(), ColoTensorSpec(pg))
    replica.index_fill_(0, torch.tensor([0]), 7.0)
    assert plain(replica)[0].eq(7).all()


def test_registered_operators_run(group: TorchGroup) -> None:
    pg = ranks_of(group)
    x = ColoTensor(torch.ones(2), ColoTensorSpec(pg))

    @colo_op_impl(torch.special.entr)
    def entr(input: Tensor) -> str:
        """Says that it was called."""
        return f"{type(input).__name__}"

    try:
        assert torch.special.entr(x) == "ColoTensor"
        assert entr(x) == "ColoTensor"
        assert entr.__name__ == "entr"
        assert torch.is_tensor(torch.special.entr(torch.ones(2)))
    finally:
        del _COLOSSAL_OPS[torch.special.entr]


def test_a_registered_operator_may_call_the_one_that_it_stands_for(group: TorchGroup) -> None:
    """It sees local tensors; what it returns gets the layout of the first ColoTensor, if the shape is its own."""
    pg = ranks_of(group)
    full = torch.arange(8.0).reshape(4, 2)
    x = ColoTensor(full.chunk(2)[group.rank()].clone(), ColoTensorSpec(pg, ShardSpec([0], [2])), full.shape)
    x.requires_grad_()

    @colo_op_impl(torch.special.entr)
    def entr(input: Tensor) -> Any:
        out = torch.special.entr(input)
        assert type(out) is Tensor
        return out, [out.sum(), (input * 2).t().t()]

    try:
        out, (total, twice) = torch.special.entr(x)
    finally:
        del _COLOSSAL_OPS[torch.special.entr]
    for each, expected in ((out, torch.special.entr(full)), (twice, full * 2)):
        assert each.dist_spec == x.dist_spec
        assert torch.equal(plain(each.to_replicate()), expected)
    assert type(total) is Tensor, "of another shape: nobody knows its layout"
    twice.sum().backward()
    assert torch.equal(plain(x.grad), torch.full((2, 2), 2.0))


class Tell(ColoParamOpHook):
    """Writes down what happens."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name, self.seen = name, seen

    def _tell(self, what: str, params: list[Tensor]) -> None:
        self.seen.append((f"{self.name}.{what}", len(params)))

    def pre_forward(self, params: list[Tensor]) -> None:
        self._tell("preF", params)

    def post_forward(self, params: list[Tensor]) -> None:
        self._tell("postF", params)

    def pre_backward(self, params: list[Tensor]) -> None:
        self._tell("preB", params)

    def post_backward(self, params: list[Tensor]) -> None:
        self._tell("postB", params)


def context(count: int, *whats: str) -> list[tuple[str, int]]:
    return [(f"{name}.{what}", count) for what in whats for name in "ab"]


def test_hooks(group: TorchGroup) -> None:
    pg = ranks_of(group)
    seen: list[Any] = []
    hooks = Tell("a", seen), Tell("b", seen)
    w = ColoParameter(torch.ones(3, 4), spec=ColoTensorSpec(pg))
    v = ColoParameter(torch.ones(3), spec=ColoTensorSpec(pg))
    x = torch.randn(2, 4)

    def during(function: Any) -> Any:
        seen.clear()
        with ColoParamOpHookManager.use_hooks(*hooks):
            return function()

    out = during(lambda: nn.functional.linear(x, w, v))
    assert seen == context(2, "preF", "postF")
    assert isinstance(out, ColoTensor)
    out.sum().backward()
    assert seen == context(2, "preF", "postF", "preB", "postB"), "backward runs the hooks of its forward"
    expected = torch.ones(3, 4, requires_grad=True)
    nn.functional.linear(x, expected, torch.ones(3)).sum().backward()
    assert w.grad is not None
    assert expected.grad is not None
    same(w.grad, expected.grad)
    during(lambda: torch.cat((w, w)))
    assert seen == context(2, "preF", "postF")
    during(lambda: torch.stack([w, [w][0]]).sum().backward())
    assert [name for name, _ in seen] == [n for n, _ in context(2, "preF", "postF", "preB", "postB")]
    with torch.no_grad():
        during(lambda: w * 2)
    assert seen == context(1, "preF", "postF")
    during(lambda: w.numel())
    assert seen == context(1, "preF", "postF")
    during(lambda: w.shape)
    assert seen == []
    with pytest.raises(RuntimeError, match="Found Dict"):
        during(lambda: nn.functional.normalize(w, out={"w": w}))  # type: ignore[arg-type]
    with ColoParamOpHookManager.use_hooks(hooks[0]):
        with pytest.raises(KeyError), ColoParamOpHookManager.use_hooks(hooks[1]):
            raise KeyError
        seen.clear()
        _ = w * 2
        assert seen == [("a.preF", 1), ("a.postF", 1)]
        with ColoParamOpHookManager.use_hooks():
            _ = w * 2
        assert len(seen) == 2
    seen.clear()
    _ = w * 2
    assert seen == []


def model(pg: ProcessGroup, spec: _DistSpec) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for layer in made:
        weight = ColoParameter(layer.weight.detach(), spec=ColoTensorSpec(pg))
        weight.set_dist_spec(spec)
        layer.weight = weight
    return made


def run_saving(group: TorchGroup, folder: str) -> None:
    pg, world = ranks_of(group), group.size()
    spec = ShardSpec([0], [world])
    torch.manual_seed(0)
    actual = model(pg, spec)
    replica = full_state_dict(actual)
    torch.manual_seed(0)
    for name, value in nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).state_dict().items():
        same(replica[name], value, name)
    buffer = io.BytesIO()
    torch.save(actual.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    for name, value in actual.state_dict().items():
        same(loaded[name], plain(value) if isinstance(value, ColoTensor) else value)
        if isinstance(value, ColoTensor):
            assert loaded[name].dist_spec == spec
            assert loaded[name].process_group == pg
            assert loaded[name].process_group.tp_process_group() is pg.tp_process_group()
    other = model(pg, ReplicaSpec())
    load_full_state_dict(other, replica)
    again = model(pg, ShardSpec([-1], [world]))
    load_full_state_dict(again, full_state_dict(other))
    for name, value in full_state_dict(again).items():
        same(value, replica[name])
    with pytest.raises(ValueError, match="missing"):
        load_full_state_dict(again, {})
    if pg.tp_local_rank() == 0:
        torch.save(replica, f"{folder}/{world}.pt")
    p = actual[0].weight
    shared = copy.deepcopy([p, p])
    assert shared[0] is shared[1]
    assert pickle.loads(pickle.dumps(spec)) == spec


def run_loading(group: TorchGroup, path: str) -> None:
    pg = ranks_of(group)
    actual = model(pg, ShardSpec([-1], [group.size()]))
    replica = torch.load(path)
    load_full_state_dict(actual, replica)
    for name, value in full_state_dict(actual).items():
        same(value, replica[name])


def test_saving_and_loading_across_world_sizes(pool: Pool, tmp_path: Any) -> None:
    for world in (2, 4):
        pool.run(run_saving, str(tmp_path), world=world)
    pool.run(run_loading, str(tmp_path / "2.pt"), world=4)
    pool.run(run_loading, str(tmp_path / "4.pt"), world=2)


@pytest.mark.ranks(2, (1, 3), 4)
def test_process_groups(group: TorchGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    reverse = ranks[::-1]
    pg = ProcessGroup(ranks=reverse, tp_degree=len(ranks))
    mine = dist.get_rank()
    assert reverse == ranks[::-1], "the caller's list is the caller's"
    assert pg.ranks_in_group() == ranks
    assert (pg.rank(), pg.world_size()) == (mine, len(ranks))
    assert pg.tp_rank_list() == pg.get_ranks_in_tp() == ranks
    assert pg.dp_rank_list() == pg.get_ranks_in_dp() == [mine]
    assert (pg.tp_local_rank(), pg.dp_local_rank()) == (ranks.index(mine), 0)
    assert pg.tp_process_group() is ProcessGroup(ranks=ranks, tp_degree=len(ranks)).tp_process_group()
    assert pg.dp_process_group().size() == 1
    assert pg == ProcessGroup(ranks=ranks, tp_degree=len(ranks)) != ProcessGroup(ranks=ranks)
    assert ProcessGroup(ranks=ranks, dp_degree=1).tp_world_size() == len(ranks)
    across = ProcessGroup(ranks=ranks)
    assert (across.dp_world_size(), across.tp_local_rank(), across.dp_local_rank()) == (
        len(ranks),
        0,
        ranks.index(mine),
    )
    with pytest.raises(TypeError, match="unhashable"):
        hash(pg)
    assert not pg.has_cpu_groups
    with pytest.raises(AssertionError):
        pg.cpu_tp_process_group()
    pg.set_cpu_groups()
    assert pg.has_cpu_groups
    assert pg.cpu_tp_process_group().size() == len(ranks)
    assert pg.cpu_dp_process_group().size() == 1
    assert repr(pg) == f"ProcessGroup(ranks={ranks},\n             rank={mine}, dp=1, tp={len(ranks)})"
    for arguments in ({"rank": mine + 1}, {"tp_degree": 3}, {"tp_degree": 3, "dp_degree": 3}):
        with pytest.raises(AssertionError):
            ProcessGroup(ranks=ranks, **arguments)
    mesh = pg.device_mesh()
    assert mesh.get_group() is pg.tp_process_group()
    assert ProcessGroup.from_device_mesh(mesh) == pg


def test_specs() -> None:
    assert repr(ShardSpec([0], [2])) == (
        "DistSpec(dims=(0,), num_partitions=(2,), placement=DistPlacementPattern.SHARD)"
    )
    assert ShardSpec([-1], [2]) != ShardSpec([1], [2])
    assert ShardSpec([1], [2]) == ShardSpec([1], [2])
    assert ReplicaSpec() != ShardSpec([], [])
    assert [p.value for p in DistPlacementPattern] == ["r", "s"]
    assert [p.value for p in ComputePattern] == [0, 1, 2, 3]
    assert [t.value for t in TensorType] == [0, 1]
    with pytest.raises(TypeError, match="unhashable"):
        hash(ReplicaSpec())
    spec = ComputeSpec(ComputePattern.TP1D)
    spec.set_output_replicate(False)
    assert repr(spec) == "ComputeSpec(pattern=ComputePattern.TP1D, replicate_output=False)"
    with pytest.raises(ArgumentError):
        ComputeSpec("tp1d")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LocalShard, ColoTensor, ColoParameter, ShardView])
def test_only_these_names_of_torch_are_replaced(kind: type) -> None:
    """torch has private names (``_is_view``) that are easily taken for an attribute of ours."""
    replaced = set(vars(kind)) & set(dir(torch.Tensor)) - {"__annotations__", "__doc__", "__module__"}
    special = {name for name in replaced if name.startswith("__")}
    assert replaced - special <= {"grad", "set_", "real", "imag", "detach", "_is_param"}


def test_a_parameter_is_converted(group: TorchGroup) -> None:
    layer = nn.Linear(2, 2, bias=False)
    convert_parameter(layer, "weight")
    assert isinstance(layer.weight, ColoTensor)
    layer.label, layer.strided = "text", torch.ones(2, 3).t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is in beta
        layer.sparse = torch.eye(2).to_sparse_csr()
    for name in ("missing", "label", "strided", "sparse"):
        with pytest.raises(ValueError, match=name):
            convert_parameter(layer, name)


def test_the_documented_table_is_the_code() -> None:
    from tritoncomm.tensor.redistribute import steps

    text = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| `Replicate()`", "| `Shard`"))]
    kinds: dict[str, tuple[Any, ...]] = {
        "`Replicate()`": ((),),
        "`Shard`, one dim": (((0, 4),), ((1, 4),)),
        "`Shard`, several dims": (((0, 2), (1, 2)), ((1, 2), (0, 2))),
    }
    assert [row.split("|")[1].strip() for row in rows] == list(kinds)
    for row, old in zip(rows, kinds, strict=True):
        for cell, new in zip(row.split("|")[2:-1], kinds, strict=True):
            documented = cell.strip().partition(" (")[0].replace("-", "_") if len(cell.strip()) > 1 else "-"
            result = {
                ", ".join(steps(a, b)) or "-"
                for a in kinds[old]
                for b in kinds[new]
                if a != b or old == "`Replicate()`"
            }
            assert result == {documented}, (old, new)
            for same in kinds[old] if old == new else ():
                assert steps(same, same) == ()
