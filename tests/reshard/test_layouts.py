"""Drawn layouts against gathering and slicing: values, gradients, bytes, messages, launches and memory; one process."""

import random
from unittest import mock

import pytest
import torch
from bits import bits
from reshardings import Recorded, boxes_of, drawn_items, lacking, local_of, simulate, values
from torch import Tensor

from tritoncomm.reshard import Layout, planner
from tritoncomm.reshard.plan import ALIGNMENT, Item, Side

BLOCK = 40


def fulls(items: list[Item], seed: int) -> list[Tensor]:
    return [values(item, seed + place) for place, item in enumerate(items)]


def check_values(items: list[Item], tensors: list[Tensor], bucket_bytes: int, world: int) -> list[Recorded]:
    locals_ = [
        [local_of(item.source, rank, x) for item, x in zip(items, tensors, strict=True)] for rank in range(world)
    ]
    results, plans = simulate(items, locals_, bucket_bytes)
    for rank, mine in enumerate(results):
        for item, x, result in zip(items, tensors, mine, strict=True):
            expected = local_of(item.target, rank, x.to(item.result))
            assert result.dtype == item.result
            assert result.shape == expected.shape, (item, rank)
            assert torch.equal(bits(result), bits(expected)), (item, rank)
    return plans


def check_costs(items: list[Item], plans: list[Recorded], bucket_bytes: int, world: int) -> None:
    for rank, plan in enumerate(plans):
        moved = plan.transfers
        needed = [lacking(item, rank) for item in items]
        assert int(moved.lacking[rank]) == sum(needed)
        pairs = sum(len({*zip(b.recv.tensor.tolist(), peers_of(b.recv), strict=True)}) for b in moved.buckets)
        assert 0 <= moved.bytes_received - sum(needed) <= (ALIGNMENT - 1) * pairs
        for bucket in moved.buckets:
            assert max(bucket.send.nbytes, bucket.recv.nbytes) <= moved.largest <= bucket_bytes
            assert max(bucket.send.messages, bucket.recv.messages) <= world - 1
            assert bucket.send.counts[rank] == bucket.recv.counts[rank] == 0
        casts = {(item.dtype, item.result) for item in items if item.dtype is not item.result}
        for bucket, launches in zip(moved.buckets, moved.bucket_launches, strict=True):
            copies = 1 + len(casts) if len(bucket.direct.tensor) else 0
            assert launches <= 2 + len(casts) + copies
        assert moved.staged_bytes <= bucket_bytes
        assert [int(other.transfers.sent[rank]) for other in plans] == [moved.bytes_sent] * world


def peers_of(side: Side) -> list[int]:
    """The peer of every block, by where it is on the wire."""
    ends = torch.tensor(side.counts).cumsum(0)
    return torch.searchsorted(ends, torch.from_numpy(side.wire), right=True).tolist()


def check_gradients(items: list[Item], bucket_bytes: int, world: int, sums: bool) -> None:
    """Small integers, whose sums are exact; replicas of a gradient are equal, or each of them counts."""
    back = [item.reversed() for item in items if item.has_grad]
    if not sums and any("overlap" in item.source.problem for item in back):
        return
    every = range(world)
    full = [torch.randint(-4, 4, item.source.shape).to(item.dtype) for item in back]
    grads = [[local_of(item.source, rank, x) for item, x in zip(back, full, strict=True)] for rank in every]
    if sums:
        grads = [[torch.randint_like(x, -4, 4) for x in mine] for mine in grads]
    results, _ = simulate(back, grads, bucket_bytes, sums)
    for place, item in enumerate(back):
        total = torch.zeros(item.source.shape, dtype=torch.float64)
        for rank in every:
            for of_global, of_local in boxes_of(item.source, rank):
                value = grads[rank][place][of_local].double()
                total[of_global] = value + total[of_global] if sums else value
        for rank in every:
            expected = local_of(item.target, rank, total.to(item.result))
            assert torch.equal(results[rank][place], expected), (item, rank, sums)


def run_case(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    world = draw.randint(1, 8)
    items = drawn_items(draw, world)
    bucket_bytes = draw.choice([2**20, 2**20, 16 * world, 64 * world, 1024])
    # Upper bounds of the bytes of ranks take the place of exact ones, as in large groups.
    is_large = bucket_bytes > 64 * world and draw.random() < 0.4
    with mock.patch.object(planner, "_SMALL_GROUP", 0 if is_large else planner._SMALL_GROUP):
        plans = check_values(items, fulls(items, seed), bucket_bytes, world)
        check_costs(items, plans, bucket_bytes, world)
        check_gradients(items, bucket_bytes * 4, world, draw.random() < 0.5)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= 80)) for first in range(0, 2000, BLOCK)]
)
def test_drawn_layouts(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run_case(seed)


def test_a_layout_has_those_of_its_submeshes_as_parts() -> None:
    whole = Layout.on_mesh((8, 12), [[0, 1], [2, 3]], [0, None])
    for ranks in ([0, 2], [1, 3], [0, 3]):
        assert whole.has_part(Layout.on_mesh((8, 12), ranks, [0]))
    assert whole.has_part(whole)
    for other in (
        Layout.on_mesh((8, 12), [2, 0], [0]),
        Layout.on_mesh((8, 12), [0, 2], [1]),
        Layout.on_mesh((8, 13), [0, 2], [0]),
        Layout.on_mesh((8, 12), [0, 4], [0]),
        Layout.on_mesh((8, 12), [0, 1, 2, 3], [0]),
        Layout.replicated((8, 12), [0, 2]),
    ):
        assert not whole.has_part(other), other
