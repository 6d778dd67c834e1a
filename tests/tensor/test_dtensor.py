"""Over to DTensor and back on meshes of several axes: values, gradients, redistribution equal to DTensor's."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import layouts, ranks_of, shard_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tritoncomm.errors import GroupError, UnsupportedError
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec

Placements = list[Any]


def mesh_over(group: TorchGroup, shape: tuple[int, ...]) -> TorchMesh:
    ranks = dist.get_process_group_ranks(group)
    return DeviceMesh(ranks, shape, init_process_group=True).to_torch()


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(mesh: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[Placements, _DistSpec]]:
    """Placements beside their ShardSpec: all replicate, every axis another dim, and one dim throughout where even."""
    result: list[tuple[Placements, _DistSpec]] = [([Replicate()] * len(mesh), ReplicaSpec())]
    for dims in itertools.permutations(range(len(shape)), len(mesh)):
        result.append(([Shard(dim) for dim in dims], ShardSpec(list(dims), list(mesh))))
    world = torch.Size(mesh).numel()
    for dim, size in enumerate(shape):
        if size % world == 0:
            result.append(([Shard(dim)] * len(mesh), ShardSpec([dim], [world])))
    return result


def laid_out(full: Tensor, mesh: TorchMesh, placements: Placements) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None).detach().requires_grad_()


@pytest.mark.parametrize(
    ("group", "mesh_shape", "shape"),
    [
        *((4, (2, 2), shape) for shape in ((9, 7), (1, 2))),
        pytest.param(8, (2, 2, 2), (3, 8, 5), marks=pytest.mark.slow),
        *(pytest.param(4, (2, 2), shape, marks=pytest.mark.slow) for shape in ((8, 16), (5, 3, 6), (3, 9))),
        pytest.param(4, (4, 1), (9, 7), marks=pytest.mark.slow),
        pytest.param(4, (1, 4), (5, 6), marks=pytest.mark.slow),
        pytest.param(8, (2, 4), (9, 7), marks=pytest.mark.slow),
        pytest.param(8, (4, 2), (8, 5), marks=pytest.mark.slow),
    ],
    indirect=["group"],
    ids=str,
)
def test_meshes_of_several_axes(group: TorchGroup, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh, rank = mesh_over(group, mesh_shape), group.rank()
    full, weight = values(shape), values(shape, 1)
    result = pairs(mesh_shape, shape)
    for place, step in itertools.product(range(len(result)), range(16 // group.size())):
        (start, spec), (target, expected) = result[place], result[(place + step) % len(result)]
        context = (shape, start, target)
        dtensor, twin = laid_out(full, mesh, start), laid_out(full, mesh, start)
        actual = ColoTensor.from_dtensor(twin)
        assert actual.dist_spec == spec, context
        assert (tuple(actual.size()), actual.data_ptr()) == (shape, twin.to_local().data_ptr()), context
        assert torch.equal(plain(actual), shard_of(full, spec, rank)), context
        redistributed, reference = actual.redistribute(expected), dtensor.redistribute(mesh, target)
        assert torch.equal(plain(redistributed), reference.to_local()), context
        gradient = shard_of(weight, expected, rank)
        (plain(redistributed) * gradient).sum().backward()
        (reference.to_local() * gradient).sum().backward()
        assert isinstance(twin.grad, DTensor)
        assert isinstance(dtensor.grad, DTensor)
        assert torch.equal(twin.grad.full_tensor(), dtensor.grad.full_tensor()), context
        assert torch.equal(dtensor.grad.full_tensor(), weight), context


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [(8, 4), (9, 7), (5, 3, 6)], ids=str)
def test_to_dtensor_and_back(group: TorchGroup, shape: tuple[int, ...]) -> None:
    pg, rank = ranks_of(group), group.rank()
    full, weight = values(shape), values(shape, 1)
    for spec in layouts(len(shape), group.size()):
        x = ColoTensor(shard_of(full, spec, rank), ColoTensorSpec(pg, spec), shape).requires_grad_()
        there = x.to_dtensor()
        dims = [dim % len(shape) for dim in getattr(spec, "dims", ())]
        assert there.placements == tuple(Shard(dim) for dim in dims) or (Replicate(),)
        assert tuple(there.device_mesh.shape) == (tuple(getattr(spec, "num_partitions", ())) or (group.size(),))
        assert (tuple(there.shape), there.stride()) == (shape, full.stride())
        assert there.to_local().data_ptr() == x.data_ptr()
        assert torch.equal(there.detach().full_tensor(), full), spec
        back = ColoTensor.from_dtensor(there)
        assert back.data_ptr() == x.data_ptr()
        assert back.process_group == pg
        assert torch.equal(plain(back.to_replicate()), full)
        (plain(back) * shard_of(weight, spec, rank)).sum().backward()
        assert x.grad is not None
        assert torch.equal(plain(x.grad), shard_of(weight, spec, rank)), spec


@pytest.mark.ranks(8)
def test_what_no_spec_describes_is_refused(group: TorchGroup) -> None:
    mesh, cube = mesh_over(group, (2, 4)), mesh_over(group, (2, 2, 2))
    cases: list[tuple[TorchMesh, Placements, tuple[int, ...], str]] = [
        (mesh, [Partial(), Shard(0)], (8, 8), "neither Shard nor Replicate"),
        (mesh, [_StridedShard(0, split_factor=4), Shard(0)], (8, 8), "neither Shard nor Replicate"),
        (mesh, [Replicate(), Shard(0)], (8, 8), "shards along some axes only"),
        (mesh, [Shard(1), Replicate()], (8, 8), "shards along some axes only"),
        (mesh, [Shard(0), Shard(0)], (9, 8), "shards that no ShardSpec describes"),
        (cube, [Shard(0), Shard(1), Shard(0)], (8, 8), "shards that no ShardSpec describes"),
        (cube, [Shard(0), Shard(1), Shard(1)], (8, 6), "shards that no ShardSpec describes"),
    ]
    for over, placements, shape, context in cases:
        x = DTensor.from_local(torch.zeros(1, 1), over, placements, run_check=False, shape=shape, stride=(shape[1], 1))
        with pytest.raises(UnsupportedError, match=context):
            ColoTensor.from_dtensor(x)
    ranks = dist.get_process_group_ranks(group)
    crossed = DeviceMesh(ranks, logical_mesh_id=[ranks[0::2], ranks[1::2]], init_process_group=True).to_torch()
    with pytest.raises(GroupError, match="do not ascend"):
        ColoTensor.from_dtensor(laid_out(values((8, 8)), crossed, [Shard(0), Shard(1)]))
    spec = ColoTensor.from_dtensor(laid_out(values((8, 8)), cube, [Shard(1), Shard(0), Shard(0)])).dist_spec
    assert spec == ShardSpec([1, 0], [2, 4])


@pytest.mark.ranks(8)
def test_a_group_is_never_made_behind_the_back(group: TorchGroup) -> None:
    ranks = [0, 3, 5, 6]
    mesh = DeviceMesh(ranks, (2, 2), init_process_group=True, need_flatten=False)
    if dist.get_rank() in ranks:
        x = laid_out(values((4, 4)), mesh.to_torch(), [Shard(0), Shard(1)])
        with pytest.raises(GroupError, match=r"have its ranks call ProcessGroup\(ranks=\[0, 3, 5, 6\], tp_degree=4\)"):
            ColoTensor.from_dtensor(x)
    if dist.get_rank() in ranks:
        ProcessGroup(ranks=ranks, tp_degree=4)
        full = plain(ColoTensor.from_dtensor(x).to_replicate())
        assert torch.equal(full, values((4, 4)))
