"""Layouts and the transitions between them."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.distspec import _DistSpec

__all__ = [
    "SHAPES",
    "by_reshard",
    "chunked",
    "dims_of",
    "documented",
    "layouts",
    "leads",
    "ranks_of",
    "transitions",
]

SHAPES = (
    (8, 4), (9, 7), (2, 5), (1, 8),
    (4, 8, 4), (5, 4, 6), (1, 6, 7), (3, 1, 9),
    (4, 2, 8, 4), (3, 4, 5, 2), (1, 1, 8, 3),
)  # fmt: skip


ALIGNMENT = 4
"""Elements of 4 bytes to which ``reshard`` aligns a message of each peer."""


def ranks_of(group: TorchGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroup(ranks=ranks, tp_degree=len(ranks))


def layouts(ndim: int, world: int) -> list[_DistSpec]:
    """Replica, every dim of the first three, the last one counted from the end, and several dims in both orders."""
    result = [ReplicaSpec(), ShardSpec([-1], [world]), *(ShardSpec([dim], [world]) for dim in range(min(ndim, 3)))]
    if world == 4:
        result += [ShardSpec([0, 1], [2, 2]), ShardSpec([-1, 0], [2, 2])]
    return result


def dims_of(spec: _DistSpec, ndim: int) -> list[int]:
    return [dim % ndim for dim in getattr(spec, "dims", ())]


def chunked(full: Tensor, spec: _DistSpec, rank: int) -> Tensor:
    """A rank's shard, by ``torch.chunk``; a view."""
    counts = getattr(spec, "num_partitions", ())
    for place, dim in enumerate(dims_of(spec, full.dim())):
        index = rank // math.prod(counts[place + 1 :]) % counts[place]
        shards = full.chunk(counts[place], dim)
        full = shards[index] if index < len(shards) else full.narrow(dim, 0, 0)
    return full


def leads(shape: tuple[int, ...], dim: int) -> bool:
    return math.prod(shape[:dim]) == 1


def documented(shape: tuple[int, ...], old: _DistSpec, new: _DistSpec, rank: int, world: int) -> tuple[int, int]:
    """(elements read plus written, elements of new memory) by the tables of docs/tensor.md.

    Both are upper bounds with ``by_reshard``, of elements of 4 bytes or more.
    """
    before, after = dims_of(old, len(shape)), dims_of(new, len(shape))
    places = torch.arange(math.prod(shape)).view(shape)
    mine, kept = chunked(places, old, rank), chunked(places, new, rank)
    n, k = mine.numel(), kept.numel()
    if (before, getattr(old, "num_partitions", ())) == (after, getattr(new, "num_partitions", ())):
        return 0, 0
    if not before:  # split
        return 2 * k, k
    if not after:  # all-gather
        return (0, k) if len(before) == 1 and leads(shape, before[0]) else (2 * k, 2 * k)
    if len(before) == len(after) == 1:
        packs, unpacks = not leads(mine.shape, after[0]), not leads(kept.shape, before[0])
        return 2 * (n * packs + k * unpacks), max(n * packs + k, k * (1 + unpacks))
    return 2 * (n + k), n + 2 * k + 2 * ALIGNMENT * (world - 1)


def by_reshard(old: _DistSpec, new: _DistSpec) -> bool:
    """Whether the shards of one side are along several dims, and those of the other along some."""
    return min(count := [len(getattr(spec, "dims", ())) for spec in (old, new)]) > 0 and max(count) > 1


def transitions(world: int, shapes: Any = SHAPES) -> Iterator[tuple[tuple[int, ...], _DistSpec, _DistSpec]]:
    for shape in shapes:
        for old, new in itertools.product(layouts(len(shape), world), repeat=2):
            yield shape, old, new
