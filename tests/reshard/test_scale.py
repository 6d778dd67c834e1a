"""Plans of many ranks: bytes that each rank lacks, the same messages on both ends, and no growth with the ranks."""

import itertools
import math
import random
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from reshardings import drawn_items, drawn_ranges, lacking

from bench.reshard_models import items_of
from bench.reshard_scale import case_of, measured
from tritoncomm.reshard import Layout, buffer_layouts, planner
from tritoncomm.reshard.api import BUCKET_BYTES
from tritoncomm.reshard.plan import ALIGNMENT, Item, TransferPlan
from tritoncomm.reshard.planner import plan_transfers


def check_ends(plans: list[TransferPlan], limit: int) -> None:
    """Every message is planned by both of its ranks, and the totals are the sums of the ranks' own."""
    world = len(plans)
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        sent = np.array([bucket.send.counts for bucket in buckets])
        received = np.array([bucket.recv.counts for bucket in buckets])
        assert (sent == received.T).all()
        assert max(sent.sum(1).max(), sent.sum(0).max()) <= limit
    totals = plans[-1]
    assert totals.sent.tolist() == [plan.bytes_sent for plan in plans]
    assert totals.received.tolist() == [plan.bytes_received for plan in plans]
    assert totals.messages.tolist() == [sum(bucket.send.messages for bucket in plan.buckets) for plan in plans]
    assert [plan.position for plan in plans] == list(range(world))


def check_drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    world = draw.randint(1, 8)
    items, limit = drawn_items(draw, world), draw.choice([BUCKET_BYTES, 4096])
    for place, item in enumerate(items):
        flat = Layout.flat(item.source.shape, drawn_ranges(draw, item.source.elements, world))
        side = draw.choice(["source", "target", "neither", "neither"])
        items[place] = item if side == "neither" else replace(item, **{side: flat})
    monkeypatch.setattr(planner, "_SMALL_GROUP", draw.choice([0, 256]))
    plans = [plan_transfers(items, range(world), rank, limit) for rank in range(world)]
    check_ends(plans, limit)
    for rank, plan in enumerate(plans):
        needed = sum(lacking(item, rank) for item in items)
        assert int(plan.lacking[rank]) == needed, (seed, rank)
        padding = (ALIGNMENT - 1) * sum(len(items) * bucket.recv.messages for bucket in plan.buckets)
        assert 0 <= plan.bytes_received - needed <= padding, (seed, rank)


def test_bytes_of_drawn_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        check_drawn(seed, monkeypatch)


def blocks_of(plan: TransferPlan) -> list[list[list[int]]]:
    """Columns of every kind of blocks in the order of the plan: sent, received, staged and direct."""
    (bucket,) = plan.buckets
    sides = [[each.tensor[None], each.start, each.size, each.wire[None]] for each in (bucket.send, bucket.recv)]
    stays = [[each.tensor[None], each.source, each.target, each.size] for each in (bucket.staged, bucket.direct)]
    return [np.concatenate(each).T.tolist() for each in (*sides, *stays)]


