"""The passes of a bucket: kernels and torch write the same bits, as many launches as planned, blocks that stay."""

import random
import warnings
from typing import Any

import pytest
import torch
from bits import bits
from reshardings import Recorded, boxes_of, drawn_items, local_of, simulate, values
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from tritoncomm_kernels.launch import Launch

from tritoncomm.core import ops
from tritoncomm.reshard import Layout, planner, reshard, reshard_plan
from tritoncomm.reshard.plan import Item

F32, BF16 = torch.float32, torch.bfloat16
ROWS, COLUMNS = Layout.on_mesh((8, 6), [0, 1], [0]), Layout.on_mesh((8, 6), [0, 1], [1])


def locals_of(items: list[Item], world: int, seed: int) -> list[list[Tensor]]:
    fulls = [values(item, seed + place) for place, item in enumerate(items)]
    return [[local_of(item.source, rank, x) for item, x in zip(items, fulls, strict=True)] for rank in range(world)]


def run_both(
    items: list[Item], given: list[list[Tensor]], limit: int, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Recorded]:
    """Bits of both paths, and the launches of every rank; the plans."""
    counts, before = [0], Launch.__call__

    def counted(self: Launch, *arguments: Any) -> None:
        counts[0] += 1
        before(self, *arguments)

    expected, _ = simulate(items, given, limit, sums)
    with ops.path("triton"), monkeypatch.context() as patch:
        patch.setattr(Launch, "__call__", counted)
        results, plans = simulate(items, given, limit, sums)
    for mine, theirs in zip(results, expected, strict=True):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(mine, theirs, strict=True)), items
    assert counts[0] == 2 * sum(plan.transfers.launches for plan in plans), items  # simulate runs every plan twice
    return plans


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("small", [0, 2**22])  # all blocks that stay are copied directly, or few of them
def test_kernels_copy_the_same_bits_in_the_planned_launches(
    seed: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_SMALL", small)
    items = drawn_items(random.Random(seed), 3)
    run_both(items, locals_of(items, 3, seed), 2**20, False, monkeypatch)


def test_sums_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two replicas and a shard, to another dtype, the own part in its turn."""
    twice = Layout.on_mesh((6, 5), [[0, 1], [2, 3]], [None, 0])
    items = [Item("a", twice, Layout.on_mesh((6, 5), range(4), [1]), F32, F32), Item("b", twice, twice, BF16, F32)]
    run_both(items, locals_of(items, 4, 3), 2**20, True, monkeypatch)


EVERY = range(4)
HALOS = Layout.of_boxes(
    (12, 5), {r: [((first, 0), (size, 5))] for r, (first, size) in enumerate([(0, 5), (1, 7), (4, 7), (7, 5)])}
)
MIDDLE = Layout.of_boxes((12, 5), {r: [((3, 1), (6, 3))] for r in (0, 2)})
# Source (whose blocks are added up) and target, bytes of a bucket.
SUMS = {
    "replicas": (Layout.replicated((12, 5), EVERY), Layout.on_mesh((12, 5), EVERY, [0]), 2**20),
    "replicas to replicas": (Layout.replicated((12, 5), EVERY), Layout.replicated((12, 5), EVERY), 2**20),
    "a mesh": (Layout.on_mesh((12, 5), [[0, 1], [2, 3]], [None, 1]), Layout.on_mesh((12, 5), EVERY, [0]), 2**20),
    "in part": (HALOS, Layout.on_mesh((12, 5), EVERY, [1]), 2**20),
    "the middle": (MIDDLE, Layout.on_mesh((12, 5), EVERY, [0]), 2**20),
    "replicas in buckets": (Layout.replicated((12, 5), EVERY), Layout.on_mesh((12, 5), EVERY, [0]), 128),
    "in part in buckets": (HALOS, Layout.replicated((12, 5), EVERY), 256),
}


def in_order(source: Layout, target: Layout, given: list[list[Tensor]], rank: int, index: int) -> Tensor:
    """The sum in fp32, rank by rank, rounded once."""
    total, is_first = torch.zeros(source.shape), torch.ones(source.shape, dtype=torch.bool)
    for sender, mine in enumerate(given):
        for of_global, of_local in boxes_of(source, sender):
            added = total[of_global] + mine[index][of_local].float()
            total[of_global] = torch.where(is_first[of_global], mine[index][of_local].float(), added)
            is_first[of_global] = False
    return local_of(target, rank, total)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("replicas to replicas", "in part in buckets")))
        for name in SUMS
    ],
)
def test_sums_take_one_unpack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the ranks, also large blocks that stay; one pack and one unpack of every bucket."""
    source, target, limit = SUMS[name]
    monkeypatch.setattr(planner, "_SMALL", 0)
    dtype = BF16 if name == "replicas to replicas" else F32  # rounded once; where the order is seen
    items = [Item("a", source, target, dtype, dtype), Item("b", source, target, dtype, dtype)]
    made = torch.Generator().manual_seed(1)
    given = [
        [torch.randn(source.local_shape(rank) or 0, generator=made).mul(2.0**rank).to(dtype) for _ in items]
        for rank in EVERY
    ]
    plans = run_both(items, given, limit, True, monkeypatch)
    results, _ = simulate(items, given, limit, True)
    for rank, plan in enumerate(plans):
        assert all(count <= 2 for count in plan.transfers.bucket_launches)
        assert any(plan.transfers.complete) == (name != "the middle")
        if name == "in part in buckets":  # the order is that of the buckets
            assert plan.transfers.accumulated == {0, 1}
            continue
        assert not plan.transfers.accumulated
        for index, result in enumerate(results[rank]):
            expected = in_order(source, target, given, rank, index).to(dtype)
            assert torch.equal(bits(result), bits(expected)), (rank, index)


def test_small_blocks_that_stay_cost_no_launches() -> None:
    """Many bytes are copied directly, in one launch, and so is what would need one of its own on another way."""

    def plan(rows: int, tensors: int, target: Any = None) -> Any:
        source, goal = Layout.on_mesh((rows, 4096), [0, 1], [0]), Layout.on_mesh((rows, 4096), [0, 1], [1])
        names = {f"w{i}": F32 for i in range(tensors)}
        return reshard_plan(names, source, target or goal, ranks=[0, 1]).transfers

    small, large, still = plan(64, 9), plan(2048, 2), plan(64, 2, Layout.on_mesh((64, 4096), [[0], [1]], [0, None]))
    assert (small.launches, small.local_copies) == (2, 0)
    assert small.staged_bytes == 9 * 32 * 2048 * 4
    assert (large.launches, large.local_copies, large.staged_bytes) == (3, 2, 0)
    many = plan(64, 17)
    assert (many.launches, many.local_copies, many.staged_bytes) == (3, 17, 0), "4 MiB together"
    assert (still.launches, still.local_copies) == (0, 0), "the same layout: handed back"
    cast = reshard_plan({"w": F32, "v": F32}, ROWS, ROWS, ranks=[0, 1], dtype=BF16).transfers
    assert (cast.launches, cast.local_copies) == (1, 2)


def test_launches_of_casts_are_counted() -> None:
    """One more for every pair of dtypes, on the side where it is cast."""
    for dtypes, results, launches in (
        ({"a": F32}, {"a": BF16}, 2),
        ({"a": BF16}, {"a": F32}, 2),
        ({"a": F32, "b": BF16}, {"a": BF16, "b": BF16}, 3),
        ({"a": F32, "b": BF16}, {"a": BF16, "b": F32}, 4),
    ):
        plan = reshard_plan(dtypes, ROWS, COLUMNS, ranks=[0, 1], dtype=results)
        assert plan.transfers.launches == launches, (dtypes, results)


def test_overlapping_boxes_are_summed(group: TorchGroup) -> None:
    """Results whose boxes overlap on one rank, too: their gradients are summed."""
    rank = group.rank()
    source = Layout.on_mesh((8, 3), [0, 1], [0])
    halos = Layout.of_boxes((8, 3), {0: [((0, 0), (5, 3)), ((3, 0), (3, 3))], 1: [((2, 0), (6, 3))]})
    full = torch.arange(24.0).view(8, 3)
    x = local_of(source, rank, full).requires_grad_()
    y = reshard(x, source, halos, group=group, grad="partial")
    assert torch.equal(y, local_of(halos, rank, full))
    y.sum().backward()
    counts = torch.tensor([1.0, 1, 2, 3, 3, 2, 1, 1])
    assert torch.equal(x.grad, counts.view(2, 4)[rank].view(4, 1).expand(4, 3))


def test_torch_compile_breaks_its_graph(group: TorchGroup) -> None:
    """The graph breaks, with the values and gradients of eager mode."""
    rank, full = group.rank(), torch.arange(48.0).view(8, 6)
    x = local_of(ROWS, rank, full)
    plan = reshard_plan(x, ROWS, COLUMNS, group=group)

    def by_call(x: Tensor) -> Tensor:
        return reshard(x * 2, ROWS, COLUMNS, group=group) + 1

    def by_plan(x: Tensor) -> Tensor:
        return plan.execute(x * 2) + 1

    for function in (by_call, by_plan):
        compiled = torch.compile(function, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(compiled(x), local_of(COLUMNS, rank, full) * 2 + 1)
    y = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo looks at .grad of x * 2
        (torch.compile(by_call, backend="aot_eager")(y) ** 2).sum().backward()
    assert torch.equal(y.grad, 8 * x + 4)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(by_call, backend="aot_eager", fullgraph=True)(x)
