"""Transitions between layouts, and their documented traffic."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from shards import layouts, shard_of

from tritoncomm.tensor.distspec import _DistSpec

__all__ = ["SHAPES", "by_reshard", "dims_of", "documented", "transitions"]

SHAPES = (
    (8, 4), (9, 7), (2, 5), (1, 8),
    (4, 8, 4), (5, 4, 6), (1, 6, 7), (3, 1, 9),
    (4, 2, 8, 4), (3, 4, 5, 2), (1, 1, 8, 3),
)  # fmt: skip


ALIGNMENT = 4
"""Elements of 4 bytes to which ``reshard`` aligns a message of each peer."""


def dims_of(spec: _DistSpec, ndim: int) -> list[int]:
    return [dim % ndim for dim in getattr(spec, "dims", ())]


def leads(shape: tuple[int, ...], dim: int) -> bool:
    return math.prod(shape[:dim]) == 1


def documented(shape: tuple[int, ...], old: _DistSpec, new: _DistSpec, rank: int, world: int) -> tuple[int, int]:
    """(elements read plus written, elements of new memory) by the tables of docs/tensor.md.

    Both are upper bounds with ``by_reshard``, of elements of 4 bytes or more.
    """
    before, after = dims_of(old, len(shape)), dims_of(new, len(shape))
    places = torch.arange(math.prod(shape)).view(shape)
    mine, kept = shard_of(places, old, rank), shard_of(places, new, rank)
    n, k = mine.numel(), kept.numel()
    if (before, getattr(old, "num_partitions", ())) == (after, getattr(new, "num_partitions", ())):
        return 0, 0
    if not before:  # split
        return 2 * k, k
    if not after:  # all-gather
        counts = [shard_of(places, old, each).numel() for each in range(world)]
        largest = max(counts)
        is_padded = min(counts) < largest and 8 * largest * world <= 9 * sum(counts)
        wire, padding = (largest * world, 2 * n * (n < largest)) if is_padded else (k, 0)
        if len(before) == 1 and leads(shape, before[0]):
            return padding, wire
        own = largest if padding and len(before) > 1 else 0  # in memory of its own
        return padding + 2 * k, own + wire + k
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
