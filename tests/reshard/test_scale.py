"""Plans of many ranks: bytes that each rank lacks, the same messages on both ends, and no growth with the ranks."""

import random
import tracemalloc

import numpy as np
import pytest
import torch
from reshardings import drawn_items, lacking

from bench.reshard_models import items_of
from bench.reshard_scale import case_of, measured
from tritoncomm.reshard import Layout, planner
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


@pytest.mark.slow
def test_models_on_many_ranks() -> None:
    llama = [measured("Llama-3-70B", ranks) for ranks in (512, 2048, 8192, 65536)]
    assert max(point.plan for point in llama) <= min(1.0, 2 * min(point.plan for point in llama))
    deepseek = [measured("DeepSeek-V3", ranks) for ranks in (1024, 16384)]
    assert max(point.plan for point in deepseek) <= 3.0
    assert max(point.mebibytes for point in llama + deepseek) <= 200
