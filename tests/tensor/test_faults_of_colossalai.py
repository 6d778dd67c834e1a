"""What the sharded tensor does right where the system it comes from does not: one test per item."""

import copy
import io
import itertools
import math
import operator
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import groups
from tritoncomm.errors import ArgumentError, CommError, GroupError, PeerError, ShapeError
from tritoncomm.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistSpecManager,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    dispatch,
    named_params_with_colotensor,
    redistribute,
    shard_parameters,
)
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec


def counted(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.ranks(4)
def test_specs_are_checked_against_the_group(group: TorchGroup) -> None:
    pg, full = ranks_of(group), counted(8, 8)
    for spec in (ShardSpec([0], [2]), ShardSpec([0], [8]), ShardSpec([0, 1], [2, 4]), ShardSpec([0, 1], [1, 2])):
        with pytest.raises(ShapeError, match="tensor-parallel ranks, not 4"):
            ColoTensor(full.clone(), ColoTensorSpec(pg, spec))
        with pytest.raises(ShapeError, match="tensor-parallel ranks, not 4"):
            ColoTensor(full.clone(), ColoTensorSpec(pg)).redistribute(spec)
        with pytest.raises(ShapeError, match="tensor-parallel ranks, not 4"):
            ColoTensor(full.clone(), ColoTensorSpec(pg)).set_dist_spec(spec)
    for spec in (ShardSpec([0], [4]), ShardSpec([0, 1], [2, 2]), ShardSpec([1, 0], [4, 1])):
        assert sharded(full, spec, pg).numel() == 16


@pytest.mark.ranks(1, 2)
def test_what_is_handed_back_under_no_grad_has_no_graph(group: TorchGroup) -> None:
    """Under no_grad a redistribution that moves nothing ends the graph as well; under the manager's it does not."""
    pg, world = ranks_of(group), group.size()
    on: list[Callable[[], Any]] = [DistSpecManager.no_grad, torch.enable_grad]
    modes: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode, *on]
    for spec, other in (
        (ReplicaSpec(), ReplicaSpec()), (ShardSpec([0], [world]), ShardSpec([0], [world])),
        (ShardSpec([-1], [world]), ShardSpec([1], [world])),
    ):  # fmt: skip
        for graded, mode, leaf in itertools.product((True, False), modes, (True, False)):
            local = shard_of(counted(4, 4).double(), spec, group.rank()).requires_grad_(graded)
            local = local if leaf else local * 1
            x = ColoTensor.from_torch_tensor(local, ColoTensorSpec(pg, spec))
            with mode():
                y = DistSpecManager.handle_trans_spec(local, spec, other, pg)
                z = x.redistribute(other)
                assert (y is local) == (not graded or mode in on), (mode, graded)
                for each in (y, z):
                    assert each.requires_grad == (graded and mode in on), (mode, graded, leaf)
                redistributed = mode is torch.enable_grad if x.partitions else mode in on
                assert x.to_replicate().requires_grad == (graded and redistributed), (mode, graded, leaf)
                assert plain(z).data_ptr() == y.data_ptr() == local.data_ptr()
    p = ColoParameter(torch.tensor([1.0, 2.0]), True, ColoTensorSpec(pg))
    with torch.no_grad():
        target = p.to_replicate()
    loss = ((p * 3 - target) ** 2).sum()
    loss.backward()
    assert p.grad is not None
    assert plain(p.grad).tolist() == [12.0, 24.0], "a target computed under no_grad is not trained"


