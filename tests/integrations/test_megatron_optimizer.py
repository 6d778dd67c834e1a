"""Shards of Megatron-core's distributed optimizer: the layouts equal its own range map, and reshard bit for bit."""

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reshardings import local_of, simulate
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm.reshard import Layout
from tritoncomm.reshard.buffers import buffer_views, megatron_layouts
from tritoncomm.reshard.plan import Item

pytest.importorskip("megatron.core")
WORLD = 4
SHAPES = {"embed": (30, 8), "norm": (8,), "up": (24, 8), "down": (8, 24), "scale": (1,)}


def ranges_of(rank: int) -> tuple[dict[str, Layout], dict[str, tuple[int, int]]]:
    """Our layouts on a rank, and its elements of every parameter by Megatron's range map."""
    from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        names = {param: name for name, param in params.items()}
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=200)
        kind, world = param_and_grad_buffer._ParamAndGradBuffer, dist.group.WORLD
        has_names = "params_with_names" in inspect.signature(kind.__init__).parameters
        given: list[Any] = [(param, name) for name, param in params.items()] if has_names else list(names)
        options: dict[str, Any] = {"pg_collection": SimpleNamespace(tp=world, dp_cp=world)}
        if has_names:  # 0.19: the optimizer pads the buckets
            layout = DistributedOptimizer._compute_per_buffer_param_layout(list(names), 200, WORLD, config)
            layout.param_indices = list(range(len(names)))
            options["param_layout"] = layout
        with mock.patch("torch.cuda.current_device", return_value="cpu"):
            buffer = kind(config, torch.float32, torch.float32, given, world, 200, names, 1.0,
                          list(range(len(names))), False, **options)  # fmt: skip
        assert len(buffer.buckets) > 1
        layouts = megatron_layouts([buffer], names)
        own = {}
        for bucket in next(iter(DistributedOptimizer._build_gbuf_range_map(buffer).values())):
            for param, ranges in bucket["param_map"].items():
                own[names[param]] = ranges["param"].start, ranges["param"].end
        return layouts, own
    finally:
        dist.destroy_process_group()


def test_the_range_map_of_the_optimizer() -> None:
    ranks = [ranges_of(rank) for rank in range(WORLD)]
    layouts = ranks[0][0]
    assert list(layouts) == list(SHAPES)
    assert all(theirs == layouts for theirs, _ in ranks)
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards = [
        [full[name].flatten()[slice(*own.get(name, (0, 0)))] for name in SHAPES] for _, own in ranks
    ]  # Megatron's main parameters
    targets = {name: Layout.on_mesh(shape, [[0, 1], [2, 3]], [None, 0]) for name, shape in SHAPES.items()}
    there = [Item(name, layouts[name], targets[name], torch.float32, torch.float32) for name in SHAPES]
    results, _ = simulate(there, shards, 2**20)
    for rank, mine in enumerate(results):
        for name, x in zip(SHAPES, mine, strict=True):
            assert torch.equal(x.view(torch.int32), local_of(targets[name], rank, full[name]).view(torch.int32)), name
    back, _ = simulate([item.reversed() for item in there], results, 512)
    for rank, mine in enumerate(back):
        for x, shard in zip(mine, shards[rank], strict=True):
            assert torch.equal(x.view(torch.int32), shard.view(torch.int32))


def test_views_of_a_shard() -> None:
    tensors = {"a": (0, (3, 4)), "b": (16, (8,))}
    shard = torch.arange(10, 20)
    views = buffer_views(shard, tensors, 10)
    assert views["a"].tolist() == [10, 11]
    assert views["b"].tolist() == [16, 17, 18, 19]
    assert views["b"].data_ptr() == shard[6:].data_ptr()
