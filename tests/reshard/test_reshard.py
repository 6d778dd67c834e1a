"""Resharding over real ranks: drawn layouts under autograd, named cases, refusals on every rank, counted memory."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from bits import bits, random_bits
from reshardings import local_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.tensor import Partial
from traffic import Traffic

from tritoncomm import record
from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError, CommError, GroupError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.reshard import Layout, OwnedExchange, exchange_owned, planner, request, reshard, reshard_plan
from tritoncomm.reshard.plan import ALIGNMENT

EVERY, GRID = range(4), [[0, 1], [2, 3]]
on_mesh = Layout.on_mesh
# What went wrong elsewhere, on four ranks: shape, dtype, source, target.
NAMED: dict[str, tuple[tuple[int, ...], torch.dtype, Any, Any]] = {
    "several dims sharded": ((6, 10), torch.bfloat16, (GRID, [0, 1]), (GRID, [1, 0])),
    "tiny contributions": ((3, 2), torch.uint8, (EVERY, [0]), (EVERY, [1])),
    "sizes that do not divide": ((7, 5, 3), torch.float32, (GRID, [0, 0]), (range(3), [1])),
    "one dim re-sharded": ((12, 3), torch.float16, (EVERY, [0]), (range(3), [0])),
    "overlapping ranks": ((8, 4), torch.float32, ([0, 1, 2], [0]), ([1, 2, 3], [1])),
    "disjoint ranks": ((8, 4), torch.float32, ([0, 1], [0]), ([2, 3], [1])),
    "a rank with nothing": ((5, 4), torch.float64, ([0, 2], [1]), ([2], [None])),
    "replicas to shards": ((8, 4), torch.float32, (GRID, [None, 0]), (EVERY, [0])),
    "ranks in another order": ((8, 4), torch.float32, ([3, 1, 0, 2], [0]), (EVERY, [0])),
    "0-dim": ((), torch.float32, ([0], [None]), ([0, 1, 3], [None])),
    "no elements": ((0, 4), torch.float32, (EVERY, [1]), (EVERY, [0])),
    "bool": ((9,), torch.bool, (EVERY, [0]), (range(2), [0])),
    "fp8": ((9, 3), torch.float8_e4m3fn, (EVERY, [0]), (EVERY, [1])),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMED)
def test_named(group: TorchGroup, name: str) -> None:
    shape, dtype, before, after = NAMED[name]
    source, target, rank = on_mesh(shape, *before), on_mesh(shape, *after), group.rank()
    full = random_bits(shape, dtype)
    x = local_of(source, rank, full)
    strided = torch.stack([x, x], -1)[..., 0] if x.dim() else x  # rows that are not contiguous
    plan = reshard_plan({"w": dtype}, {"w": source}, {"w": target}, group=group)
    expected = local_of(target, rank, full)
    for given in (x, strided, x):
        by_name = plan.execute({"w": given})
        assert list(by_name) == ["w"] * (target.local_shape(rank) is not None)
        for result in (*by_name.values(), reshard(given, source, target, group=group)):
            assert torch.equal(bits(result), bits(expected))
            assert result._base is None
    out = torch.zeros_like(expected).t() if expected.dim() == 2 else torch.zeros_like(expected)
    out = torch.zeros_like(out).t() if expected.dim() == 2 else out  # columns are contiguous
    assert reshard(x, source, target, group=group, out=out) is out
    assert torch.equal(bits(out), bits(expected))


def refused(call: Any, kind: type[CommError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert type(caught.value) is kind


@pytest.mark.ranks(4)
def test_refusals(group: TorchGroup) -> None:
    rank, every = group.rank(), range(4)
    rows, columns = Layout.on_mesh((8, 4), every, [0]), Layout.on_mesh((8, 4), every, [1])
    x = torch.ones(2, 4)
    request._plans.forget(group)  # ranks that have a plan from another test do not compare it

    def go(source: Any = rows, target: Any = columns, given: Any = x, **options: Any) -> Any:
        return lambda: reshard({"w": given}, source, target, **{"group": group, **options})

    refused(go(target=Layout.on_mesh((8, 5), every, [1])), ShapeError, "w is [8, 4]", "[8, 5]")
    # One rank's own mistake: it raises it, and the others say whose it is.
    kind = ShapeError if rank == 2 else MismatchError
    refused(go(given=torch.ones(3, 4) if rank == 2 else x), kind, "w is [3, 4] on rank 2", "[2, 4]")
    holes = Layout.of_boxes((8, 4), {r: [((2 * r, 0), (1 if r == 1 else 2, 4))] for r in every})
    refused(go(source=holes, given=x[:1] if rank == 1 else x), ShapeError, "w is no tiling", "4 of the 32")
    lapping = Layout.of_boxes((8, 4), {r: [((2 * r - (r == 1), 0), (3 if r == 1 else 2, 4))] for r in every})
    refused(go(source=lapping, given=torch.ones(3, 4) if rank == 1 else x), ShapeError, "overlap", "rank 0", "rank 1")
    other = Layout.on_mesh((8, 4), every, [0 if rank == 3 else 1])
    refused(go(target=other), MismatchError, "different plans", "w is", "on rank 3" if rank < 3 else "on rank 0")
    refused(go(bucket_bytes=2**20 + (rank == 1)), MismatchError, "bucket_bytes", str(2**20 + 1))
    refused(go(target=Layout.replicated((8, 4), [0, 9])), GroupError, "[9]", "target layout of w")
    refused(go(given=torch.ones(2, 4, requires_grad=rank == 0)), MismatchError, "with gradient")
    # Beside a plan that is cached, a tensor that stays is looked at, too.
    two, elsewhere = {"w": x, "h": x[:1] if rank == 1 else x}, Layout.on_mesh((8, 4), [0, 9], [0])
    for _ in range(2):
        assert reshard({"w": x, "h": x}, rows, {"w": columns, "h": rows}, group=group)["h"] is x
        sides = ({"w": each, "h": holes} for each in (rows, columns))
        refused(lambda: reshard(two, *sides, group=group), ShapeError, "h is no tiling", "4 of the 32")  # noqa: B023
        sides = ({"w": each, "h": elsewhere} for each in (rows, columns))
        lost = {"w": x, "h": torch.ones(4, 4) if rank == 0 else torch.ones(0)}
        refused(lambda: reshard(lost, *sides, group=group), GroupError, "[9]", "source layout of h")  # noqa: B023
    refused(go(dtype=torch.int32), UnsupportedError, "w cannot be cast")
    refused(go(bucket_bytes=8), ArgumentError, "too small for w")
    refused(go(grad="summed"), ArgumentError, "grad must be")
    refused(go(source={"v": rows}), ArgumentError, "nothing is given for ['w']")
    refused(go(given="w"), ArgumentError, "must be a tensor")
    refused(go(out={"w": torch.ones(8, 2)}), ShapeError, "out w is [8, 2]")
    with pytest.raises(UnsupportedError, match="partial"):
        Layout.on_mesh((8, 4), every, [Partial()])
    assert torch.equal(go()()["w"], torch.ones(8, 1))  # the group is usable
    assert torch.equal(go(bucket_bytes=2**70)()["w"], torch.ones(8, 1))  # no number of bytes is too large
    refused(go(source=Layout.on_mesh((8, 4), range(8), [0])), GroupError, "[4, 5, 6, 7]", "source")


@pytest.mark.ranks(4)
def test_costs(group: TorchGroup) -> None:
    """Memory, passes, messages and bytes, counted while it runs."""
    rank, shape, limit = group.rank(), (64, 96), 2048
    source, target = Layout.on_mesh(shape, range(4), [0]), Layout.on_mesh(shape, [[0, 1], [2, 3]], [1, None])
    full = torch.arange(64 * 96.0).view(shape)
    x = local_of(source, rank, full)
    plan = reshard_plan({"w": torch.float32}, source, target, group=group, bucket_bytes=limit)
    plan.execute({"w": x})
    moved = plan.transfers
    with Traffic() as traffic, record.recording() as counts:
        plan.execute({"w": x})
    (count,) = (each for (name, _), each in counts.items() if name == "reshard")
    assert (count.bytes_copied, count.bytes_sent) == (plan.bytes_copied, plan.bytes_sent)
    assert traffic.moved == plan.bytes_copied
    result = 64 * 48 * 4
    staged = sum(bucket.staged_bytes for bucket in moved.buckets)
    assert traffic.allocated == result + moved.bytes_sent + moved.bytes_received + staged
    sizes = [max(bucket.send.nbytes, bucket.recv.nbytes) for bucket in moved.buckets]
    assert max(sizes) <= limit
    assert len(sizes) > 3
    assert moved.launches == 2 * len(sizes)
    lacks = result - 16 * 48 * 4
    assert lacks <= moved.bytes_received <= lacks + (ALIGNMENT - 1) * sum(b.recv.messages for b in moved.buckets)
    assert "extra memory" in str(plan)
    assert "50 us per step" in str(plan)  # of Gloo


def rows_to_columns(rows: int, columns: int) -> tuple[Tensor, Layout, Layout]:
    """A tensor of different values, and its shards of dim 0 and of dim 1 on two ranks."""
    shape = rows, columns
    full = torch.arange(float(rows * columns)).view(shape)
    return full, Layout.on_mesh(shape, range(2), [0]), Layout.on_mesh(shape, range(2), [1])


def check_in_place(group: TorchGroup) -> None:
    rank, (full, source, target) = group.rank(), rows_to_columns(8, 8)
    memory = local_of(source, rank, full).flatten()
    reshard(memory.view(4, 8), source, target, group=group, out=memory.view(8, 4))
    assert torch.equal(memory.view(8, 4), local_of(target, rank, full))
    # Blocks that are copied directly, before what arrives is unpacked; larger than what a kernel reads at a time.
    full, source, target = rows_to_columns(128, 192)
    memory = local_of(source, rank, full).flatten()
    request._plans.forget(group)  # another test may have had this plan, without direct copies
    with mock.patch.object(planner, "_SMALL", 0):
        assert reshard_plan(full[:64], source, target, group=group).transfers.local_copies
        reshard(memory.view(64, 192), source, target, group=group, out=memory.view(128, 96))
    assert torch.equal(memory.view(128, 96), local_of(target, rank, full))
    full, source, target = rows_to_columns(8, 8)
    memory = local_of(source, rank, full).flatten()
    refused(
        lambda: reshard(memory.view(4, 8), source, target, group=group, out=memory.view(8, 4), bucket_bytes=32),
        ArgumentError, "shares memory", "64",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_in_place_needs_one_bucket(group: TorchGroup, path: Any) -> None:
    with ops.path(path):
        check_in_place(group)


def test_corners(group: TorchGroup) -> None:
    rank, (full, source, target) = group.rank(), rows_to_columns(8, 4)
    x = local_of(source, rank, full)
    # The same layout: the tensor itself. Tied tensors: each of them moves.
    both = reshard({"a": x, "b": x, "c": x}, source, {"a": target, "b": source, "c": target}, group=group)
    assert both["b"] is x
    assert both["a"].data_ptr() != both["c"].data_ptr()
    assert torch.equal(both["a"], both["c"])
    # Results under no_grad require none, and so do integers.
    y = x.clone().requires_grad_()
    with torch.no_grad():
        assert not any(each.requires_grad for each in reshard([y, y], [source, source], [target, source], group=group))
    mixed = reshard([y, x.long()], source, target, group=group)
    assert [each.requires_grad for each in mixed] == [True, False]
    # An expanded tensor; an expanded gradient; twice differentiable; a result that is not used.
    row = torch.ones(1, 4).expand(4, 4)
    assert torch.equal(reshard(row, source, target, group=group), torch.ones(8, 2))
    for grad in ("replicated", "partial"):
        z = y.detach().clone().requires_grad_()
        used, unused = reshard([z * 2, z * 3], source, target, group=group, grad=grad)
        (first,) = torch.autograd.grad((used**3).sum(), z, create_graph=True)
        assert torch.equal(first, 24 * z**2)
        (second,) = torch.autograd.grad(first.sum(), z)
        assert torch.equal(second, 48 * z)
        del unused
    plan = reshard_plan(y, source, target, group=group)
    with pytest.raises(ShapeError, match=r"\[3, 4\]"):
        plan.execute(torch.ones(3, 4))
    with pytest.raises(ArgumentError, match="float64"):
        plan.execute(x.double())
    with pytest.raises(ArgumentError, match="requires grad"):
        reshard_plan(x, source, target, group=group).execute(y)
    out = torch.zeros(8, 2)
    plan.execute(x, out=out)
    assert torch.equal(out, local_of(target, rank, full))


def test_a_plan_without_ranks() -> None:
    source, target = Layout.on_mesh((64, 8), range(64), [0]), Layout.on_mesh((64, 8), range(8), [1])
    plan = reshard_plan({"w": torch.bfloat16}, source, target, ranks=range(64), rank=3)
    assert plan.transfers.bytes_sent == 7 * 16
    assert "64 ranks; rank 3 in 1 bucket" in str(plan)


def test_replicas_share_the_sending() -> None:
    """Large and small tensors in turn, from 4 replicas to 4 other ranks: nobody sends much more than its share."""
    source = Layout.replicated((64, 64), range(4))
    small = Layout.replicated((4,), range(4))
    goal, little = Layout.replicated((64, 64), range(4, 7)), Layout.replicated((4,), range(4, 7))
    tensors = {f"{k}{i}": torch.float32 for i in range(8) for k in ("weight", "bias")}
    pick = lambda a, b: {name: a if name.startswith("w") else b for name in tensors}  # noqa: E731
    plan = reshard_plan(tensors, pick(source, small), pick(goal, little), ranks=range(7), rank=0)
    sent = plan.transfers.sent[:4]
    assert int(sent.sum()) == 3 * 8 * (64 * 64 + 4) * 4
    assert sent.max() <= 1.01 * sent.mean()
    assert not plan.transfers.sent[4:].any()


def test_replicas_share_one_tensor_and_keep_what_they_have() -> None:
    nbytes, full = 64 * 64 * 4, (64, 64)
    source, target = Layout.replicated(full, range(4)), Layout.replicated(full, range(4, 7))
    shared = reshard_plan([torch.float32], source, target, ranks=range(7), rank=0).transfers
    assert sorted(shared.sent.tolist()) == [0, 0, 0, 0, nbytes, nbytes, nbytes]
    source, target = Layout.replicated(full, [0, 1]), Layout.replicated(full, [1, 2])
    kept = reshard_plan([torch.float32], source, target, ranks=range(3), rank=0).transfers
    assert kept.received.tolist() == [0, 0, nbytes]


def test_a_plan_without_a_group_is_not_executed() -> None:
    plan = reshard_plan({"w": torch.float32}, on_mesh((4, 4), [0, 1], [0]), on_mesh((4, 4), [0, 1], [1]), ranks=[0, 1])
    with pytest.raises(GroupError, match="without a group"):
        plan.execute({"w": torch.ones(2, 4)})


WRONG: dict[str, tuple[Any, type[CommError]]] = {
    "a mesh of floats": (lambda: on_mesh((4, 4), [0.5, 1.5], [0]), ArgumentError),
    "a mesh of texts": (lambda: on_mesh((4, 4), ["0", "1"], [0]), ArgumentError),
    "a mesh of no levels": (lambda: on_mesh((4, 4), 1, [0]), ArgumentError),
    "a mesh of no ranks": (lambda: Layout.replicated((4, 4), []), ArgumentError),
    "one element twice": (lambda: Layout.of_boxes((), {0: [((), ()), ((), ())]}), ShapeError),
    "levels of two lengths": (lambda: on_mesh((4, 4), [[0], [1, 2]], [0, 1]), ArgumentError),
    "a text as placement": (lambda: on_mesh((4, 4), [0, 1], ["0"]), ArgumentError),
    "no placements": (lambda: on_mesh((4, 4), [0, 1], None), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a text as size": (lambda: on_mesh(("4", 4), [0, 1], [0]), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a negative size": (lambda: on_mesh((-4, 4), [0, 1], [0]), ShapeError),
    "too many elements": (lambda: on_mesh((2**40, 2**40), [0, 1], [0]), ShapeError),
    "ranks that are one": (lambda: Layout.replicated((4,), 3), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a text as dim": (lambda: Layout.split((4, 4), "0", [2, 2]), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a size of none": (lambda: Layout.split((4, 4), 0, {0: None, 1: 4}), ArgumentError),  # pyright: ignore[reportArgumentType]
    "no sizes": (lambda: Layout.split((4, 4), 0, None), ArgumentError),  # pyright: ignore[reportArgumentType]
    "boxes by no rank": (lambda: Layout.of_boxes((4,), {"a": []}), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a box of one part": (lambda: Layout.of_boxes((4,), {0: [((0,),)]}), ArgumentError),  # pyright: ignore[reportArgumentType]
    "a box of floats": (lambda: Layout.of_boxes((4,), {0: [((0.5,), (1,))]}), ArgumentError),  # pyright: ignore[reportArgumentType]
    "no boxes": (lambda: Layout.of_boxes((4,), None), ArgumentError),  # pyright: ignore[reportArgumentType]
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_no_layout(name: str) -> None:
    call, kind = WRONG[name]
    refused(call, kind)


def test_a_plan_for_a_rank_that_is_not_there() -> None:
    rows = Layout.on_mesh((4, 4), [0, 1], [0])
    for rank in (9, -1, "0"):
        refused(
            lambda rank=rank: reshard_plan({"w": torch.float32}, rows, rows, ranks=[0, 1], rank=rank),
            GroupError, "is not among the ranks [0, 1]",
        )  # fmt: skip
    refused(lambda: reshard_plan({1: torch.int8, "1": torch.int8}, rows, rows, ranks=[0, 1]), ArgumentError, "as text")


def test_wrong_options(group: TorchGroup) -> None:
    """Wrong on one rank: it raises what is wrong, and the other says so."""
    world = group.size()
    rows, columns = (Layout.on_mesh((8, 4), range(world), [dim]) for dim in (0, 1))
    x, own = torch.ones(8 // world, 4), group.rank() == 1

    def go(**options: Any) -> Any:
        return lambda: reshard({"w": x}, rows, columns, **{"group": group, **options})

    for bad in (0, -1, None, "x", 1.5, [1]):
        refused(go(bucket_bytes=bad if own else 2**20), ArgumentError if own else MismatchError, "bucket_bytes")
    refused(go(dtype="float32" if own else torch.float32), ArgumentError if own else MismatchError, "torch.dtype")
    refused(go(out={"w": 3 if own else torch.ones(8, 4 // world)}), ArgumentError if own else MismatchError, "out w")
    with warnings.catch_warnings():  # of torch 2.13: they are deprecated
        warnings.simplefilter("ignore", UserWarning)
        quantized = {"w": torch.quantize_per_tensor(x, 0.5, 0, torch.quint8)}
    refused(lambda: exchange_owned(quantized, {"w": 0}, lambda _, x: x, rows, group=group), ArgumentError, "quantized")
    kept, data = OwnedExchange({"v": x}, {"v": 0}, rows, group=group), {"v": x.to("meta")}
    refused(lambda: kept.collect(data), ArgumentError, "meta tensor")  # on the rank that has nothing to send, too
    refused(lambda: exchange_owned(data, {"v": 1}, lambda _, x: x, rows, group=group), ArgumentError, "meta tensor")
    meta = {"w": x.to("meta") if own else x}
    refused(lambda: reshard(meta, rows, columns, group=group), ArgumentError if own else MismatchError, "meta tensor")
    for tensors, owners in (
        ({"w": "a text"}, {"w": 0}), ({"w": x}, {}), ({"w": x}, {"w": "0"}), ({"w": x}, None), (3, {"w": 0}),
    ):  # fmt: skip
        given = (tensors, owners) if own else ({"w": x}, {"w": 0})
        kind = ArgumentError if own else MismatchError
        refused(lambda given=given: OwnedExchange(*given, rows, group=group), kind, "exchange_owned")
    assert torch.equal(go()()["w"], torch.ones(8, 4 // world))