def test_numbers_of_tensors_without_dims(group: TorchGroup) -> None:
    """A 0-dim tensor converts to a number as a torch tensor does."""
    spec = ColoTensorSpec(ranks_of(group))
    for number in (3, -2, 3.75, True):
        reference = torch.tensor(number)
        actual = ColoTensor(reference.clone(), spec)
        asked: list[Callable[[Any], Any]] = [
            int, float, bool, complex, operator.index, "{:.2f}".format, "{:>9}".format, "{}".format,
            lambda x: f"{x:e}", lambda x: list(range(9))[x], lambda x: [0] * x, lambda x: x.item(), math.trunc,
        ]  # fmt: skip
        for ask in asked:
            try:
                expected = ask(reference)
            except (TypeError, ValueError) as error:
                with pytest.raises(type(error)):
                    ask(actual)
                continue
            result = ask(actual)
            assert (type(result), result) == (type(expected), expected), (ask, number)
    one = ColoTensor(torch.tensor([5]), spec)
    assert (int(one), operator.index(one)) == (5, 5)
    with pytest.raises(TypeError, match="format"):
        f"{one:.2f}"
    assert f"{one}" == str(one)
    graded = ColoTensor(torch.tensor(2.5), spec).requires_grad_()
    assert f"{graded * 2:.1f} {int(graded)}" == "5.0 2"
    x = ColoTensor(torch.tensor([True, False]), spec)
    assert plain(~x).tolist() == [False, True]
    x &= False
    assert plain(x).tolist() == [False, False]


def test_the_repr_of_a_leaf_shows_requires_grad(group: TorchGroup) -> None:
    spec = ColoTensorSpec(ranks_of(group))
    p, x = ColoParameter(torch.ones(2), True, spec), ColoTensor(torch.ones(2), spec)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert repr(p).startswith("ColoParameter: tensor([1., 1.], requires_grad=True)\n"), mode
            assert repr(x).startswith("ColoTensor: tensor([1., 1.])\n"), mode
    assert "grad_fn" in repr(p * 2)
    assert p.requires_grad
    assert p.is_leaf
    assert p.grad is None


def test_an_operator_that_gathers_says_that_every_rank_calls(group: TorchGroup) -> None:
    """One rank gathers, the other does not: the error says that every rank has to."""
    pg, world = ranks_of(group), group.size()
    apart = groups.make_group("test", dist.get_process_group_ranks(group), "gloo")
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # until torch 2.14
    set_timeout(timedelta(milliseconds=300), apart)
    x = torch.arange(4.0)
    if group.rank() == 0:
        with pytest.raises(PeerError, match=r"(?s)over ranks \[0, 1\] failed.*iteration.*alone waits"):
            redistribute.redistribute(x, redistribute.Transition((4 * world,), ((0, world),), ()), apart)
    shard = sharded(counted(4, 2), ShardSpec([0], [world]), pg)
    dispatch._warned.clear()
    with pytest.warns(UserWarning, match="numpy has no rule .* every rank; a rank that calls it alone waits"):
        assert shard.numpy().tolist() == counted(4, 2).tolist()
    assert [plain(row).tolist() for row in shard] == counted(4, 2).tolist()


def test_a_result_of_the_graph_is_not_deepcopied(group: TorchGroup) -> None:
    pg = ranks_of(group)
    x = ColoTensor(counted(2, 2).double(), ColoTensorSpec(pg)).requires_grad_()
    for result in (x * 2, x.redistribute(ShardSpec([0], [group.size()]))):
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(result)
        twin = copy.deepcopy(result.detach())
        assert (twin.dist_spec, twin.requires_grad) == (result.dist_spec, False)
    with torch.no_grad():
        assert copy.deepcopy(x * 2).is_leaf
    assert copy.deepcopy(x).requires_grad