@pytest.mark.parametrize("every_replica", [False, True])
def test_large_groups_have_the_blocks_of_small_ones(every_replica: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a small group picks its blocks from those of all ranks, of a large one it meets its own boxes."""
    for seed in range(40):
        draw = random.Random(seed)
        world = draw.randint(1, 8)
        items = drawn_items(draw, world)
        for rank in range(world):
            found = []
            for small_group in (0, 256):
                monkeypatch.setattr(planner, "_SMALL_GROUP", small_group)
                found.append(blocks_of(plan_transfers(items, range(world), rank, BUCKET_BYTES, every_replica)))
            assert found[0] == found[1], (seed, rank)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 11_000, 1000))
def test_bytes_of_10000_drawn_layouts(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 1000):
        check_drawn(seed, monkeypatch)


def test_replicas_of_a_large_group_share_the_sending() -> None:
    """320 ranks: bounds take the place of counted bytes, and a tensor that few ranks lack goes round the replicas."""
    world, shape = 320, (40, 64)
    source = Layout.on_mesh(shape, np.arange(world).reshape(8, 40), [None, 0])
    owners = [Layout.replicated(shape, [(37 * index) % world]) for index in range(64)]
    items = [Item(str(index), source, owner, torch.float32, torch.float32) for index, owner in enumerate(owners)]
    plans = {rank: plan_transfers(items, range(world), rank, 2**14) for rank in (0, 37, 319)}
    plan = plans[0]
    for rank, own in plans.items():
        assert (own.bytes_sent, own.bytes_received) == (int(plan.sent[rank]), int(plan.received[rank]))
    assert plan.sent.max() <= 1.05 * 64 * 64 * 4 / 8
    assert plan.largest <= 2**14
    assert len(plan.buckets) == 1, "a bucket that had room for the bytes of one replica alone would be full 8 times"


def test_time_and_memory_of_a_plan_follow_its_blocks() -> None:
    """16 times as many ranks: the same blocks, buckets and nearly the same memory."""
    plans, peaks = [], []
    for ranks in (512, 8192):
        items = items_of(case_of("Llama-3-70B", ranks))
        tracemalloc.start()
        plans.append(plan_transfers(items, range(ranks), 3, BUCKET_BYTES))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    few, many = ([len(side.tensor) for b in plan.buckets for side in (b.send, b.recv)] for plan in plans)
    assert sum(few) == sum(many)
    assert len(few) == len(many)
    assert peaks[1] <= 3 * peaks[0] < 30 * 2**20


def equal_ranges(shape: tuple[int, ...], world: int, shift: int = 0) -> Layout:
    """Ranges of one length, of which ``shift`` elements are missing in the first and more in the last one."""
    elements, run = math.prod(shape), -(-math.prod(shape) // world)
    edges = [0, *(min(max(rank * run - shift, 0), elements) for rank in range(1, world)), elements]
    return Layout.flat(shape, {rank: [pair] for rank, pair in enumerate(itertools.pairwise(edges))})


def targets_of(shape: tuple[int, ...], world: int) -> dict[str, Layout]:
    mesh = np.arange(world // 8 * 8).reshape(-1, 8)
    return {
        "one owner": Layout.replicated(shape, [world - 1]), "replicas": Layout.replicated(shape, range(world)),
        "rows": Layout.on_mesh(shape, range(world), [0]), "columns": Layout.on_mesh(shape, range(world), [-1]),
        "replicas of columns": Layout.on_mesh(shape, mesh, [None, -1]), "blocks": Layout.on_mesh(shape, mesh, [0, -1]),
        "other ranges": equal_ranges(shape, world // 2), "moved ranges": equal_ranges(shape, world, 7),
        "striped": Layout.sequence(shape, 0, "striped", range(world)),
    }  # fmt: skip


def plan_of(
    items: list[Item], world: int, limit: int, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> TransferPlan:
    with monkeypatch.context() as patch:
        patch.setattr(planner, "_SMALL_GROUP", world if is_counted else 0)
        return plan_transfers(items, range(world), world // 3, limit)


SHAPES = (509, 127), (4, 32, 128, 1000), (40,)
MORE = (4096, 11008), (64, 2048, 768), (1280, 3, 2, 14, 14), (128, 1433, 409)


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)], ids=str)
def test_ranges_of_large_groups(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of ranges' bytes are close: what meets a box in every dim need not meet it."""
    world, whole = 257, 4 * math.prod(shape)
    ranges = equal_ranges(shape, world)
    for name, other in targets_of(shape, world).items():
        for pair in ((ranges, other), (other, ranges)):
            item = [Item("w", *pair, torch.float32, torch.float32)]
            for limit in (BUCKET_BYTES, max(whole // 16, 2**17)):
                few, most = (len(plan_of(item, world, limit, monkeypatch, each).buckets) for each in (True, False))
                assert most <= 2 * few, (name, pair[0] is ranges, limit, few, most)


def model_of(layers: int, width: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a model with matrices, experts, a convolution and vectors."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (16 * width, width)}
    for layer in range(layers):
        each = {
            "qkv": (3 * width, width), "down": (width, 3 * width + 1), "experts": (experts, 2 * width, width),
            "convolution": (width, 1, 4), "norm": (width,), "scale": (1,),
        }  # fmt: skip
        shapes |= {f"{layer}.{name}": shape for name, shape in each.items()}
    return shapes


def buffer_of(shapes: dict[str, tuple[int, ...]], world: int) -> dict[str, Layout]:
    """The layouts of tensors in a buffer of which every rank has an equal stretch, as Megatron's optimizer has them."""
    starts = list(itertools.accumulate((-(-math.prod(shape) // 64) * 64 for shape in shapes.values()), initial=0))
    tensors = {name: (start, shape) for start, (name, shape) in zip(starts, shapes.items(), strict=False)}
    run = -(-starts[-1] // world)
    return buffer_layouts(tensors, {rank: (rank * run, (rank + 1) * run) for rank in range(world)})


def pairs_of(shapes: dict[str, tuple[int, ...]], world: int) -> Iterator[tuple[str, list[Item]]]:
    buffer, mesh = buffer_of(shapes, world), np.arange(world).reshape(-1, 8)
    others = {
        "replicas of rows": {name: Layout.on_mesh(shape, mesh, [None, 0]) for name, shape in shapes.items()},
        "rows": {name: Layout.on_mesh(shape, range(world), [0]) for name, shape in shapes.items()},
        "one owner": {name: Layout.replicated(shape, [0]) for name, shape in shapes.items()},
        "half of the ranks": buffer_of(shapes, world // 2),
    }
    for name, other in others.items():
        for way, (source, target) in (("to", (buffer, other)), ("from", (other, buffer))):
            items = [Item(each, source[each], target[each], torch.bfloat16, torch.bfloat16) for each in shapes]
            yield f"{way} {name}", items


def test_buffers_of_large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that divide a buffer have different tensors: the bytes of one are not those of all."""
    for name, items in pairs_of(model_of(8, 256, 8), 320):
        for limit in (BUCKET_BYTES, 2**20):
            few, most = (plan_of(items, 320, limit, monkeypatch, is_counted) for is_counted in (True, False))
            assert len(most.buckets) <= 2 * len(few.buckets), (name, limit, len(few.buckets), len(most.buckets))
        assert most.largest <= 2**20


def test_a_tensor_in_parts_leaves_room_for_others() -> None:
    """Parts of tensors on different ranks share buckets, so that these ranks send at the same time."""
    shapes = {str(index): (8 * 320, 32) for index in range(16)}
    source = buffer_of(shapes, 320)
    mesh = np.arange(320).reshape(-1, 8)
    target = {name: Layout.on_mesh(shape, mesh, [None, 0]) for name, shape in shapes.items()}
    items = [Item(name, source[name], target[name], torch.float32, torch.float32) for name in shapes]
    plan = plan_transfers(items, range(320), 0, 2**13)
    most = max(int(plan.sent.max()), int(plan.received.max()))
    assert len(plan.buckets) <= 2 * -(-most // 2**13), "one tensor after the other would take 16 times as many"


@pytest.mark.slow
def test_flat_layouts_of_8192_ranks() -> None:
    started = time.process_time()
    for _ in pairs_of(shapes := model_of(24, 4096, 128), 8192):
        break
    layouts = time.process_time() - started
    for name, items in pairs_of(shapes, 8192):
        started = time.process_time()
        plan = plan_transfers(items, range(8192), 3, BUCKET_BYTES)
        seconds = layouts + time.process_time() - started
        assert seconds <= 6.0, (name, seconds)  # 3 s, and room for slower machines
        assert plan.buckets, name


@pytest.mark.slow
def test_models_on_many_ranks() -> None:
    llama = [measured("Llama-3-70B", ranks) for ranks in (512, 2048, 8192, 65536)]
    assert max(point.plan for point in llama) <= min(1.0, 2 * min(point.plan for point in llama))
    deepseek = [measured("DeepSeek-V3", ranks) for ranks in (1024, 16384)]
    assert max(point.plan for point in deepseek) <= 3.0
    assert max(point.mebibytes for point in llama + deepseek) <= 200
