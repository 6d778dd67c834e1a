"""Users of resharding: DTensors and ColoTensors across meshes, checkpoints of another size, matrices on owners."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reshardings import local_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tritoncomm import ArgumentError, MismatchError, ShapeError, p2p, record
from tritoncomm.errors import UnsupportedError
from tritoncomm.reshard import Layout, OwnedExchange, balanced_owners, exchange_owned, reshard, reshard_plan
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.layout import plain


def mesh_of(ranks: Any) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, _init_backend=False)


def coordinates(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> None:
    """The boxes are those of DTensor's own."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout, me = Layout.on_mesh(shape, mesh, placements), dist.get_rank()
    size, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    assert layout.local_shape(me) == tuple(size), (placements, shape)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    theirs = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    assert torch.equal(theirs, local_of(layout, me, full)), (placements, shape)


@pytest.mark.ranks(4)
def test_dtensors_across_meshes(group: TorchGroup) -> None:
    every = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(-1)], [Shard(1), Replicate()]):
        for shape in ((8, 12), (7, 5), (2, 3)):
            coordinates(every, placements, shape)
    coordinates(every, [_StridedShard(0, split_factor=2), Shard(0)], (8, 4))
    with pytest.raises(UnsupportedError, match="split factor"):
        Layout.on_mesh((7, 4), every, [_StridedShard(0, split_factor=2), Shard(0)])
    full, rank = torch.arange(96.0).view(8, 12), group.rank()
    x = distribute_tensor(full, every, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    for ranks, placements in (
        ([[0, 1, 2, 3]], [Replicate(), Shard(1)]),
        ([2, 0], [Shard(0)]),
        ([[3], [1]], [Shard(1)] * 2),
    ):
        goal = mesh_of(ranks)
        y = reshard(x, target=(goal, placements), group=group)
        local = y.to_local() if isinstance(y, DTensor) else y
        assert isinstance(y, DTensor) == (goal.get_coordinate() is not None)
        assert torch.equal(local, local_of(Layout.on_mesh((8, 12), goal, placements), rank, full))
        (grad,) = torch.autograd.grad((local * 2).sum(), x)
        assert isinstance(grad, DTensor)
        assert torch.equal(grad.to_local(), torch.full_like(x.to_local(), 2.0))


@pytest.mark.ranks(4)
def test_colo_tensors_to_other_groups(group: TorchGroup) -> None:
    one, two = ProcessGroup(ranks=[0, 1, 2, 3], tp_degree=4), ProcessGroup(ranks=[0, 1, 2, 3], tp_degree=2)
    full = torch.arange(96.0).view(8, 12)
    for pg, other in ((one, two), (two, one)):
        for spec, goal in ((0, 1), (1, 1), (1, 0)):
            before = ShardSpec([spec], [pg.tp_world_size()])
            after = ShardSpec([goal], [other.tp_world_size()])
            local = full.chunk(pg.tp_world_size(), spec)[pg.tp_local_rank()].clone().requires_grad_()
            x = ColoTensor.from_torch_tensor(local, ColoTensorSpec(pg, before))
            expected = full.chunk(other.tp_world_size(), goal)[other.tp_local_rank()]
            with record.recording() as counts:
                y = x.redistribute(after, other)
            assert torch.equal(plain(y), expected)
            assert ("redistribute", "torch") not in counts, "one exchange, no replica"
            assert [name for name, _ in counts].count("reshard") == 1
            (plain(y) * expected).sum().backward()
            assert torch.equal(local.grad, local)
            z = reshard(x.detach(), target=ColoTensorSpec(other, after), group=group)
            assert isinstance(z, ColoTensor)
            assert (z.process_group, z.dist_spec) == (other, after)
            assert torch.equal(plain(z), expected)
    replica = ColoTensor(full, ColoTensorSpec(one, ReplicaSpec())).redistribute(ShardSpec([0], [2]), two)
    assert torch.equal(plain(replica), full.chunk(2)[two.tp_local_rank()])


@pytest.mark.ranks(4)
def test_checkpoint_at_another_size(group: TorchGroup) -> None:
    """A checkpoint that two ranks loaded, into a model on four, in memory and in another dtype."""
    rank = group.rank()
    shapes = {"up": (12, 8), "down": (8, 12), "norm": (8,), "step": ()}
    full = {name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in shapes.items()}
    old = {name: Layout.on_mesh(shape, [0, 1], [0 if shape else None]) for name, shape in shapes.items()}
    new = {name: Layout.on_mesh(s, range(4), [{"up": 0, "down": 1}.get(name)]) for name, s in shapes.items()}
    state = {name: local_of(old[name], rank, x) for name, x in full.items()}
    model = {name: torch.zeros(new[name].local_shape(rank) or (), dtype=torch.bfloat16) for name in shapes}
    assert reshard(state, old, new, group=group, out=model) is model
    for name, x in full.items():
        assert torch.equal(model[name], local_of(new[name], rank, x.bfloat16()))


def newton_schulz(x: Tensor) -> Tensor:
    """The orthogonalisation of Muon, three steps of it."""
    y = x / (x.norm() + 1e-7)
    for _ in range(3):
        gram = y @ y.T
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return y


@pytest.mark.ranks(4)
def test_matrices_on_their_owners(group: TorchGroup) -> None:
    rank, shapes = group.rank(), {"a": (6, 4), "b": (5, 7), "c": (4, 4), "d": (3, 9), "e": (2, 2)}
    torch.manual_seed(0)
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    layouts = {name: Layout.on_mesh(shape, range(4), [0]) for name, shape in shapes.items()}
    owners = balanced_owners(shapes, range(4))
    assert set(owners.values()) == {0, 1, 2, 3}
    grads = {name: local_of(layouts[name], rank, x) for name, x in full.items()}
    computed = []

    def compute(name: str, x: Tensor) -> Tensor:
        computed.append(name)
        assert torch.equal(x, full[name])
        return newton_schulz(x)

    exchange = OwnedExchange(grads, owners, layouts, group=group)
    for _ in range(2):
        updates = exchange(grads, compute)
        for name, x in full.items():
            assert torch.equal(updates[name], local_of(layouts[name], rank, newton_schulz(x)))
    assert computed == 2 * [name for name in shapes if owners[name] == rank]
    assert exchange.there.transfers.launches + exchange.back.transfers.launches <= 4
    mesh = mesh_of([0, 1, 2, 3])
    sharded = {name: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for name, x in full.items()}
    for name, x in exchange_owned(sharded, owners, compute, group=group).items():
        assert isinstance(x, DTensor)
        assert torch.equal(x.to_local(), local_of(layouts[name], rank, newton_schulz(full[name])))


@pytest.mark.ranks(1, 2)
def test_an_owner_that_computes_in_place(group: TorchGroup) -> None:
    """In memory of its own where shards were exchanged; over one rank it would change the caller's gradient."""
    world, full = group.size(), torch.arange(8.0).view(4, 2)
    layouts = {"a": Layout.on_mesh((4, 2), range(world), [0])}
    shard = local_of(layouts["a"], group.rank(), full).clone()
    exchange = OwnedExchange({"a": shard}, {"a": world - 1}, layouts, group=group)
    before, wanted = shard.clone(), local_of(layouts["a"], group.rank(), 2 * full)
    assert torch.equal(exchange({"a": shard}, lambda _, x: 2 * x)["a"], wanted)
    if world > 1:
        assert torch.equal(exchange({"a": shard}, lambda _, x: x.mul_(2))["a"], wanted)
        assert torch.equal(shard, before)
    else:
        with pytest.raises(ArgumentError, match="compute has changed a in place, which is the caller's tensor here"):
            exchange({"a": shard}, lambda _, x: x.mul_(2))
    with torch.inference_mode():  # without versions
        assert torch.equal(exchange({"a": before.clone()}, lambda _, x: 2 * x)["a"], wanted)


def _raises(_: Any, __: Tensor) -> Tensor:
    raise ValueError("no convergence")


_WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype": (lambda _, x: x.double(), ArgumentError, "a must be a float32 tensor on its owner, not a float64 tensor"),
    "shape": (lambda _, x: x[:1], ShapeError, r"a must have the shape \[4, 2\] on its owner, not \[1, 2\]"),
    "nothing": (lambda _, x: None, ArgumentError, "a must be a float32 tensor on its owner, not a NoneType"),
    "meta": (lambda _, x: x.to("meta"), ArgumentError, "a: a meta tensor has no data to send"),
    "raises": (_raises, ValueError, "no convergence"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG)
def test_what_an_owner_computes_wrongly_raises_on_every_rank(group: TorchGroup, case: str) -> None:
    """In the first call, and with check mode in every one; then the exchange goes on."""
    compute, kind, words = _WRONG[case]
    layouts = {"a": Layout.on_mesh((4, 2), range(2), [0])}
    shard, kind = torch.ones(2, 2), kind if group.rank() == 1 else MismatchError
    exchange = OwnedExchange({"a": shard}, {"a": 1}, layouts, group=group)
    for is_checked in (False, True):
        with p2p.check() if is_checked else nullcontext():
            with pytest.raises(kind, match=words):
                exchange({"a": shard}, compute)
            assert torch.equal(exchange({"a": shard}, lambda _, x: 2 * x)["a"], 2 * shard)
    with pytest.raises(kind, match=words):
        exchange_owned({"a": shard}, {"a": 1}, compute, layouts, group=group)


def test_zigzag(group: TorchGroup) -> None:
    """Contiguous to zigzag and back, of a packed batch of two sequences: boxes along the sequence."""
    rank, world, lengths = group.rank(), group.size(), (16, 32)
    boxes: dict[int, list[Any]] = {r: [] for r in range(world)}
    first = 0
    for length in lengths:
        chunk = length // (2 * world)
        for r in range(world):
            boxes[r] += [((first + k * chunk, 0), (chunk, 3)) for k in (r, 2 * world - 1 - r)]
        first += length
    zigzag, contiguous = Layout.of_boxes((first, 3), boxes), Layout.on_mesh((first, 3), range(world), [0])
    full = torch.arange(first * 3.0).view(first, 3)
    x = local_of(contiguous, rank, full).requires_grad_()
    y = reshard(x, contiguous, zigzag, group=group)
    assert torch.equal(y, local_of(zigzag, rank, full))
    assert torch.equal(reshard(y, zigzag, contiguous, group=group), x)
    (y * y.detach()).sum().backward()
    assert torch.equal(x.grad, x)
    assert reshard_plan(x, contiguous, zigzag, group=group).transfers.launches == 2