def test_before_initialize_the_error_says_what_to_call() -> None:
    pg = ProcessGroup()
    x, module = ColoTensor(torch.ones(2, 2), ColoTensorSpec(pg)), nn.Linear(2, 2)
    before = dict(module.named_parameters())
    spec = ShardSpec([0], [2])
    for ask in (
        pg.rank, pg.world_size, pg.ranks_in_group, pg.tp_world_size, pg.dp_world_size, pg.tp_rank_list, pg.dp_rank_list,
        pg.tp_local_rank, pg.dp_local_rank, pg.tp_process_group, pg.dp_process_group, pg.set_cpu_groups,
        pg.device_mesh, lambda: pg.has_cpu_groups, x.to_dtensor,
        lambda: x.set_dist_spec(spec), lambda: x.redistribute(spec), x.get_tp_world_size,
        lambda: ColoTensor(torch.ones(2), ColoTensorSpec(pg, spec)), lambda: ColoTensor(torch.ones(2), None).normal_(),
        lambda: nn.functional.dropout(x), lambda: nn.init.normal_(x), lambda: torch.rand_like(x),
        lambda: shard_parameters(module, {"weight": spec}), lambda: shard_parameters(module, {}),
        lambda: DeviceMesh(torch.arange(2), (2,), init_process_group=True),
    ):  # fmt: skip
        with pytest.raises(GroupError, match=r"call tritoncomm\.initialize\(\)"):
            ask()
    assert all(after is before[name] for name, after in module.named_parameters()), "nothing has been changed"
    x.to_replicate_()
    for same in (x.to_replicate(), x.redistribute(ReplicaSpec())):  # a replica that stays one needs no ranks
        assert torch.equal(plain(same), torch.ones(2, 2))
    assert repr(pg) == "ProcessGroup not initialized"
    assert pg == ProcessGroup() == copy.deepcopy(pg) == pickle.loads(pickle.dumps(pg)) == copy.copy(pg)
    assert not hasattr(pg, "_something_else")


def saved(x: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def test_copies_and_pickles_keep_requires_grad(group: TorchGroup) -> None:
    pg, spec = ranks_of(group), ShardSpec([0], [group.size()])
    for needs in (True, False):
        x = sharded(counted(4, 2), spec, pg).requires_grad_(needs)
        p = ColoParameter(counted(2, 2), needs, ColoTensorSpec(pg, spec, ComputeSpec(ComputePattern.TP1D)))
        for original in (x, p):
            copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original)), saved(original)]
            for twin in copies:
                assert type(twin) is type(original)
                assert twin.requires_grad is needs
                assert twin.is_leaf
                assert (twin.dist_spec, twin.process_group) == (original.dist_spec, original.process_group)
                assert twin.has_compute_pattern(ComputePattern.TP1D) is (original is p)
                assert (tuple(twin.size()), twin.is_model_data()) == (tuple(original.size()), original is p)
                assert twin.data_ptr() != original.data_ptr()
                assert torch.equal(plain(twin), plain(original))
                assert torch.equal(plain(twin.to_replicate()), plain(original.to_replicate()))
    module = nn.Module()
    module.weight = ColoParameter(counted(2, 2), spec=ColoTensorSpec(pg, spec))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert [name for name, _ in twin.named_parameters()] == ["weight"]
        assert type(twin.weight) is ColoParameter
        assert twin.weight.requires_grad


def test_from_torch_tensor_honours_requires_grad(group: TorchGroup) -> None:
    spec = ColoTensorSpec(ranks_of(group))
    for needs in (True, False):
        leaf = torch.ones(3).requires_grad_(needs)
        assert ColoTensor.from_torch_tensor(leaf, spec).requires_grad is needs
        for source in (leaf, leaf * 2, ColoTensor.from_torch_tensor(leaf, spec)):
            for expected in (True, False):
                made = ColoParameter.from_torch_tensor(source, expected, spec)
                assert (type(made), made.requires_grad, made.is_leaf) == (ColoParameter, expected, True)
            assert ColoParameter.from_torch_tensor(source, spec=spec).requires_grad


def test_named_params_honour_prefix_and_recurse(group: TorchGroup) -> None:
    spec = ColoTensorSpec(ranks_of(group))
    inner = nn.Linear(2, 2)
    inner.plain_one = ColoTensor(torch.ones(1), spec)
    outer = nn.Module()
    outer.inner, outer.own = inner, ColoTensor(torch.ones(1), spec)
    outer.scale = nn.Parameter(torch.ones(1))
    named = dict(named_params_with_colotensor(outer, "pre", recurse=True))
    assert sorted(named) == ["pre.inner.bias", "pre.inner.plain_one", "pre.inner.weight", "pre.own", "pre.scale"]
    assert named["pre.inner.plain_one"] is inner.plain_one
    assert sorted(name for name, _ in named_params_with_colotensor(outer, "pre", recurse=False)) == [
        "pre.own",
        "pre.scale",
    ]
    assert sorted(name for name, _ in named_params_with_colotensor(outer, recurse=False)) == ["own", "scale"]


def test_damaged_files(group: TorchGroup) -> None:
    """What ``torch.load`` rebuilds from a file that nobody vouches for is a tensor, or an error by name."""
    x = ColoTensor(torch.ones(2, 4), ColoTensorSpec(ranks_of(group), ShardSpec([0], [2])), (4, 4))
    function, (name, data, flag, state) = x.__reduce_ex__(2)
    assert torch.equal(plain(function(name, data, flag, state)), plain(x))
    for at, odd in ((0, "Other"), (0, []), (1, 3), (2, 1), (3, ()), (3, None)):
        with pytest.raises(ArgumentError, match="damaged"):
            function(*((name, data, flag, state)[:at]), odd, *((name, data, flag, state)[at + 1 :]))
    empty = _DistSpec.__new__(_DistSpec)
    for at, odd in ((0, 3), (1, None), (1, empty), (2, 1.5), (3, ("4", 4)), (3, 7), (4, 1)):
        with pytest.raises(ArgumentError, match="damaged"):
            function(name, data, flag, (*state[:at], odd, *state[at + 1 :]))
    for shape in ((4, 5), (-1, 4), (8, 4), ()):
        with pytest.raises(CommError):
            function(name, data, flag, (*state[:3], shape, *state[4:]))
    with pytest.raises(ArgumentError, match="requires grad"):
        function(name, data.long(), True, state)
    wrong = ([], 0, 0), ([0], 2, 1), ([0, 1], -1, -2), ([0, 0], 1, 2), ([-1, 0], 1, 2)  # ranks and degrees
    states = [dict(zip(("ranks", "tp", "dp", "cpu"), (*each, False), strict=True)) for each in wrong]
    for odd in (None, {}, {"ranks": 3}, {"ranks": [], "cpu": False}, {"ranks": [0], "tp": "1"}, *states):
        with pytest.raises(ArgumentError, match="damaged"):
            ProcessGroup.__new__(ProcessGroup).__setstate__(odd)
    for odd in (None, "0", 1.5, [0]):
        with pytest.raises(ArgumentError, match="must be integers"):
            ShardSpec([odd], [2])  # pyright: ignore[reportArgumentType]


def test_maxima_of_nothing(group: TorchGroup) -> None:
    """A dtype without an order is refused on ranks with no elements, too: nobody waits for them."""
    pg = ranks_of(group)
    warnings.simplefilter("ignore")  # such operators gather
    for dtype in (torch.float8_e5m2, torch.complex64, torch.uint16, torch.float32, torch.int16):
        full = torch.ones(1).to(dtype)
        x = sharded(full, ShardSpec([0], [2]), pg)
        assert plain(x).numel() == (1 if group.rank() == 0 else 0)
        for call in (lambda y: y.max(), lambda y: y.amin(), lambda y: y.max(0)[0], lambda y: y.argmin(0)):
            try:
                wanted = call(full)
            except (NotImplementedError, RuntimeError, TypeError) as error:
                with pytest.raises(type(error)):
                    call(x)
            else:
                result = call(x)
                assert torch.equal(plain(result.to_replicate() if isinstance(result, ColoTensor) else result), wanted)


def test_infinite_norms_of_nothing(group: TorchGroup) -> None:
    warnings.simplefilter("ignore")  # such operators gather
    full = torch.empty(0, 4)
    x = sharded(full, ShardSpec([0], [2]), ranks_of(group))
    for power in (math.inf, -math.inf):
        for dim in (None, 0):
            for y in (full, x):
                with pytest.raises(RuntimeError, match="does not have an identity"):
                    torch.linalg.vector_norm(y, power, dim)
    assert plain(torch.linalg.vector_norm(x, math.inf, 1).to_replicate()).shape == (0,)
